"""The power switch of a virtual machine.

As a fleet file's `power: {cycle: [python, power.py, cycle, SOCKET]}` calls it.

    power.py cycle SOCKET    off and on again, whatever state it is in
    power.py freeze SOCKET   it answers nothing any more, as a machine whose kernel has locked up

SOCKET is where QEMU listens for its machine protocol (QMP). A cycle leaves the time in a file
beside it.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ORDERS = {"cycle": ("system_reset", "cont"), "freeze": ("stop",)}
PATIENCE = 10.0
"""Seconds. QEMU answers in milliseconds; a machine that shares its two cores with a build may take
longer."""


def order(path: Path, what: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(PATIENCE)
        connection.connect(str(path))
        with connection.makefile("rw") as file:
            file.readline()  # its greeting
            for command in ("qmp_capabilities", *ORDERS[what]):
                file.write(json.dumps({"execute": command}) + "\n")
                file.flush()
                answer = _answer(file)
                if "error" in answer:
                    raise RuntimeError(f"QEMU refuses {command}: {answer['error']['desc']}")


def _answer(lines: Iterable[str]) -> dict[str, Any]:
    for line in lines:
        told: dict[str, Any] = json.loads(line)
        if "return" in told or "error" in told:  # all else are events
            return told
    raise ConnectionResetError("QEMU has closed its socket")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ORDERS:
        sys.exit(f"expected: power.py {'|'.join(ORDERS)} SOCKET")
    order(Path(sys.argv[2]), sys.argv[1])
    if sys.argv[1] == "cycle":
        Path(sys.argv[2]).with_suffix(".cycled").write_text(str(time.time()))
