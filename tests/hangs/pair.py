"""A rank of two that wait for each other at every step, with the standard library alone.

Ranks exchange a byte over a socket each step. STEP_SECONDS is how long a step computes, STEPS how
many there are. With STOP_AT=step:rank a rank stops itself there, once, and writes the moment into
`began.json`. The times of rank 0's steps go to `times.json`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

RANK = int(os.environ["RANK"])
ADDRESS = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1)
STEPS = int(os.environ.get("STEPS", "200"))
STEP_SECONDS = float(os.environ.get("STEP_SECONDS", "0.05"))
STOP_AT = tuple(int(one) for one in os.environ.get("STOP_AT", "0:0").split(":"))
BEGAN = Path("began.json")


def connect() -> socket.socket:
    if RANK == 0:
        with socket.create_server(ADDRESS) as server:
            return server.accept()[0]
    while True:
        try:
            return socket.create_connection(ADDRESS)
        except ConnectionRefusedError:
            time.sleep(0.05)


def main() -> None:
    peer, times = connect(), []
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for step in range(1, STEPS + 1):
        begun = time.perf_counter()
        if (step, RANK) == STOP_AT and not BEGAN.exists():
            mark = {"at": time.time(), "rank": RANK, "node": os.environ.get("RELAUNCH_NODE", "")}
            BEGAN.write_text(json.dumps(mark))
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(STEP_SECONDS)
        peer.sendall(b"x")
        if not peer.recv(1):
            raise ConnectionResetError("connection closed by peer")
        times.append(time.perf_counter() - begun)
        if RANK == 0:
            print(f"step {step}", flush=True)
    if RANK == 0:
        Path("times.json").write_text(json.dumps(times))


if __name__ == "__main__":
    main()
