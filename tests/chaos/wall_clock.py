"""The wall clock of a process, stepped while it runs (libfaketime). Its other clocks go on as they are."""

from __future__ import annotations

from pathlib import Path

FOLDERS = ("/usr/lib/x86_64-linux-gnu/faketime", "/usr/lib/aarch64-linux-gnu/faketime", "/usr/lib/faketime")
LIBRARY = next((path for folder in FOLDERS if (path := Path(folder, "libfaketime.so.1")).exists()), None)


def find_obstacle() -> str | None:
    return None if LIBRARY is not None else "to step a wall clock needs libfaketime (package libfaketime)"


def variables(file: Path) -> dict[str, str]:
    """Return the environment of processes whose wall clock is ahead by what `file` says (see `step`)."""
    step(file, 0.0)
    return {
        "LD_PRELOAD": str(LIBRARY),
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_NO_CACHE": "1",  # else a step is seen 10 s later
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DONT_RESET": "1",
    }


def step(file: Path, seconds: float) -> None:
    """Set how far the wall clock is ahead of the machine's."""
    temporary = file.with_suffix(".new")
    temporary.write_text(f"{seconds:+.3f}s\n")
    temporary.replace(file)
