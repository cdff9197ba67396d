"""A job that fails says why at once, and can be read after the server of its `run` has ended."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from tests import planted
from tests.chaos.world import ENCRYPTION
from tests.invariants import assert_accounted
from tests.pages import sections

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os

def step(batch):
    return batch["input_ids"]

print("rank", os.environ["RANK"], "starts")
if os.environ["RANK"] == "1":
    step({})
"""
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": os.environ.get("HOME", "/"),
    "TERM": "xterm",
    "PYTHONPATH": str(ROOT),
    planted.NAME: planted.TOKEN,  # as a user has exported it
    **{name: value for name, value in os.environ.items() if name.startswith(ENCRYPTION)},
}
"""The shell of a new user: nothing else is set there, but to run any suite with encryption."""


async def typed(folder: Path, *words: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "starter.py"),
        *words,
        cwd=folder,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = await process.communicate()
    planted.check(f"the output of {words}", out + err)
    return process.returncode or 0, out.decode(), err.decode()


def page_of(folder: Path, text: str) -> list[str]:
    """Return lines as on any machine, without the marks that newer Pythons put below a line."""
    return [
        line.replace(str(folder.resolve()), "FOLDER")
        for line in text.splitlines()
        if set(line) - set(" |~^")
    ]


@pytest.mark.long
async def test_s16_a_key_error_is_shown_first_and_kept(
    tmp_path: Path, page: SnapshotAssertion
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "policy.yaml").write_text("causes: {APPLICATION: [{strategy: FAIL}]}\n")
    options = ("--name", "first", "--nproc", "2", "--policy", "policy.yaml")
    code, _, err = await typed(tmp_path, "run", *options, "--", sys.executable, "train.py")
    assert code == 1, err
    closing = page_of(tmp_path, err[err.index("job first FAILED") :])

    code, out, err = await typed(tmp_path, "history", "first", "--json")
    assert code == 0, err
    (entry,) = json.loads(out)
    assert (entry["cause"], entry["ranks"], entry["nodes"]) == ("APPLICATION", [1], ["local-1"])
    assert entry["traceback"].splitlines()[-1] == "KeyError: 'input_ids'"
    assert entry["reason"].endswith(": KeyError: 'input_ids'")

    code, out, err = await typed(tmp_path, "show", "first")
    assert code == 0, err
    shown = page_of(tmp_path, out[: out.index("\nnext ")])

    views = [await typed(tmp_path, view, "first", "--json") for view in ("report", "show")]
    assert_accounted(*(json.loads(out) for _, out, _ in views))

    words = entry["logs"].split()[1:]
    assert words == ["logs", "first", "--rank", "1", "--generation", "1"]
    code, out, err = await typed(tmp_path, *words)
    assert code == 0, err
    assert out.splitlines()[0] == "[rank 1] rank 1 starts"
    assert out.splitlines()[-1] == "[rank 1] KeyError: 'input_ids'"
    assert not (tmp_path / ".relaunch" / "runs" / "first" / "up.json").exists(), "it has ended"
    assert sections({"run": closing, "show": shown}) == page
