"""The search for the secret of end-to-end tests finds it wherever it could be."""

from __future__ import annotations

import base64
import contextlib
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from relaunch.converter import SharedPayloadConverter
from tests import planted
from tests.planted import TOKEN, Leak


@pytest.mark.parametrize(
    "written",
    [
        TOKEN.encode(),
        TOKEN.encode("utf-16"),
        *(base64.b64encode(f"{'x' * n} {TOKEN} y".encode()) for n in range(3)),
    ],
    ids=["text", "utf-16", "base64", "base64-1", "base64-2"],
)
def test_the_secret_is_found_in_a_file(tmp_path: Path, written: bytes) -> None:
    path = tmp_path / "jobs" / "j" / "error.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"nothing")
    planted.search(tmp_path)
    path.write_bytes(b"\0" * 5 + written)
    with pytest.raises(Leak, match=r"jobs/j/error\.json"):
        planted.search(tmp_path)
    with pytest.raises(Leak, match="jobs"):  # and again, although the file is the same
        planted.search(tmp_path)


def test_only_what_may_have_the_secret_is_left_out(tmp_path: Path) -> None:
    spec = planted.add_to({"secrets": {"OTHER": {"file": "/x"}}, "name": "j"}, tmp_path)
    assert sorted(spec["secrets"]) == ["OTHER", planted.NAME]
    planted.search(tmp_path)
    (tmp_path / "beside").write_text(Path(spec["env_file"]).read_text())
    with pytest.raises(Leak, match="beside"):
        planted.search(tmp_path)


def test_the_secret_is_found_in_a_compressed_payload(tmp_path: Path) -> None:
    long = [str(number) for number in range(100_000)]
    with contextlib.closing(sqlite3.connect(tmp_path / "temporal.db")) as database:
        database.execute("CREATE TABLE history_node (data BLOB)")
        for value, is_found in ((long, False), ([*long, TOKEN], True)):
            (payload,) = SharedPayloadConverter().to_payloads([value])
            assert payload.metadata["encoding"] == planted.COMPRESSED
            data = b"event" + payload.SerializeToString()
            database.execute("INSERT INTO history_node VALUES (?)", [data])
            database.commit()
            found = planted.list_files([tmp_path])
            assert found == [f"a compressed payload in {tmp_path / 'temporal.db'}"] * is_found


def test_the_secret_is_found_in_a_command_line_and_environment() -> None:
    def start(*words: str, **variables: str) -> subprocess.Popen[bytes]:
        code = "print(flush=True); input()"
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", code, *words],
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        process.stdout.readline()
        return process

    word, variable = start(TOKEN), start(SOME=TOKEN)
    rank = start(SOME=TOKEN, RELAUNCH_TOKEN="default/j/1/1")
    try:
        found = "; ".join(planted.list_processes())
        assert f"the command line of {word.pid}:" in found
        assert f"the environment of {variable.pid}:" in found
        assert f"of {rank.pid}:" not in found
    finally:
        for process in (word, variable, rank):
            process.communicate(b"\n")
