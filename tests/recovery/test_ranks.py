"""The number of each rank, its environment, and which of two launches is the later one."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest

from relaunch.generation import Token
from relaunch.job.ranks import (
    common_environment,
    processes_of,
    rank_environments,
    ranks_of,
    restart_counts,
    tracker_environment,
)
from relaunch.job.state import Slot
from tests.recovery.builders import running, spec

TOKEN = Token("default", "llama", 1000, 3)


@pytest.mark.parametrize(
    ("written", "group_rank", "ranks"),
    [
        ({"nproc_per_node": 2}, 0, (0, 1)),
        ({"nproc_per_node": 2}, 1, (2, 3)),
        ({"nproc_per_node": 8}, 1, tuple(range(8, 16))),
        ({"nproc_per_node": 8, "launcher": "torchrun"}, 1, tuple(range(8, 16))),
    ],
)
def test_ranks_are_counted_node_by_node(
    written: dict[str, Any], group_rank: int, ranks: tuple[int, ...]
) -> None:
    assert ranks == ranks_of(group_rank, spec(**written))


@pytest.mark.parametrize(
    ("written", "numbers"),
    [
        pytest.param({"nproc_per_node": 2}, [(0, 1), (2, 3)], id="every rank"),
        pytest.param(
            {"nproc_per_node": 2, "launcher": "torchrun"},
            [(4,), (5,)],
            id="launchers, counted behind all ranks",
        ),
        pytest.param(
            {"nodes": {"min": 1, "max": 3}, "nproc_per_node": 2, "launcher": "ft_launcher"},
            [(6,), (7,)],
            id="behind the most there are",
        ),
    ],
)
def test_what_relaunch_starts_itself_has_its_own_number(
    written: dict[str, Any], numbers: list[tuple[int, ...]]
) -> None:
    assert numbers == [processes_of(group_rank, spec(**written)) for group_rank in (0, 1)]


def test_a_job_that_asks_has_its_flight_records_written() -> None:
    asking = spec(flight_record=True)
    asked = common_environment(TOKEN, asking, 2, 8, "10.0.0.1", 29500)
    assert asked["RELAUNCH_FLIGHT_RECORD"] == "1"


def test_a_launcher_gets_the_variables_that_it_does_not_set() -> None:
    below = spec(nproc_per_node=8, launcher="torchrun", env={"NCCL_DEBUG": "WARN"})
    shared = common_environment(TOKEN, below, 2, 8, "10.0.0.1", 29500)
    assert shared == {"NCCL_DEBUG": "WARN", "RELAUNCH_JOB": "llama", "RELAUNCH_GENERATION": "3"}
    place = {
        "GROUP_RANK": "1",
        "RELAUNCH_NODE": "n2",
        "MA_SCHEDULE_CNT": "2",
        "MA_PROC_START_CNT": "5",
    }
    shares = {**place, "CUDA_VISIBLE_DEVICES": "2,3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert rank_environments(1, Slot("n2", "10.0.0.2", scheduled=2, started=5), below) == (place,)
    assert rank_environments(
        1, Slot("n2", "10.0.0.2", scheduled=2, started=5, gpus=(2, 3)), below
    ) == (shares,)
    assert restart_counts(TOKEN, 8) == {
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "8",
    }


def test_s3_11_all_ranks_share_torchelastic_and_job_variables() -> None:
    shared = common_environment(
        TOKEN, spec(nodes=3, env={"NCCL_DEBUG": "WARN"}), 3, 8, "10.0.0.1", 29500
    )
    assert shared == {
        "NCCL_DEBUG": "WARN",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_WORLD_SIZE": "6",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "8",
        "TORCHELASTIC_RUN_ID": "llama-1000",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "RELAUNCH_JOB": "llama",
        "RELAUNCH_GENERATION": "3",
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.parametrize(
    ("written", "threads"),
    [
        pytest.param(
            {"nproc_per_node": 2},
            "1",
            id="many ranks that each took all cores would be slower than one",
        ),
        pytest.param(
            {"nproc_per_node": 2, "env": {"OMP_NUM_THREADS": "4"}},
            "4",
            id="what the job says stands",
        ),
        pytest.param({"nproc_per_node": 1}, None, id="one rank may have all cores"),
        pytest.param(
            {"nproc_per_node": 8, "launcher": "torchrun"}, None, id="a launcher sees to it itself"
        ),
    ],
)
def test_how_many_threads_a_rank_takes(written: dict[str, Any], threads: str | None) -> None:
    assert threads == common_environment(TOKEN, spec(**written), 2, 8, "10.0.0.1", 29500).get(
        "OMP_NUM_THREADS"
    )


def test_s3_11_each_rank_has_its_numbers_and_its_places_counts() -> None:
    place = {
        "GROUP_RANK": "1",
        "RELAUNCH_NODE": "n2",
        "MA_SCHEDULE_CNT": "2",
        "MA_PROC_START_CNT": "5",
    }
    assert (
        {"RANK": "2", "LOCAL_RANK": "0", "ROLE_RANK": "2", **place},
        {"RANK": "3", "LOCAL_RANK": "1", "ROLE_RANK": "3", **place},
    ) == rank_environments(1, Slot("n2", "10.0.0.2", scheduled=2, started=5), spec())


def test_a_tracker_continues_one_run_for_each_submission() -> None:
    token = Token("default", "llama.7b", 1000, 3)
    first = tracker_environment(token, "server", 0, ())
    assert first == {"WANDB_RUN_ID": first["WANDB_RUN_ID"], "WANDB_RESUME": "allow"}
    run = first["WANDB_RUN_ID"]
    assert re.fullmatch(r"llama-7b-[0-9a-f]{12}", run)
    assert tracker_environment(replace(token, generation=9), "server", 0, ()) == first
    assert tracker_environment(token, "server", 12, ())["WANDB_RUN_ID"] == f"{run}-12"
    others = [
        tracker_environment(replace(token, submission=1001), "server", 0, ()),
        tracker_environment(replace(token, namespace="other"), "server", 0, ()),
        tracker_environment(token, "of another user", 0, ()),
    ]
    assert len({run, *(each["WANDB_RUN_ID"] for each in others)}) == 4
    longest = tracker_environment(replace(token, job="j" * 63), "server", 99999, ())
    assert len(longest["WANDB_RUN_ID"]) <= 128


@pytest.mark.parametrize("name", ["WANDB_RUN_ID", "WANDB_RESUME"])
def test_a_job_that_names_its_run_keeps_it(name: str) -> None:
    assert tracker_environment(TOKEN, "server", 0, {name, "PATH"}) == {}


def test_the_token_of_a_job_names_its_newest_generation() -> None:
    assert str(running(generation=4).token) == "default/llama/1000/4"


def test_a_later_submission_is_above_every_earlier_generation() -> None:
    tokens = [
        Token("default", "llama", submission, generation)
        for submission in (1000, 2000)
        for generation in (1, 2, 10)
    ]
    assert all(earlier < later for earlier, later in itertools.pairwise(tokens))
