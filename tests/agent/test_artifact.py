"""The agent is shipped as one file: identical wherever it was built, whole, and portable.

A Python of any version reads it.
"""

from __future__ import annotations

import importlib.util
import os
import stat
import subprocess
import sys
import zipfile
import zipimport
from pathlib import Path

import pytest

from relaunch.backends.artifact import build_agent

BUILD = (
    "import sys, pathlib; {before}; from relaunch.backends.artifact import build_agent; "
    "build_agent(pathlib.Path(sys.argv[1]))"
)
ROOT = Path(__file__).resolve().parents[2]


def test_the_artifact_is_named_by_content_and_rebuilt_if_torn(
    tmp_path: Path,
) -> None:
    first = build_agent(tmp_path / "a")
    second = build_agent(tmp_path / "b")
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()
    before = first.stat()
    assert build_agent(tmp_path / "a") == first
    assert first.stat().st_mtime_ns == before.st_mtime_ns
    whole = first.read_bytes()
    middle = len(whole) // 2
    for torn in (
        b"torn",
        b"",
        whole[:middle],
        whole[:middle] + b"\0" * 4096 + whole[middle + 4096 :],
    ):
        first.write_bytes(torn)
        assert build_agent(tmp_path / "a").read_bytes() == whole


@pytest.mark.long_after(variants=1)
@pytest.mark.parametrize("change", ["another source", "one more module", "writable", "link"])
def test_an_artifact_of_another_content_or_user_is_replaced(tmp_path: Path, change: str) -> None:
    built = build_agent(tmp_path / "a")
    whole = built.read_bytes()
    if change == "writable":
        built.chmod(0o666)
    elif change == "link":
        (tmp_path / "theirs").write_bytes(whole)
        built.unlink()
        built.symlink_to(tmp_path / "theirs")
    else:
        with zipfile.ZipFile(built) as source:
            files = {name: source.read(name) for name in source.namelist()}
        if change == "another source":
            files["relaunch/agent/session.py"] += b"# another"
        else:
            files["json.py"] = b"# instead of the standard library's"
        with zipfile.ZipFile(built, "w") as archive:
            for name, data in files.items():
                archive.writestr(name, data)
    assert build_agent(tmp_path / "a") == built
    status = built.lstat()
    assert (built.read_bytes(), status.st_mode & 0o7777) == (whole, 0o755)
    assert stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def test_other_modules_and_hash_orders_build_the_same_bytes(
    tmp_path: Path,
) -> None:
    """Else each start of a worker would send all nodes another agent."""
    built = {build_agent(tmp_path / "here").read_bytes()}
    for seed, before in (
        ("1", "import json"),
        ("2", "import relaunch.agent.ranks.shim, relaunch.agent.session, asyncio, pydantic"),
    ):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run(
            [sys.executable, "-c", BUILD.format(before=before), str(tmp_path / seed)],
            cwd=ROOT,
            env=environment,
            check=True,
        )
        built.update(path.read_bytes() for path in (tmp_path / seed).iterdir())
    assert len(built) == 1


@pytest.mark.parametrize(
    "magic",
    [b"\0\0\r\n", importlib.util.MAGIC_NUMBER],
    ids=["built by another Python", "built by this Python"],
)
def test_an_agent_with_foreign_bytecode_runs_from_its_source(tmp_path: Path, magic: bytes) -> None:
    built, other = build_agent(tmp_path / "a"), tmp_path / "other.pyz"
    with zipfile.ZipFile(built) as source, zipfile.ZipFile(other, "w") as archive:
        for name in source.namelist():
            data = source.read(name)
            archive.writestr(name, magic + data[4:] if name.endswith(".pyc") else data)
    environment = {**os.environ, "RELAUNCH_AGENT_STATE": str(tmp_path / "state")}
    done = subprocess.run(
        [sys.executable, str(other), "list"],
        input=b'{"protocol": 1}',
        capture_output=True,
        env=environment,
    )
    assert b'"outcome":"done"' in done.stdout.replace(b" ", b""), done
    read = zipimport.zipimporter(str(other / "relaunch" / "agent" / "ranks")).get_code(
        "relaunch.agent.ranks.shim"
    )
    compiled_here = read.co_filename.startswith(str(other))
    assert compiled_here == (magic != importlib.util.MAGIC_NUMBER)
