"""Lets a script run with the project's own Python, so that nobody has to activate anything.

Standard library and old syntax only: whatever `python3` is found first reads this file.
"""

from __future__ import annotations

import os
import sys


def use_project_python() -> None:
    """Start this script again in `.venv` beside it, unless it runs there already or there is none."""
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), ".venv")
    python = os.path.join(folder, "bin", "python")
    # pyvenv.cfg makes sys.prefix point into the folder; without one the comparison would never become true.
    if not os.path.exists(os.path.join(folder, "pyvenv.cfg")) or not os.access(python, os.X_OK):
        return
    if os.path.realpath(sys.prefix) != os.path.realpath(folder):
        os.execv(python, [python, *sys.argv])
