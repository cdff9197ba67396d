"""Copies the output of ranks to stdout, where log drivers collect a container's output.

It follows the log files, not the processes.
"""

from __future__ import annotations

import select
from pathlib import Path
from typing import Dict

from relaunch.agent.children import write
from relaunch.agent.ranks import retention

COPY_EVERY = 0.2
AT_ONCE = 65536


def copy_logs(logs: Dict[int, Path], over: int) -> None:
    """Copy what is appended to logs to stdout, until the other end of `over` is closed.

    With several logs, the rank precedes each line.
    """
    offsets, rests = dict.fromkeys(logs, 0), dict.fromkeys(logs, b"")
    several = len(logs) > 1
    last = False
    while not last:
        ready, _, _ = select.select([over], [], [], COPY_EVERY)
        last = bool(ready)
        for rank, path in logs.items():
            while True:
                try:
                    with open(path, "rb") as file:
                        offsets[rank] = retention.find_data(file.fileno(), offsets[rank])
                        file.seek(offsets[rank])
                        data = file.read(AT_ONCE)
                except FileNotFoundError:
                    break
                if not data:
                    break
                offsets[rank] += len(data)
                if not several:
                    write(1, data)
                    continue
                *lines, rest = (rests[rank] + data).split(b"\n")
                if len(rest) > AT_ONCE:  # no line break, such as a progress bar or binary data
                    lines, rest = [*lines, rest], b""
                rests[rank] = rest
                write(1, b"".join(b"[rank %d] %s\n" % (rank, text) for text in lines))
    for rank, rest in rests.items():
        if rest:
            write(1, b"[rank %d] %s\n" % (rank, rest))
