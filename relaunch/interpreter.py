"""How our programs begin and end: with the project's own Python, so that nobody has to activate anything, and without taking it apart.

Standard library and old syntax only: whatever `python3` is found first reads this file.
"""

from __future__ import annotations

import contextlib
import os
import sys

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from typing import NoReturn


def use_project_python() -> None:
    """Start this script again in the `.venv` of its checkout, unless it runs there already or there is none."""
    folder = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ".venv")
    python = os.path.join(folder, "bin", "python")
    # pyvenv.cfg makes sys.prefix point into the folder; without one the comparison would never become true.
    if not os.path.exists(os.path.join(folder, "pyvenv.cfg")) or not os.access(python, os.X_OK):
        return
    if os.path.realpath(sys.prefix) != os.path.realpath(folder):
        os.execv(python, [python, *sys.argv])


def leave(code: int) -> NoReturn:
    """End the process without taking the interpreter apart.

    The SDK's native threads may still deliver the answer to a call that nobody awaits any more; into an interpreter that is being finalized
    that is an abort or a segmentation fault (seen after everything was done: 134, 139), and it would hide the exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError):
            stream.flush()
    os._exit(code)
