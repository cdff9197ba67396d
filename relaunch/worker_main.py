"""The command `relaunch-worker`."""

from __future__ import annotations

import gc
from typing import NoReturn

from relaunch.interpreter import leave


def run() -> NoReturn:
    """Run the worker until it receives a signal to end, and end this process."""
    # Imported modules are never garbage, and scanning them took a third of the startup time.
    gc.disable()
    from relaunch.worker import main

    leave(main())
