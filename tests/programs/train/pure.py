"""Fit a line by data-parallel gradient descent, with the standard library alone.

Ranks add their gradients up at rank 0 over a socket. A checkpoint is written every five steps.
"""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import time
from pathlib import Path

import fault
import outcome

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ADDRESS = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1)
"""The port after the one of torchrun, whose agent has its store on that one."""
STEPS = int(os.environ.get("STEPS", "30"))
CHECKPOINT = Path("out/checkpoint.json")


def connect() -> list[socket.socket]:
    if RANK == 0:
        with socket.create_server(ADDRESS, reuse_port=False) as server:
            return [server.accept()[0] for _ in range(WORLD - 1)]
    while True:
        try:
            return [socket.create_connection(ADDRESS)]
        except ConnectionRefusedError:
            time.sleep(0.05)


def receive(peer: socket.socket) -> tuple[float, ...]:
    data = b""
    while len(data) < 24:
        part = peer.recv(24 - len(data))
        if not part:
            raise ConnectionResetError("connection closed by peer")
        data += part
    return struct.unpack("3d", data)


def all_reduce(peers: list[socket.socket], values: tuple[float, ...]) -> tuple[float, ...]:
    if RANK:
        peers[0].sendall(struct.pack("3d", *values))
        return receive(peers[0])
    # In the order of the values, not of arrival: the last bits follow from the order.
    terms = sorted([values, *(receive(peer) for peer in peers)])
    total = tuple(sum(column) / WORLD for column in zip(*terms, strict=True))
    for peer in peers:
        peer.sendall(struct.pack("3d", *total))
    return total


def main() -> None:
    CHECKPOINT.parent.mkdir(exist_ok=True)
    weights, step, loss = [0.0, 0.0], 0, 0.0
    if CHECKPOINT.exists():
        saved = json.loads(CHECKPOINT.read_text())
        weights, step = saved["weights"], saved["step"]
    print(f"rank {RANK} of {WORLD} starts at step {step}")
    peers = connect()
    while step < STEPS:
        batch = random.Random(f"{step}/{RANK}")
        slope = offset = square = 0.0
        for _ in range(32):
            x = batch.random()
            error = weights[0] * x + weights[1] - (3.0 * x + 1.0)
            slope, offset, square = slope + error * x, offset + error, square + error * error
        slope, offset, loss = all_reduce(peers, (slope / 32, offset / 32, square / 32))
        weights[0] -= 0.5 * slope
        weights[1] -= 0.5 * offset
        step += 1
        time.sleep(0.05)
        if RANK == 0:
            print(f"step {step}: loss {loss:.6f}")
            if step % 5 == 0:
                print(f"saving checkpoint {step}")
                fault.saving(step)
                partial = CHECKPOINT.with_suffix(".partial")
                partial.write_text(json.dumps({"weights": weights, "step": step}))
                partial.replace(CHECKPOINT)
            if step == STEPS // 2:
                fault.evaluating(step)
        # A barrier: rank 0 has printed the step before another rank fails at it.
        all_reduce(peers, (0.0, 0.0, 0.0))
        fault.at(step)
    outcome.write([struct.pack("2d", *weights)], loss)


if __name__ == "__main__":
    main()
