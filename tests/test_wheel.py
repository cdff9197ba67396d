"""What people install: the wheel alone, in a separate environment.

With nothing of the checkout but the libraries it needs.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.installed import TIMEOUT_S, install, search_path

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in ("pyproject.toml", "README.md", "LICENSE", "THIRD_PARTY_NOTICES.md"):
        shutil.copy(ROOT / name, source)
    for name in ("relaunch", "workflows", "activities"):
        shutil.copytree(
            ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    program = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", program, str(built)],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def bin_folder(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel, with the libraries that it names at hand."""
    return install(wheel, tmp_path_factory.mktemp("environment"))


def run(bin_folder: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        cwd=folder,
        env=environment(bin_folder),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def environment(bin_folder: Path) -> dict[str, str]:
    return {"PATH": search_path(bin_folder), "HOME": os.environ.get("HOME", "/")}


def test_the_wheel_brings_one_name(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"relaunch"}
    here = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "relaunch").rglob("*")
        if path.suffix in (".py", ".toml", ".json", ".j2")
    }
    for folder in ("workflows", "activities"):
        here |= {
            f"relaunch/{path.relative_to(ROOT).as_posix()}"
            for path in (ROOT / folder).rglob("*.py")
        }
    assert {name for name in names if ".dist-info/" not in name} == here


@pytest.mark.long
def test_it_is_what_a_separate_environment_imports(bin_folder: Path, tmp_path: Path) -> None:
    program = "import relaunch.workflows.fleet.workflow as module; print(module.__file__)"
    done = run(bin_folder, tmp_path, str(bin_folder / "python"), "-c", program)
    assert done.stdout.startswith(str(bin_folder.parent)), done


def test_it_says_which_version_it_is(wheel: Path, bin_folder: Path, tmp_path: Path) -> None:
    done = run(bin_folder, tmp_path, "relaunch", "--version")
    assert done.stdout.startswith(f"relaunch {wheel.name.split('-')[1]}, Python "), done


def test_a_job_runs_to_its_end_with_nothing_else(bin_folder: Path, tmp_path: Path) -> None:
    done = run(
        bin_folder,
        tmp_path,
        "relaunch",
        "run",
        "--nproc",
        "2",
        "--",
        sys.executable,
        "-c",
        "print(1)",
    )
    assert (done.returncode, sorted(done.stdout.splitlines())) == (
        0,
        ["[rank 0] 1", "[rank 1] 1"],
    ), done.stderr


def test_evidence_is_explained(bin_folder: Path, tmp_path: Path) -> None:
    done = run(bin_folder, tmp_path, "relaunch", "explain", "xid", "79")
    assert done.returncode == 0, done.stderr
    assert re.search(r"GPU_FATAL", done.stdout)


@pytest.mark.long
def test_up_serves_other_commands(bin_folder: Path, tmp_path: Path) -> None:
    words = ["relaunch", "up", "--port", "0", "--ui-port", "0"]
    up = subprocess.Popen(
        words,
        cwd=tmp_path,
        env=environment(bin_folder),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert up.stderr is not None
        said = ""
        while "worker started" not in said:
            line = up.stderr.readline()
            assert line, said
            said += line
        (tmp_path / "job.yaml").write_text("name: installed\ncommand: ['true']\n")
        submitted = run(bin_folder, tmp_path, "relaunch", "submit", "job.yaml", "--follow")
        assert submitted.returncode == 0, submitted.stderr
        assert "installed" in run(bin_folder, tmp_path, "relaunch", "jobs").stdout
    finally:
        up.send_signal(signal.SIGINT)
        up.communicate(timeout=TIMEOUT_S)
    assert up.returncode in (0, 130)
