"""A minute's choice of the attacks, side by side in one world.

And the check that finds overlaps.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.fence.attacks import ATTACKS
from tests.fence.hosts import find_obstacle
from tests.fence.rounds import Record, Result, play
from tests.fence.world import NANOSECONDS, FenceJob, FenceWorld

CHOICE = ("policy-changed", "shim-stopped", "jobs-deleted", "machine-id")
"""Attacks that each need two nodes, and do their harm within seconds."""
SEED = 20261122


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_no_attack_of_the_choice_leaves_two_generations_alive(tmp_path: Path) -> None:
    if obstacle := find_obstacle():
        pytest.skip(obstacle)
    # Two nodes for each attack, and spares for those that lose one.
    async with FenceWorld(tmp_path / "world", nodes=2 * len(CHOICE), spares=3) as world:
        rounds = [play(world, ATTACKS[name], 0, SEED + i) for i, name in enumerate(CHOICE)]
        results = [result for result, _ in await asyncio.gather(*rounds)]
    for result in results:
        print("\n".join((str(result), *result.log)))
    assert {one.attack: one.overlaps for one in results if one.overlaps} == {}


def write_job(folder: Path, starts: dict[int, float], writes: list[tuple[int, float]]) -> FenceJob:
    """Write the stamps of ranks of generations: when the first one started and when they wrote."""
    lines = [
        json.dumps(
            {
                "token": f"default/j/7/{generation}",
                "rank": 0,
                "node": f"n{generation}",
                "raw": int(at * NANOSECONDS),
            }
        )
        for generation, at in starts.items()
    ]
    (folder / "starts").write_text("".join(f"{line}\n" for line in lines))
    (folder / "writes").write_text(
        "".join(f"default/j/7/{g} 0 n{g} {int(at * NANOSECONDS)}\n" for g, at in writes)
    )
    return FenceJob(FenceWorld(folder), "j", folder, "")


def test_a_write_after_a_newer_start_overlaps_and_one_before_not(tmp_path: Path) -> None:
    job = write_job(tmp_path, {1: 10.0, 2: 20.0}, [(1, 19.9), (1, 20.5), (1, 23.0), (2, 24.0)])
    (late,) = job.late_writes()
    assert (late.generation, late.host, late.lines) == ((7, 1), "n1", 2)
    assert (round(late.first, 3), round(late.last, 3)) == (0.5, 3.0)
    assert job.overlaps() == [str(late)]


def test_generations_one_after_another_do_not_overlap(tmp_path: Path) -> None:
    job = write_job(
        tmp_path, {1: 10.0, 2: 20.0, 3: 30.0}, [(1, 19.9), (2, 20.1), (2, 29.9), (3, 30.1)]
    )
    assert job.overlaps() == []


def test_a_paused_host_may_write_only_for_a_moment_after_it_woke(tmp_path: Path) -> None:
    job = write_job(tmp_path, {1: 10.0, 2: 20.0}, [(1, 30.1), (1, 31.9), (1, 40.0)])
    job.world.woken["n1"] = [int(30 * NANOSECONDS)]
    (late,) = job.late_writes()
    assert (late.lines, round(late.first, 3)) == (1, 20.0)


def test_the_lock_of_a_paused_rank_is_no_overlap_but_others_are(tmp_path: Path) -> None:
    job = write_job(tmp_path, {1: 10.0, 2: 20.0}, [])
    line = {"started": "default/j/7/2", "node": "n2", "alive": "default_j_7_1.0.4242"}
    (tmp_path / "violations").write_text(json.dumps(line) + "\n")
    assert len(job.overlaps()) == 1
    job.world.woken["n1"] = []
    assert job.overlaps() == []


def test_a_rank_that_was_started_twice_is_found(tmp_path: Path) -> None:
    job = write_job(tmp_path, {1: 10.0}, [])
    (tmp_path / "starts").write_text((tmp_path / "starts").read_text() * 2)
    assert job.overlaps() == ["rank 0 of default/j/7/1 was started 2 times"]


def test_a_run_that_was_interrupted_goes_on_where_it_was(tmp_path: Path) -> None:
    record = Record(tmp_path, 5)
    record.add(Result("cut", 0, 1, "held", (), 1.0, ("a note",)))
    again = Record(tmp_path, 5)
    assert again.has("cut", 0) and not again.has("cut", 1)
    assert not Record(tmp_path, 6).has("cut", 0)
