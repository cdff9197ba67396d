#!/usr/bin/env python3
"""The command line of a checkout. It is the same as `relaunch`, which an installation brings."""

from __future__ import annotations

from relaunch.cli.warm_client import forward
from relaunch.interpreter import use_project_python

if __name__ == "__main__":
    forward()
    use_project_python()
    from relaunch.cli.main import run

    run()
