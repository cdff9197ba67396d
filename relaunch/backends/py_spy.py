"""Finds the py-spy of this installation, and packs it for nodes.

It is one static program (package py-spy, MIT licence), so a node needs nothing else. Nothing here
runs it.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import shutil
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NAME = "py-spy"
CHUNK_BYTES = 512 * 1024
_ELF = b"\x7fELF"
_MACHINE_AT = 18
"""Offset of e_machine in the header of an ELF file (elf(5))."""
_MACHINES = {0x28: "armv7l", 0x3E: "x86_64", 0xB7: "aarch64"}
"""Those for which there are wheels, as `uname -m` names them."""


class NoProgramError(Exception):
    """There is no py-spy that could be sent to a node. The text says why, as a clause."""


@dataclass(frozen=True, slots=True)
class Program:
    data: bytes
    sha256: str
    machine: str
    """The machine that it runs on, as `uname -m` names it."""

    def pack(self) -> Iterator[tuple[int, str]]:
        """Yield the parts with their offsets, each packed by zlib and written as base64."""
        for offset in range(0, len(self.data), CHUNK_BYTES):
            packed = zlib.compress(self.data[offset : offset + CHUNK_BYTES])
            yield offset, base64.b64encode(packed).decode()


def find_program() -> Path | None:
    """Return the py-spy beside this interpreter, else the one on PATH; None: there is none."""
    own = Path(sysconfig.get_path("scripts")) / NAME
    if own.is_file():
        return own
    on_path = shutil.which(NAME)
    return None if on_path is None else Path(on_path)


def read_program() -> Program:
    """Read the py-spy of this installation. It is kept: the next caller gets the same.

    Raises:
        NoProgramError: There is none, or it does not run on Linux.
    """
    path = find_program()
    if path is None:
        raise NoProgramError("the installation of relaunch has none")
    return _read(path)


@functools.lru_cache(maxsize=1)
def _read(path: Path) -> Program:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise NoProgramError(f"{path} cannot be read: {error.strerror}") from None
    machine = _MACHINES.get(int.from_bytes(data[_MACHINE_AT : _MACHINE_AT + 2], "little"))
    if not data.startswith(_ELF) or machine is None:
        raise NoProgramError(
            f"{path} is not a program for Linux on {' or '.join(_MACHINES.values())}"
        )
    return Program(data, hashlib.sha256(data).hexdigest(), machine)
