"""Reads the TCP connections of a process: which of them the other end no longer acknowledges.

A host that is gone or cut off closes no connection: who waits for it waits without end. The kernel
knows, because it sends the same segment again and again (RFC 6298). A process that is only stopped
still has its kernel acknowledge. Format: Linux Documentation/networking/proc_net_tcp.rst.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Dict, List, Set, Tuple

from relaunch.agent.protocol import Json

MIN_RETRIES = 3
"""Retransmissions in a row without an acknowledgement: more than a second with Linux's first
time-out of 200 ms, which doubles. A line that only loses packets acknowledges in between."""
MAX_SOCKETS = 4096
MAX_STUCK, MAX_ADDRESSES = 16, 8
MAX_TABLE_BYTES = 4 * 1024 * 1024
ESTABLISHED, RETRANSMITS = "01", "01"
"""Of the columns `st` and `tr`."""


def read_connections(pid: int) -> Json:
    """Return the field `network` of a rank: its own addresses, and its connections that are stuck.

    Empty lists if the process may not be looked into.
    """
    sockets = _list_sockets(pid)
    rows = [
        row
        for name in ("tcp", "tcp6")
        for row in _read_table(f"/proc/{pid}/net/{name}")
        if row["inode"] in sockets
    ]
    stuck = [row for row in rows if row["timer"] == RETRANSMITS and row["retries"] >= MIN_RETRIES]
    stuck.sort(key=lambda row: (-row["retries"], row["local"], row["remote"]))
    # Of the stuck ones first: there may be more than fit.
    addresses: Dict[str, None] = {row["local"]: None for row in [*stuck, *rows]}
    return {
        "addresses": list(addresses)[:MAX_ADDRESSES],
        "stuck": [
            {name: row[name] for name in ("local", "remote", "retries", "unacknowledged")}
            for row in stuck[:MAX_STUCK]
        ],
    }


def _list_sockets(pid: int) -> Set[str]:
    folder = f"/proc/{pid}/fd"
    found: Set[str] = set()
    try:
        for name in os.listdir(folder)[:MAX_SOCKETS]:
            try:
                target = os.readlink(f"{folder}/{name}")
            except FileNotFoundError:  # closed meanwhile
                continue
            if target.startswith("socket:["):
                found.add(target[len("socket:[") : -1])
    except OSError:  # the process is gone, or another user's
        return found
    return found


def _read_table(path: str) -> List[Json]:
    try:
        with open(path, "rb") as file:
            lines = file.read(MAX_TABLE_BYTES).decode("ascii", "replace").splitlines()[1:]
    except OSError:  # gone, or a kernel without IPv6
        return []
    rows = []
    for text in lines:
        fields = text.split()
        if len(fields) < 10 or fields[3] != ESTABLISHED:
            continue
        try:
            rows.append(
                {
                    "local": _parse_address(fields[1]),
                    "remote": _parse_address(fields[2]),
                    "unacknowledged": int(fields[4].partition(":")[0], 16),
                    "timer": fields[5].partition(":")[0],
                    "retries": int(fields[6], 16),
                    "inode": fields[9],
                }
            )
        except (ValueError, struct.error):  # the last line may be cut off
            continue
    return rows


def _parse_address(text: str) -> str:
    """Return an address without its port: words in hexadecimal, each in the host's byte order."""
    words: Tuple[int, ...] = tuple(
        int(text[start : start + 8], 16) for start in range(0, text.index(":"), 8)
    )
    packed = struct.pack(f"={len(words)}I", *words)
    if len(words) == 1:
        return socket.inet_ntop(socket.AF_INET, packed)
    if packed[:12] == b"\0" * 10 + b"\xff\xff":
        return socket.inet_ntop(socket.AF_INET, packed[12:])
    return socket.inet_ntop(socket.AF_INET6, packed)
