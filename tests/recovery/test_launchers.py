"""The options of a launcher, and what its log says of the ranks that failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relaunch.job.launchers import RankFailure, launcher_command, parse_failures
from tests.recovery.builders import spec

MASTER = ("10.0.0.1", 29500)
TORCHRUN = (
    "--nnodes=2",
    "--nproc-per-node=8",
    "--rdzv-id=j-1-3",
    "--max-restarts=0",
    "--monitor-interval=0.1",
    "--rdzv-backend=static",
    "--rdzv-endpoint=10.0.0.1:29500",
    "--node-rank=1",
    "--no-python",
)


def build_command(
    group_rank: int = 1, master: tuple[str, int] = MASTER, **written: Any
) -> tuple[str, ...]:
    given = spec(
        **{
            "nproc_per_node": 8,
            "launcher": "torchrun",
            "command": ["python", "train.py"],
            **written,
        }
    )
    return launcher_command(given, group_rank, 2, master, "10.0.0.2", "j-1-3").launcher


def test_torchrun_knows_each_node_and_restarts_nothing() -> None:
    assert build_command() == ("python", "-m", "torch.distributed.run", *TORCHRUN)


@pytest.mark.parametrize(
    "command", ["python", "python3", "python3.11", "/opt/conda/bin/python", "./env/bin/python3"]
)
def test_the_python_of_the_ranks_runs_the_launcher(command: str) -> None:
    assert build_command(command=[command, "train.py"])[:3] == (
        command,
        "-m",
        "torch.distributed.run",
    )


@pytest.mark.parametrize("command", ["./train", "pythonic", "python3.11-dbg", "bash"])
def test_another_program_is_below_the_launcher_on_the_path(command: str) -> None:
    assert build_command(command=[command, "x"])[:2] == ("torchrun", "--nnodes=2")


@pytest.mark.parametrize(("group_rank", "is_host"), [(0, "true"), (1, "false")])
def test_ft_launcher_knows_who_serves_the_rendezvous(group_rank: int, is_host: str) -> None:
    assert build_command(group_rank, launcher="ft_launcher") == (
        "python",
        "-m",
        "nvidia_resiliency_ext.fault_tolerance.launcher",
        "--nnodes=2",
        "--nproc-per-node=8",
        "--rdzv-id=j-1-3",
        "--max-restarts=0",
        "--monitor-interval=0.1",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=10.0.0.1:29500",
        f"--rdzv-conf=is_host={is_host}",
        "--local-addr=10.0.0.2",
        "--ft-restart-policy=any-failed",
        "--no-python",
    )


def test_an_address_with_colons_is_put_in_brackets() -> None:
    assert "--rdzv-endpoint=[fd00::1]:29500" in build_command(master=("fd00::1", 29500))


def test_what_a_launcher_would_substitute_is_escaped() -> None:
    given = spec(launcher="torchrun", command=["sh", "-c", "echo $RANK ${local_rank} $$"])
    escaped = "echo $$RANK $${local_rank} $$$$"
    assert launcher_command(given, 0, 1, MASTER, "10.0.0.1", "j").rank == ("sh", "-c", escaped)


SAMPLES = Path(__file__).parent / "samples" / "launchers"
"""What each has printed when rank 3 of four was killed while rank 2 raised an exception.

From the line about the first failure on: torchrun to the end; of ft_launcher these three lines
alone. Paths are others, and spaces at ends of lines are gone."""
BLOCK = (SAMPLES / "torchrun_2.13.0.txt").read_text().splitlines()
LOGGED = (SAMPLES / "ft_launcher_0.4.1.txt").read_text().splitlines()
KILLED = RankFailure(26130, None, 9, 3)
OTHERS = tuple(RankFailure(pid, None, 15, rank) for rank, pid in enumerate((26127, 26128, 26129)))


def test_the_root_comes_first_then_others_in_the_launchers_order() -> None:
    assert parse_failures(BLOCK) == (KILLED, *OTHERS)


def test_a_log_without_the_block_is_read_by_its_lines() -> None:
    others = tuple(
        RankFailure(pid, None, 15, rank) for rank, pid in enumerate((26226, 26227, 26228))
    )
    assert parse_failures(LOGGED) == (RankFailure(26229, None, 9, 3), *others)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        pytest.param([], (), id="it said nothing"),
        pytest.param(["No module named torch"], (), id="it failed by itself"),
        pytest.param(
            BLOCK[:1], (RankFailure(26130, None, 9),), id="it was ended before it said more"
        ),
        pytest.param(BLOCK[-9:], (KILLED,), id="the beginning was cut off"),
        pytest.param(
            [*BLOCK[:1], *BLOCK[-9:-5]], (RankFailure(26130, None, 9),), id="the end was cut off"
        ),
        pytest.param([*BLOCK, *BLOCK], (KILLED, *OTHERS), id="it said so twice"),
        pytest.param(
            ["failed (exitcode: 93) local_rank: 0 (pid: 7) of fn: main"],
            (RankFailure(7, 93, None),),
            id="a code is no signal",
        ),
    ],
)
def test_what_is_left_of_a_log_is_believed_and_no_more(
    lines: list[str], expected: tuple[RankFailure, ...]
) -> None:
    assert parse_failures(lines) == expected


def test_numbers_of_thousands_of_digits_are_no_ranks() -> None:
    digits = "7" * 5000
    first = f"failed (exitcode: 1) local_rank: 0 (pid: {digits}) of binary: /usr/bin/python3"
    listed = f"{digits}: ProcessFailure(local_rank=0, pid={digits}, exitcode=1"
    block = ["Root Cause (first observed failure):", f"  rank      : {digits} (local_rank: 0)"]
    assert parse_failures([first, listed]) == parse_failures(block) == ()
