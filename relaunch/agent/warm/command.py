"""Which commands start Python, with which options, and where their first import folder is.

After CPython's own command line (https://docs.python.org/3/using/cmdline.html). Does not start
anything.
"""

from __future__ import annotations

import os
import re
from typing import List, NamedTuple, Optional

_PYTHON = re.compile(r"python(3(\.\d+)?t?)?")
_FLAGS = "bBdOPqRsuvx"
"""Options without a value that change nothing about how `sitecustomize` is found."""
_WITHOUT_SITE = {"E": "ignores PYTHONPATH", "I": "is isolated", "S": "skips `site`"}


class UnsuitableCommand(Exception):
    """Ranks of this command can only be started from nothing; the text says why."""


class PythonCommand(NamedTuple):
    """A command that starts Python, taken apart."""

    options: List[str]
    """What stands before the script, the module or the code."""
    first_folder: Optional[str]
    """The folder that is first on `sys.path`, relative to the working directory; None: none is."""


def parse_command(command: List[str]) -> PythonCommand:
    """Take a command apart.

    Raises:
        UnsuitableCommand: It is not Python's, or Python would not load `sitecustomize`.
    """
    name = os.path.basename(command[0])
    if not _PYTHON.fullmatch(name):
        raise UnsuitableCommand(f"{name} is not Python itself")
    is_safe = False
    at = 1
    while at < len(command):
        text = command[at]
        if text == "-":
            raise UnsuitableCommand("its script comes from stdin")
        if not text.startswith("-"):
            script = os.path.dirname(text) or "."
            return PythonCommand(command[1:at], None if is_safe else script)
        if text.startswith("--"):
            if text != "--check-hash-based-pycs":
                raise UnsuitableCommand(f"the option {text} is not known here")
            at += 2
            continue
        letters = text[1:]
        while letters:
            letter, letters = letters[0], letters[1:]
            if letter in "cm":
                return PythonCommand(command[1:at], None if is_safe else ".")
            if letter in "WX":
                at += 0 if letters else 1
                break
            if letter in _WITHOUT_SITE:
                raise UnsuitableCommand(f"Python {_WITHOUT_SITE[letter]} with -{letter}")
            if letter not in _FLAGS:
                raise UnsuitableCommand(f"the option -{letter} is not known here")
            is_safe = is_safe or letter == "P"
        at += 1
    raise UnsuitableCommand("it names no script")


def find_program(name: str, path: str, folder: str) -> Optional[str]:
    """Return the file that exec would run for this name, with PATH and a working directory."""
    places = [""] if "/" in name else path.split(os.pathsep)
    for place in places:
        found = os.path.join(folder, place, name)
        if os.path.isfile(found) and os.access(found, os.X_OK):
            return found
    return None
