"""`relaunch init`: the job file that it writes says what was asked for, and can be submitted."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.cli.files import read_job
from relaunch.cli.init import write
from relaunch.config import ConfigError
from relaunch.spec.job import JobSpec
from relaunch.spec.policy import Policy
from tests.pages import sections

TORCHRUN = (
    "torchrun train.py",
    "torchrun --standalone --nnodes=1 --nproc-per-node=8 train.py --lr 1e-4 --note 'it is: a, b'",
    "torchrun --nnodes 1:4 --nproc_per_node 8 --max_restarts 3 --rdzv-backend c10d "
    "--rdzv-endpoint=head:29500 -m my.train --flag on null '' '[1]'",
    "OMP_NUM_THREADS=4 NAME='a b' torchrun -t 3 --no-python ./train.sh",
    "python3 -m torch.distributed.run --nproc-per-node 2 --node-rank=0 train.py",
    "torchrun --max-restarts 3 --shutdown-timeout=120 train.py",
    "python -u train.py --resume",
)
REFUSED = (
    "torchrun",
    "torchrun --nnodes",
    "torchrun --nnodes x train.py",
    "torchrun --nproc-per-node many train.py",
    "torchrun --nproc-per-node gpu train.py",
    "A=b",
    "torchrun --max-restarts -1 train.py",
)
ANSWERS = (
    ["python train.py --resume", "two", "2", "x", "4", "no number", "[12:04] Step: 12/100", ""],
    ["./train.sh 'a b'", "1:2", "", r"it (?P<step>\d+)", "harsh", "torchelastic"],
    ["'not closed", "torchrun --nproc-per-node 8 train.py", "", ""],
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "python").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("relaunch.cli.init.Path.cwd", lambda: Path("/home/train"))
    return tmp_path


def written(path: Path, spec: JobSpec) -> tuple[str, Policy]:
    """Return the text of a job file, which must describe `spec`, and its policy."""
    read, policy = read_job(path, {})
    assert read == spec
    return path.read_text(), policy


def test_a_command_line_of_torchrun_becomes_a_job_file(
    folder: Path, page: SnapshotAssertion
) -> None:
    path, said = folder / "job.yaml", {}
    for line in TORCHRUN:
        spec = write(path, shlex.split(line), True, False)
        said[line], policy = written(path, spec)
        assert policy.max_restarts == (3 if "--max" in line else 8)
        grace = 120 if "--shutdown" in line else 15
        assert policy.timeouts.stop_grace.total_seconds() == grace
    assert sections(said) == page


def test_five_answers_become_a_job_file(folder: Path, page: SnapshotAssertion) -> None:
    said = {}
    for number, answers in enumerate(ANSWERS):
        lines: list[str] = []
        given: Iterator[str] = iter(answers)

        def ask(question: str, given: Iterator[str] = given, lines: list[str] = lines) -> str:
            lines.append(f"{question}{(answer := next(given))}")
            return answer

        path = folder / f"{number}.yaml"
        spec = write(path, (), False, True, ask, lines.append)
        text, _ = written(path, spec)
        said[str(number)] = [*lines, "", *text.splitlines()]
        assert next(given, None) is None
    assert sections(said) == page


def test_what_cannot_become_a_job_file_is_one_sentence(
    folder: Path, page: SnapshotAssertion
) -> None:
    path, said = folder / "job.yaml", {}

    def end(_: str) -> str:
        raise EOFError

    for line in REFUSED:
        with pytest.raises(ConfigError) as caught:
            write(path, shlex.split(line), False, False)
        said[line] = str(caught.value)
    for title, ask in (("answers that end", end), ("no terminal", None)):
        with pytest.raises(ConfigError) as caught:
            write(path, (), False, ask is not None, ask or end)
        said[title] = str(caught.value)
    assert not path.exists()
    path.write_text("mine")
    with pytest.raises(ConfigError) as caught:
        write(path, ["true"], False, False)
    said["a file that exists"] = str(caught.value).replace(f"{folder}/", "")
    assert path.read_text() == "mine"
    assert all(sentence.isprintable() for sentence in said.values())
    assert sections(said) == page
