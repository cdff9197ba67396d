"""Entry point of the command line and of the worker.

`python -m relaunch …` is the command line, `python -m relaunch worker …` the worker. Run as a file,
it starts the package that contains it, whatever other version is installed; `up` starts its own
processes this way.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command that the arguments name, and end this process."""
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
