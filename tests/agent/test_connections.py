"""Connections whose other end acknowledges nothing any more, between real networks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from real_node import wait_for

from relaunch.agent.connections import read_connections
from tests.backends.netns import Network

PORT = 4700
LISTEN = f"""
import socket, time
server = socket.create_server(("0.0.0.0", {PORT}))
print("listens", flush=True)
kept, _ = server.accept()
print("accepted", flush=True)
time.sleep(1000)
"""
SEND = f"""
import socket, sys, time
kept = socket.create_connection((sys.argv[1], {PORT}))
print("connected", flush=True)
sys.stdin.readline()
kept.sendall(b"x" * 1000)
time.sleep(1000)
"""


def start(prefix: tuple[str, ...], *words: str) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, "-S", "-c", *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_peer_that_is_cut_off_differs_from_a_stopped_one() -> None:
    network = Network(2)
    processes = []
    try:
        listener = start(network.inside(2), LISTEN)
        processes.append(listener)
        assert listener.stdout is not None and listener.stdout.readline()
        sender = start(network.inside(1), SEND, "10.98.0.12")
        processes.append(sender)
        assert sender.stdout is not None and sender.stdin is not None
        assert sender.stdout.readline() and listener.stdout.readline()
        healthy = {"addresses": ["10.98.0.11"], "stuck": []}
        assert read_connections(sender.pid) == healthy
        listener.send_signal(signal.SIGSTOP)
        assert read_connections(sender.pid) == healthy, "its kernel acknowledges"

        network.lose(2, "training")
        sender.stdin.write("\n")
        sender.stdin.flush()
        found = wait_for(lambda: read_connections(sender.pid)["stuck"])
        assert len(found) == 1 and found[0]["retries"] >= 3
        assert (found[0]["local"], found[0]["remote"]) == ("10.98.0.11", "10.98.0.12")
        assert found[0]["unacknowledged"] == 1000
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        network.close()


def test_a_process_without_connections_has_none(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        assert read_connections(process.pid) == {"addresses": [], "stuck": []}
        process.kill()
    assert read_connections(process.pid) == {"addresses": [], "stuck": []}, "it is gone"


def test_addresses_of_both_families_are_read() -> None:
    with (
        socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server,
        socket.create_connection(("127.0.0.1", server.getsockname()[1])),
        socket.create_connection(("::1", server.getsockname()[1])),
    ):
        assert {"127.0.0.1", "::1"} <= set(read_connections(os.getpid())["addresses"])
