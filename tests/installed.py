"""Installations of relaunch beside this checkout, each in a separate environment.

They use the libraries of the environment that runs the tests, so nothing is fetched.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

TIMEOUT_S = 240.0
"""For a machine that does other things, too."""


def install(wheel: Path, folder: Path) -> Path:
    """Install a wheel, and nothing else, into a new environment; return the folder of its programs.

    Raises:
        AssertionError: pip or uv refused it.
    """
    python = str(folder / "bin" / "python")
    uv = shutil.which("uv")  # an environment that it made has no pip
    make = (
        [uv, "venv", "--quiet", "--python", sys.executable, str(folder)]
        if uv
        else [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    )
    pip = (
        [uv, "pip", "install", "--python", python]
        if uv
        else [sys.executable, "-m", "pip", "--python", python, "install"]
    )
    for words in (make, [*pip, "--quiet", "--no-deps", "--no-index", str(wheel)]):
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 0, done.stderr
    (packages,) = (folder / "lib").glob("python*/site-packages")
    # A folder that is named here is searched, and its own .pth files, one of which leads to the
    # checkout, are not read.
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def search_path(bin_folder: Path) -> str:
    """Return the PATH of an installation: the second folder has the server, a library's program."""
    return f"{bin_folder}:{Path(sys.executable).parent}:/usr/bin:/bin"
