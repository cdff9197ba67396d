"""How relaunch's programs start and end.

They start with the project's own Python, so that users need not activate an environment, and end
without finalizing the interpreter. This file is read by whichever `python3` is found first, so it
uses only the standard library and old syntax.
"""

from __future__ import annotations

import contextlib
import os
import sys

TYPE_CHECKING = False  # `typing` is slow to import
if TYPE_CHECKING:
    from typing import NoReturn


def use_project_python() -> None:
    """Restart this script in the `.venv` of its checkout, if there is one and it is not in use."""
    folder = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ".venv")
    python = os.path.join(folder, "bin", "python")
    # pyvenv.cfg makes sys.prefix point to the folder; without it the comparison below would never
    # hold and the script would restart itself without end.
    if not os.path.exists(os.path.join(folder, "pyvenv.cfg")) or not os.access(python, os.X_OK):
        return
    if os.path.realpath(sys.prefix) != os.path.realpath(folder):
        os.execv(python, [python, *sys.argv])


def leave(code: int) -> NoReturn:
    """End the process without finalizing the interpreter.

    The SDK's native threads may still deliver the result of a call that no coroutine awaits any
    more. In an interpreter that is being finalized that causes an abort or a segmentation fault
    (seen after all work was done: exit codes 134, 139), which would hide the exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a pipe or terminal without a reader
            stream.flush()
    os._exit(code)
