"""Values of secrets in what ranks wrote: nothing that leaves the node has them."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from relaunch.agent import reports
from relaunch.agent.ranks.evidence import read_error, read_tail
from relaunch.agent.ranks.progress import RankProgress
from relaunch.agent.ranks.redact import Redactor, make_record
from relaunch.agent.state import JobState
from tests.agent.real_node import Node, expect_done, python_command, token, wait_for

SECRET = "hf_planted/0123456789"
OTHER = 'a "quoted" päßword'
PEM = "-----BEGIN KEY-----\nMIIEvplanted\nQIBADANplanted\n-----END KEY-----\n"


def make_redactor(*names: str, **environment: str) -> Redactor:
    return Redactor(json.loads(json.dumps(make_record([environment], names))))


def read_all(path: Path, redactor: Redactor, limit: int) -> str:
    """Read a log as a reader does, piece by piece."""
    text, offset = "", 0
    while (chunk := reports._read_chunk(path, 0, offset, limit, True, redactor)) is not None:
        assert chunk["next"] > offset == chunk["offset"]
        text, offset = text + chunk["data"], chunk["next"]
    assert offset == path.stat().st_size
    return text


def test_values_are_replaced_in_each_form_that_a_program_prints() -> None:
    redactor = make_redactor("HF_TOKEN", "OTHER", "PEM", HF_TOKEN=SECRET, OTHER=OTHER, PEM=PEM)
    quoted = SECRET.replace("/", "%2F")
    text = f"{SECRET}, {{'t': '{SECRET}'}} https://user:{quoted}@hub\n{PEM!r}\n{PEM}"
    said = redactor.redact({"a": [text, json.dumps({"p": OTHER}), 7, None], SECRET: OTHER})
    assert "planted" not in str(said) and "word" not in str(said)
    assert said["a"][0].startswith("[redacted HF_TOKEN], {'t': '[redacted HF_TOKEN]'} https://user")
    assert said["[redacted HF_TOKEN]"] == "[redacted OTHER]" and said["a"][2:] == [7, None]


@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode])
@pytest.mark.parametrize("secret", [SECRET, "?~?~?~?>", "pässword"])
def test_a_value_is_replaced_in_base64_wherever_it_begins(
    secret: str, encode: Callable[[bytes], bytes]
) -> None:
    redactor = make_redactor("HF_TOKEN", HF_TOKEN=secret)
    for before, after in product(range(5), range(4)):
        whole = b"a" * before + secret.encode() + b"z" * after
        said = redactor.redact(f"Authorization: Basic {encode(whole).decode()}\n")
        assert "[redacted HF_TOKEN]" in said
        # At each end one character has bits of a neighbour as well, and some of the value.
        first, _, last = said.partition("Basic ")[2].strip().partition("[redacted HF_TOKEN]")
        assert len(first) == -(-before * 8 // 6)
        assert len(last) == len(encode(whole)) - (before + len(secret.encode())) * 8 // 6


def test_which_variables_count_and_what_is_too_short() -> None:
    environment = {
        "HF_TOKEN": SECRET,
        "WANDB_API_KEY": "planted-key",
        "SHORT_TOKEN": "7654321",
        "RELAUNCH_TOKEN": "default/j/1/1",
        "PATH_TO": "/home/planted",
    }
    record = make_record([environment, {"NEXT_TOKEN": SECRET + "-2"}], ["*_TOKEN", "*_API_KEY"])
    assert record is not None
    assert {row[0] for row in record["values"]} == {"HF_TOKEN", "WANDB_API_KEY", "NEXT_TOKEN"}
    assert "planted" not in json.dumps(record), "values are nowhere"
    said = Redactor(record).redact(f"{environment} {SECRET}-2")
    assert "7654321" in said and "/home/planted" in said and "default/j/1/1" in said
    assert said.endswith(" [redacted NEXT_TOKEN]"), "the longer one of two that begin alike"
    assert make_record([environment], ["MISSING"]) is None
    assert make_record([environment], []) is None


@pytest.mark.parametrize("limit", [4, 5, 11, len(SECRET), 64])
def test_no_part_of_a_value_is_read_wherever_a_piece_ends(tmp_path: Path, limit: int) -> None:
    redactor = make_redactor("T", T=SECRET)
    log = tmp_path / "log"
    text = f"näher {SECRET}{SECRET} hf_ {SECRET[:-1]}! {SECRET}"
    log.write_text(text)
    assert read_all(log, redactor, limit) == text.replace(SECRET, "[redacted T]")
    assert read_all(log, Redactor(), limit) == text
    for offset in range(len(text.encode())):
        chunk = reports._read_chunk(log, 0, offset, limit, True, redactor)
        assert chunk is not None and "456789" not in chunk["data"].replace("45678!", "")


def test_half_of_a_value_waits_for_the_rest_while_it_is_written(tmp_path: Path) -> None:
    redactor = make_redactor("T", T=SECRET)
    log = tmp_path / "log"
    log.write_text(f"token {SECRET[:9]}")
    chunk = reports._read_chunk(log, 0, 0, 100, False, redactor)
    assert chunk is not None and (chunk["data"], chunk["next"]) == ("token ", 6)
    assert reports._read_chunk(log, 0, 6, 100, False, redactor) is None
    with log.open("a") as file:
        file.write(f"{SECRET[9:]} x")
    chunk = reports._read_chunk(log, 0, 6, 100, False, redactor)
    assert chunk is not None and chunk["data"] == "[redacted T] x"
    # It was something else: a rank that prints nothing more holds nothing back.
    log.write_text(f"loss {SECRET[:2]}")
    os.utime(log, (1, 1))
    chunk = reports._read_chunk(log, 0, 0, 100, False, redactor)
    assert chunk is not None and chunk["data"] == f"loss {SECRET[:2]}"


def test_the_end_of_a_log_begins_in_no_value(tmp_path: Path) -> None:
    redactor = make_redactor("T", T=SECRET)
    generation = JobState(tmp_path, "default", "j").generation((1, 1))
    generation.path.mkdir(parents=True)
    generation.make_folders()
    log = generation.log_path(0)
    log.write_text(SECRET + "x" * 90)
    tails = [read_tail(log, redactor, max_bytes=size) for size in range(90, 120)]
    log.write_text(SECRET + "x" * (8 * 1024 - 3))
    tails.append(RankProgress(generation, 0, None).read_tail(redactor))
    assert all("789" not in str(tail) for tail in tails)
    error = generation.error_path(0)
    error.write_text(json.dumps({"message": {"message": f"{SECRET}", "extraInfo": {"t": 1}}}))
    assert read_error(error, redactor) == {
        "message": {"message": "[redacted T]", "extraInfo": {"t": 1}}
    }


PROGRAM = """
import json, os, pathlib, subprocess, sys, time
secret = os.environ["HF_TOKEN"]
print("using", secret, flush=True)
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)", secret])
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.02)
error = {"message": {"message": f"cannot log in with {secret}", "extraInfo": {}}}
open(os.environ["TORCHELASTIC_ERROR_FILE"], "w").write(json.dumps(error))
sys.exit(f"no access with {secret}")
"""


def find_text(node: Node, text: str) -> set[str]:
    files = (path for path in node.state.rglob("*") if path.is_file())
    return {path.name for path in files if text.encode() in path.read_bytes()}


def test_nothing_that_a_node_says_of_a_rank_has_a_secret(node: Node, tmp_path: Path) -> None:
    go = tmp_path / "go"
    names = {"redact": ["HF_*"], "env": {"HF_TOKEN": SECRET}}
    node.run(1, [*python_command(PROGRAM), str(go)], ranks=1, **names)
    watch = node.watch()
    beat = watch.read_until("heartbeat", lambda beat: (beat.get("unmatched") or {}).get("lines"))
    assert beat["unmatched"]["lines"] == ["using [redacted HF_TOKEN]"]

    def read_commands() -> Any:
        answer = expect_done(node.order("stacks", token=token(1), frames=False))
        assert SECRET not in json.dumps(answer)
        return "[redacted HF_TOKEN]" in json.dumps(answer)

    wait_for(read_commands)
    os.kill(node.pid("supervisor"), 9)  # the next one reads the record of the launch
    go.touch()
    ended = watch.read_until("observation")
    said = json.dumps(ended)
    assert SECRET not in said and "cannot log in with [redacted HF_TOKEN]" in said
    assert "no access with [redacted HF_TOKEN]" in ended["log_tail"]
    assert node.stop() is not None
    answer = expect_done(node.order("logs", token=token(1)))
    assert SECRET not in json.dumps(answer) and "using [redacted" in answer["chunks"][0]["data"]
    assert find_text(node, SECRET) == {"rank_0.log", "rank_0.json"}, "what the rank itself wrote"
