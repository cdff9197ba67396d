"""The environment file of a job: what ranks get of it, and which file stops the launch."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion
from temporalio.exceptions import ApplicationError

from relaunch.activities.launch import make_environment
from relaunch.backends.base import StartOrder
from relaunch.spec.environment import serialize_environment
from tests.activities.harness import TOKEN, stand


def write(path: Path, content: bytes, mode: int = 0o600) -> str:
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


async def test_a_file_is_below_env_and_what_relaunch_sets(tmp_path: Path) -> None:
    file = {"A": "file", "B": "file", "RANK": "7", "MASTER_ADDR": "x", "OMP_NUM_THREADS": "4"}
    path = write(tmp_path / "env", serialize_environment(file))
    fleet = stand()
    given = {"env": {"A": "job"}, "env_file": path, "inherit_env": False, "umask": "027"}
    fleet = replace(fleet, spec=fleet.spec.model_copy(update=given))
    await fleet.launch()
    order = next(call.order for call in fleet.backend.calls if call.command == "start")
    assert isinstance(order, StartOrder)
    # What the file alone gives is kept from other users, as secrets are.
    assert order.secrets == {"B": "file", "RANK": "7", "OMP_NUM_THREADS": "4"}
    assert (order.env["A"], order.rank_env[0]["RANK"]) == ("job", "0")
    assert order.env["MASTER_ADDR"] not in ("x", "")
    assert (order.inherit_env, order.umask) == (False, "027")
    assert order.env_defaults == ()


@pytest.mark.parametrize(
    ("given", "defaults"),
    [
        ({}, ("OMP_NUM_THREADS",)),
        ({"env": {"OMP_NUM_THREADS": "1"}}, ()),
        ({"nproc_per_node": 1}, ()),
    ],
)
async def test_only_what_the_job_does_not_set_gives_way_to_a_node(
    given: dict[str, Any], defaults: tuple[str, ...]
) -> None:
    fleet = stand()
    spec = fleet.spec.model_validate({**fleet.spec.model_dump(), "nproc_per_node": 2, **given})
    fleet = replace(fleet, spec=spec)
    await fleet.launch()
    order = next(call.order for call in fleet.backend.calls if call.command == "start")
    assert isinstance(order, StartOrder)
    assert order.env_defaults == defaults
    # A node of an older release knows no defaults, and sets what is in `env`.
    assert order.env.get("OMP_NUM_THREADS") == (None if "nproc_per_node" in given else "1")


@pytest.mark.parametrize("case", ["missing", "folder", "pipe", "device", "long", "binary"])
def test_a_secret_that_cannot_be_read_starts_no_rank(case: str, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    match case:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")  # which has no end
        case "long":
            write(path, b"x" * 128 * 1024 + b"x")
        case "binary":
            write(path, b"\xff")
    spec = stand().spec
    secrets = {"TOKEN": {"file": str(path)}}
    spec = type(spec).model_validate({**spec.model_dump(), "secrets": secrets})
    with pytest.raises(ApplicationError, match=r"secret TOKEN: file .* cannot be read") as error:
        make_environment(TOKEN, spec, 2, 8, ("127.0.0.1", 1))
    assert (error.value.type, error.value.non_retryable) == ("SecretMissing", True)


@pytest.mark.parametrize("case", ["missing", "mode", "owner", "folder", "pipe", "text"])
def test_a_file_that_cannot_be_trusted_starts_no_rank(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "env"
    match case:
        case "mode":
            write(path, b"A=1\n", 0o640)
        case "owner":
            write(path, b"A=1\n")
            monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
        case "folder":
            path.mkdir(mode=0o700)
        case "pipe":
            os.mkfifo(path, 0o600)
        case "text":
            write(path, b"export A=1\n")
    fleet = stand()
    spec = fleet.spec.model_copy(update={"env_file": str(path)})
    with pytest.raises(ApplicationError) as error:
        make_environment(TOKEN, spec, 2, 8, ("127.0.0.1", 1))
    assert (error.value.type, error.value.non_retryable) == ("SecretMissing", True)
    sentence = error.value.message.replace(str(tmp_path), "/folder")
    uid = path.stat().st_uid if case == "owner" else 0
    assert (
        sentence.replace(f"user {uid + 1}", "user 1").replace(f"user {uid}", "user 0") == snapshot
    )
