"""The command `relaunch`: hands itself to the process that `up` keeps ready, or starts by itself."""

from __future__ import annotations

import gc
import os
from typing import NoReturn

from relaunch.cli.warm_client import NO_WARM, forward
from relaunch.interpreter import leave


def main() -> NoReturn:
    """Run the command line of this process and end it."""
    forward()
    run()


def run() -> NoReturn:
    """Run the command line without the process of `up`, and end this process."""
    os.environ.pop(NO_WARM, None)
    # Nothing that is imported is ever garbage, and looking for it costs a tenth of the start.
    gc.disable()
    from relaunch.cli.app import main as run_app

    leave(run_app())
