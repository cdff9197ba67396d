"""`python -m relaunch …` is the command line, `python -m relaunch worker …` the worker.

As a file this starts the package that it lies in, whatever else is installed: `up` starts its own processes by it.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command of this process and end it."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if not __package__ and root not in sys.path:
        sys.path.insert(0, root)
    if sys.argv[1:2] == ["worker"]:
        del sys.argv[1]
        from relaunch.worker_main import run
    else:
        from relaunch.cli.main import run
    run()


if __name__ == "__main__":
    main()
