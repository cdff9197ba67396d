"""Puts the doubles where a node looks for the real ones."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
HEALTHY = "driver 570.124.06\ngpus 2\n"
"""Two GPUs without a fault, for `tell_nvml`; the words are in fake_nvml.c."""


def install_tool(programs: Path, name: str, **told: Any) -> None:
    """Install a double of `name`, or tell the one that is there something else.

    told.py has the words.
    """
    programs.mkdir(parents=True, exist_ok=True)
    instructions = programs / f"{name}.json"
    partial = programs / f".{name}.json"
    partial.write_text(json.dumps(told))
    partial.replace(instructions)
    path = programs / name
    if not path.exists():
        path.write_text(f"#!{sys.executable} -S\n" + (HERE / "told.py").read_text())
        path.chmod(0o755)


def calls(programs: Path, name: str) -> list[list[str]]:
    """How it was called so far."""
    path = programs / f"{name}.calls"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def pids(programs: Path, name: str) -> list[int]:
    """Of it and of what it forked."""
    path = programs / f"{name}.pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def build_nvml(folder: Path, old: bool = False) -> Path:
    """Compile the double of libnvidia-ml.so.1.

    `old`: one that lacks functions which drivers have got since.
    """
    if shutil.which("cc") is None:
        pytest.skip("no C compiler (cc) on PATH to build the double of libnvidia-ml.so.1 with")
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libnvidia-ml.so.1"
    words = [
        "cc",
        "-shared",
        "-fPIC",
        "-O1",
        "-Wall",
        "-Werror",
        *(["-DOLD"] if old else []),
        "-o",
        str(library),
    ]
    subprocess.run([*words, str(HERE / "fake_nvml.c"), "-ldl"], check=True, timeout=100)
    return library


def install_nvml(libraries: Path, built: Path, said: str = HEALTHY) -> None:
    libraries.mkdir(parents=True, exist_ok=True)
    shutil.copy(built, libraries)
    tell_nvml(libraries, said)


def tell_nvml(libraries: Path, said: str) -> None:
    partial = libraries / ".nvml.txt"
    partial.write_text(said)
    partial.replace(libraries / "nvml.txt")
