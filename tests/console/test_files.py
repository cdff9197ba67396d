"""Files that people write.

Each mistake is one sentence with the line, the value and what is expected.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from relaunch.cli.files import job_from_flags, read_fleet, read_job, read_policy
from relaunch.config import ConfigError

JOB = """\
name: llama
command: [python, train.py]
nodes: 2
env:
  DEBUG: 1
"""


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (JOB + "nproc: 8\n", 6, ("nproc: unknown key", "did you mean nproc_per_node?")),
        (JOB.replace("nodes: 2", "nodes: two"), 3, ("nodes: ", "not a number of nodes", "'two'")),
        (
            JOB.replace("nodes: 2", "nodes: {min: 3, max: 2}"),
            3,
            ("nodes: min is 3 and max is 2: min must not exceed max",),
        ),
        (
            JOB.replace("command: [python, train.py]", "command: python train.py"),
            2,
            ("write a list",),
        ),
        (JOB.replace("name: llama", "name: ll/ama"), 1, ("'ll/ama' is not a name",)),
        (JOB + "nodes: 3\n", 6, ("nodes: given twice", "line 3")),
        (
            JOB + "progress:\n  log_patern: x\n",
            7,
            ("progress.log_patern: unknown key", "log_pattern"),
        ),
        (JOB + "env: {A: [1]}\n", 6, ("given twice",)),
        (JOB + "policy: harsh\n", 6, ("'harsh' is neither a preset", "default")),
        (
            JOB + "policy:\n  max_restart: 3\n",
            7,
            ("policy.max_restart: unknown key", "max_restarts"),
        ),
        (JOB + "policy:\n  extends: harsh\n", 7, ("'harsh' is no preset",)),
        (JOB + "policy:\n  timeouts:\n    lease: 90\n", 8, ("no unit",)),
        (JOB + "policy:\n  timeouts: {lease: 5s}\n", 7, ("set lease to at least 30s",)),
        (JOB + "env: [\n", 7, ("not YAML",)),
        ("- a\n", 1, ("expected keys and values",)),
        ("", 1, ("empty",)),
        ("command: [a]\n", 1, ("name: missing",)),
    ],
)
def test_a_mistake_in_a_job_file_is_one_sentence_with_its_line(
    tmp_path: Path, text: str, line: int, words: tuple[str, ...]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_job(path, {})
    sentence = str(caught.value)
    assert sentence.startswith(f"{path}:{line}: ")
    assert "\n" not in sentence
    assert all(word in sentence for word in words), sentence


def test_flags_win_over_the_file_and_a_bad_flag_is_named(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    spec, _ = read_job(path, {"nodes": 4, "name": "other"})
    assert (spec.node_count, spec.name, spec.env) == (4, "other", {"DEBUG": "1"})
    assert read_job(path, {"nodes": "3:4"})[0].size == "3 to 4 ranks on 3 to 4 nodes"
    with pytest.raises(
        ConfigError, match=r"^--nodes: min is 4 and max is 3: min must not exceed max$"
    ):
        read_job(path, {"nodes": "4:3"})
    with pytest.raises(ConfigError, match=r"^--nodes: 0 is not a number of nodes"):
        read_job(path, {"nodes": 0})
    with pytest.raises(ConfigError, match=r"^--name: '\.\.' is not a name"):
        job_from_flags({"name": "..", "command": ["a"]})


def test_a_policy_is_a_preset_a_file_beside_the_job_or_a_mapping(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "extends: default\nmax_restarts: 2\nhang: {after: off}\ntimeouts: {lost_after: 90s}\n"
    )
    (tmp_path / "job.yaml").write_text(
        JOB + "policy: mine.yaml\nmetadata: {annotations: {a/b: '8'}}\n"
    )
    spec, policy = read_job(tmp_path / "job.yaml", {})
    assert (policy.max_restarts, policy.hang.after, policy.timeouts.lost_after) == (
        2,
        "off",
        timedelta(seconds=90),
    )
    assert spec.metadata.annotations == {"a/b": "8"}
    assert read_policy({"max_restarts": 1}).max_restarts == 1
    (tmp_path / "mine.yaml").write_text("max_restarts: -1\n")
    with pytest.raises(
        ConfigError, match=r"mine.yaml:1: max_restarts: .*greater than or equal to 0"
    ):
        read_job(tmp_path / "job.yaml", {})


def test_a_file_that_is_missing_or_no_text_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read: No such file"):
        read_job(tmp_path / "none.yaml", {})
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file"):
        read_job(tmp_path / "binary.yaml", {})


def test_two_nodes_of_one_address_are_a_fleet_file_mistake(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "name: lab\nbackend: local\nnodes:\n  - {name: a, address: x}\n  - {name: b, address: x}\n"
    )
    with pytest.raises(
        ConfigError, match=r"fleet.yaml:3: nodes: nodes a and b have the same address 'x'"
    ):
        read_fleet(path)
    path.write_text(
        "name: lab\nbackend: local\nnodes:\n  - {name: a, address: x}\n  - {name: b, adress: y}\n"
    )
    with pytest.raises(
        ConfigError,
        match=r"fleet.yaml:5: nodes.1.adress: unknown key, did you mean address\?"
        r"|fleet.yaml:5: nodes.1.address: missing",
    ):
        read_fleet(path)
