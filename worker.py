#!/usr/bin/env python3
"""The worker of a checkout. It is the same as `relaunch-worker`, which an installation brings."""

from __future__ import annotations

from relaunch.interpreter import use_project_python

if __name__ == "__main__":
    use_project_python()
    from relaunch.worker_main import run

    run()
