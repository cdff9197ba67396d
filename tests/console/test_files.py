"""Files that people write.

Each mistake is one sentence with the line, the value and what is expected.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.cli.files import job_from_flags, read_fleet, read_job, read_policy
from relaunch.config import ConfigError
from tests.pages import sections

JOB = """\
name: llama
command: [python, train.py]
nodes: 2
env:
  DEBUG: 1
"""


MISTAKES = (
    (JOB + "nproc: 8\n", 6, ("nproc: ", "nproc_per_node")),
    (JOB.replace("nodes: 2", "nodes: two"), 3, ("nodes: ", "'two'")),
    (
        JOB.replace("nodes: 2", "nodes: {min: 3, max: 2}"),
        3,
        ("nodes: min is 3 ", "max is 2"),
    ),
    (
        JOB.replace("command: [python, train.py]", "command: python train.py"),
        2,
        ("command: ", "list"),
    ),
    (JOB.replace("name: llama", "name: ll/ama"), 1, ("'ll/ama'",)),
    (JOB + "nodes: 3\n", 6, ("nodes: ", "line 3")),
    (
        JOB + "progress:\n  log_patern: x\n",
        7,
        ("progress.log_patern: ", "log_pattern"),
    ),
    (JOB + "env: {A: [1]}\n", 6, ("given twice",)),
    (JOB + "policy: harsh\n", 6, ("'harsh'", "default")),
    (
        JOB + "policy:\n  max_restart: 3\n",
        7,
        ("policy.max_restart: ", "max_restarts"),
    ),
    (JOB + "policy:\n  extends: harsh\n", 7, ("'harsh'",)),
    (JOB + "policy:\n  timeouts:\n    lease: 90\n", 8, ("lease", "unit")),
    (JOB + "policy:\n  timeouts: {lease: 5s}\n", 7, ("lease", "30s")),
    (JOB + "env: [\n", 7, ("not YAML",)),
    ("- a\n", 1, ("keys",)),
    ("", 1, ("empty",)),
    ("command: [a]\n", 1, ("name: ",)),
)


def refusal(folder: Path, text: str) -> str:
    """Return what is said of a job file, without its folder."""
    (folder / "job.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_job(folder / "job.yaml", {})
    return str(caught.value).replace(f"{folder}/", "")


@pytest.mark.parametrize(("text", "line", "words"), MISTAKES)
def test_a_mistake_in_a_job_file_is_one_sentence_with_its_line(
    tmp_path: Path, text: str, line: int, words: tuple[str, ...]
) -> None:
    sentence = refusal(tmp_path, text)
    assert sentence.startswith(f"job.yaml:{line}: ") and "\n" not in sentence
    assert all(word in sentence for word in words), sentence


def test_the_sentences_of_mistakes_in_job_files(tmp_path: Path, page: SnapshotAssertion) -> None:
    said = {text: refusal(tmp_path, text) for text, _, _ in MISTAKES}
    assert sections(said) == page


def test_flags_win_over_the_file_and_a_bad_flag_is_named(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    spec, _ = read_job(path, {"nodes": 4, "name": "other"})
    assert (spec.node_count, spec.name, spec.env) == (4, "other", {"DEBUG": "1"})
    elastic = read_job(path, {"nodes": "3:4"})[0]
    assert (elastic.fewest_nodes, elastic.node_count) == (3, 4)
    with pytest.raises(ConfigError, match=r"^--nodes: min is 4 and max is 3"):
        read_job(path, {"nodes": "4:3"})
    with pytest.raises(ConfigError, match=r"^--nodes: 0 "):
        read_job(path, {"nodes": 0})
    with pytest.raises(ConfigError, match=r"^--name: '\.\.'"):
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
    with pytest.raises(ConfigError, match=r"mine.yaml:1: max_restarts: .*-1"):
        read_job(tmp_path / "job.yaml", {})


def test_a_file_that_is_missing_or_no_text_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml .*: No such file"):
        read_job(tmp_path / "none.yaml", {})
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file"):
        read_job(tmp_path / "binary.yaml", {})


def test_two_nodes_of_one_address_are_a_fleet_file_mistake(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "name: lab\nbackend: local\nnodes:\n  - {name: a, address: x}\n  - {name: b, address: x}\n"
    )
    with pytest.raises(ConfigError, match=r"fleet.yaml:3: nodes: nodes a and b .*'x'"):
        read_fleet(path)
    path.write_text(
        "name: lab\nbackend: local\nnodes:\n  - {name: a, address: x}\n  - {name: b, adress: y}\n"
    )
    with pytest.raises(
        ConfigError,
        match=r"fleet.yaml:5: nodes.1.(adress|address): ",
    ):
        read_fleet(path)
