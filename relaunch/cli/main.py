"""The command `relaunch`: forwards to the process that `up` keeps ready, or runs here."""

from __future__ import annotations

import gc
import os
from typing import NoReturn

from relaunch.cli.warm_client import NO_WARM, forward
from relaunch.interpreter import leave


def main() -> NoReturn:
    """Run this process's command line and end the process."""
    forward()
    run()


def run() -> NoReturn:
    """Run the command line without the process of `up`, and end this process."""
    os.environ.pop(NO_WARM, None)
    # Imported modules are never garbage; collecting during the imports costs a tenth of the start.
    gc.disable()
    from relaunch.cli.app import main as run_app

    leave(run_app())
