"""Clocks of processes that are stepped while they run.

By a library that is loaded before libc (`clocks.c`).

libfaketime would do for a clock that is wrong from the start; it also changes how processes wait
(clock_nanosleep fails with EINVAL when its offset changes), which no step of a machine's clock
does.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("clocks.c")
NANOSECONDS = 1_000_000_000


def find_obstacle() -> str | None:
    """Return why no clock can be stepped here; None: it can."""
    return None if shutil.which("gcc") else "to step a clock needs gcc"


class Clocks:
    """The wall clock and CLOCK_BOOTTIME of all processes with `variables` in their environment."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        library, self._file = folder / "clocks.so", folder / "steps"
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE)], check=True
        )
        self._wall = self._boot = 0.0
        self._file.write_bytes(bytes(16))
        self.variables = {"LD_PRELOAD": str(library), "STEPPED_CLOCKS": str(self._file)}

    def step_wall(self, seconds: float) -> None:
        """Step the wall clock by so many seconds."""
        self._wall += seconds
        self._write()

    def step_boot(self, seconds: float) -> None:
        """Step CLOCK_BOOTTIME back by as long as a machine and its clock stood still."""
        self._boot += seconds
        self._write()

    def reset_wall(self) -> None:
        self.step_wall(-self._wall)

    def _write(self) -> None:
        with self._file.open("r+b") as file:  # in place: it is mapped
            file.write(
                struct.pack("qq", int(self._wall * NANOSECONDS), int(self._boot * NANOSECONDS))
            )
