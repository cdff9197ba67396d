"""The Python of tests that need libraries for training, of which this project installs none."""

from __future__ import annotations

import functools
import os
import subprocess

PYTHON = os.environ.get("RELAUNCH_TORCH_PYTHON", "python3")


@functools.cache
def has_module(module: str) -> bool:
    """Return whether `PYTHON` can import it, which takes some of them seconds."""
    return subprocess.run([PYTHON, "-c", f"import {module}"], capture_output=True).returncode == 0
