"""The port that rank 0 will listen on, held from `prepare` until the ranks start."""

from __future__ import annotations

import random
import socket

from relaunch.agent.protocol import Refusal
from relaunch.agent.ranks import peers


def hold_port(address: str) -> socket.socket:
    """Bind a free port for MASTER_PORT, preferably below the kernel's ephemeral port range.

    Raises:
        Refusal: No port is free, or the address cannot be resolved.
    """
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        lowest = int(file.read().split()[0])
    candidates = random.sample(range(20000, lowest), 20) if lowest > 20100 else []
    for port in [*candidates, 0]:
        try:
            return peers.bind(address, port)
        except OSError:
            continue
    raise Refusal("cannot_start", f"no port is free on {address}")


def release_port(holder: socket.socket) -> None:
    """Release a port that `hold_port` bound, so that rank 0 can bind it.

    A helper of the shim that was just forked has a copy of the socket until it runs for the first
    time, which takes longer on a busy node than a rank needs to bind. The option is one of the
    socket, not of the descriptor: with it Linux lets others bind the port although the copy is
    open, if they set it as well (socket(7)). TCPStore, gRPC and Python's create_server do.
    """
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.close()
