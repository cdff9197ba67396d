"""The command `relaunch-worker`."""

from __future__ import annotations

import gc
from typing import NoReturn

from relaunch.interpreter import leave


def run() -> NoReturn:
    """Run the worker until it is told to end, and end this process."""
    # Nothing that is imported is ever garbage, and looking for it there was a third of the start.
    gc.disable()
    from relaunch.worker import main

    leave(main())
