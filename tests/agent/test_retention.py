"""What a node keeps of ended generations.

And what goes first when their logs take too much of its disk.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from real_node import Node, expect_done, python_command, refusal, token, wait_for

from relaunch.agent.locks import try_lock
from relaunch.agent.ranks import retention
from relaunch.agent.state import MAX_GENERATIONS, JobState

BLOCK = 64 * 1024
LONG = 3 * BLOCK
"""Less than the budget of `small`: the beginning of a longer log is freed while its rank still
lives, and how much of it is left then depends on when the rank is stopped."""


def prints(size: int) -> list[str]:
    return python_command(f"import sys; sys.stdout.write('x' * {size})")


def run_to_its_end(
    node: Node,
    job: str,
    generation: int,
    size: int = BLOCK,
    leaves: dict[str, list[int]] | None = None,
) -> None:
    """Launch, print, stop. `leaves`: the generations of each job that are left of those before it.

    A launch removes for `retention.PATIENCE` and leaves the rest to the next launch: how many
    that takes depends on the disk, what is left in the end does not.
    """
    prepared = node.prepare(generation, [0], token=token(generation, job=job))
    assert prepared is not None and prepared["outcome"] == "done", prepared
    if leaves is not None:
        others = itertools.count(1)

        def is_left() -> bool:
            if list_kept(node) == leaves:
                return True
            other = next(others)
            node.prepare(other, [0], token=token(other, job="other"))
            return False

        wait_for(is_left, f"{leaves} was never left, but {list_kept(node)}")
    started = node.start(
        generation,
        prints(size),
        ranks=1,
        token=token(generation, job=job),
        prepared=prepared["stamp"],
    )
    assert started is not None and started["outcome"] == "done", started
    log = folder(node, job, generation) / "logs" / "rank_0.log"
    wait_for(lambda: log.exists() and log.stat().st_size == size)
    node.stop(generation, token=token(generation, job=job))
    wait_for(
        lambda: not JobState(node.state, "default", job).generation((1, generation)).has_live_shim()
    )


def folder(node: Node, job: str, generation: int) -> Path:
    return JobState(node.state, "default", job).generation((1, generation)).path


def list_kept(node: Node) -> dict[str, list[int]]:
    jobs = {job: JobState(node.state, "default", job).list_generations() for job in ("a", "b")}
    return {
        job: [generation.order[1] for generation in found] for job, found in jobs.items() if found
    }


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for three and a half of the generations of these tests."""
    monkeypatch.setenv(retention.BUDGET_VARIABLE, str(7 * BLOCK // 2))


def test_the_oldest_ended_generations_go_and_never_a_jobs_newest(small: None, node: Node) -> None:
    for generation in (1, 2):
        run_to_its_end(node, "a", generation)
    for generation in (1, 2, 3):
        run_to_its_end(node, "b", generation)
    # Five have ended when the sixth is prepared: the two oldest that may go are of the other job,
    # and its newest may not.
    run_to_its_end(node, "b", 4, leaves={"a": [2], "b": [2, 3, 4]})
    # a's newest is older than all of them, and stays.
    run_to_its_end(node, "b", 5, leaves={"a": [2], "b": [3, 4, 5]})


def test_one_that_lives_stays_however_much_it_has_printed(small: None, node: Node) -> None:
    prepared = node.prepare(1, [0], token=token(1, job="a"))
    assert prepared is not None
    loud = [
        sys.executable,
        "-S",
        "-c",
        f"import sys, time; sys.stdout.write('x' * {9 * BLOCK}); sys.stdout.flush(); "
        "time.sleep(1000)",
    ]
    node.start(1, loud, ranks=1, token=token(1, job="a"), prepared=prepared["stamp"])
    wait_for(lambda: (folder(node, "a", 1) / "logs" / "rank_0.log").stat().st_size == 9 * BLOCK)
    for generation in (1, 2, 3, 4):
        run_to_its_end(node, "b", generation)
    assert list_kept(node) == {"a": [1], "b": [1, 2, 3, 4]}, (
        "what it takes is not of the ended ones' budget either"
    )


def test_a_permanent_stop_is_remembered_without_its_folder(small: None, node: Node) -> None:
    run_to_its_end(node, "a", 1, LONG)
    run_to_its_end(node, "a", 2)
    run_to_its_end(node, "b", 1, leaves={"a": [2], "b": [1]})
    assert refusal(node.prepare(1, [0], token=token(1, job="a"))) == "stopped"
    answer = node.order("logs", token=token(1, job="a"))
    assert refusal(answer) == "no_such_generation"


def test_a_job_that_another_process_changes_is_left_alone(small: None, node: Node) -> None:
    run_to_its_end(node, "a", 1)
    run_to_its_end(node, "a", 2)
    run_to_its_end(node, "b", 1, LONG)
    lock = try_lock(JobState(node.state, "default", "a").path / "lock")
    assert lock is not None
    try:
        # What is next in age goes instead.
        run_to_its_end(node, "b", 2, LONG, leaves={"a": [1, 2], "b": [2]})
    finally:
        os.close(lock)
    run_to_its_end(node, "b", 3, leaves={"a": [2], "b": [3]})


def test_a_launch_removes_one_even_where_looking_takes_all_time(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    for generation in (1, 2, 3, 4):
        run_to_its_end(node, "a", generation)
    monkeypatch.setenv(retention.BUDGET_VARIABLE, "0")
    monkeypatch.setattr(retention, "REMOVAL_TIMEOUT", -1.0)
    for left in ([2, 3, 4], [3, 4], [4], [4]):
        retention.make_room(node.state, node.state)
        assert list_kept(node) == {"a": left}


def test_the_default_budget_is_ten_gib_or_a_tenth_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(retention.BUDGET_VARIABLE, raising=False)

    def disk(size: int) -> Any:
        return os.statvfs_result((4096, 4096, size // 4096, 0, 0, 0, 0, 0, 0, 255))

    monkeypatch.setattr(os, "statvfs", lambda path: disk(50 * 1024**3))
    assert retention.compute_budget(tmp_path) == 5 * 1024**3
    monkeypatch.setattr(os, "statvfs", lambda path: disk(4 * 1024**4))
    assert retention.compute_budget(tmp_path) == 10 * 1024**3


def test_two_launches_in_a_row_look_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(retention.BUDGET_VARIABLE, raising=False)
    (tmp_path / "jobs").mkdir()
    looks: list[Path] = []
    monkeypatch.setattr(retention, "_list_generations", lambda state: looks.append(state) or [])
    for _ in range(3):
        retention.make_room(tmp_path, tmp_path / "jobs" / "a")
    assert looks == [tmp_path]


def test_an_unreadable_disk_keeps_no_job_from_being_launched(tmp_path: Path) -> None:
    retention.make_room(tmp_path, tmp_path / "jobs" / "a")
    assert not (tmp_path / retention.SCAN_STAMP).exists()


NUMBERS = """import sys, time
for number in range(100000):
    print(f'{number:07d}', flush=number % 1000 == 0)
sys.stdout.flush()
time.sleep(1000)"""


def test_a_log_that_lives_keeps_its_newest_half_and_its_offsets(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(retention.BUDGET_VARIABLE, str(4 * BLOCK))
    node.run(1, python_command(NUMBERS), ranks=1)
    log = node.folder() / "logs" / "rank_0.log"
    wait_for(lambda: log.stat().st_size == 800000)
    wait_for(lambda: log.stat().st_blocks * 512 <= 4 * BLOCK)
    assert log.stat().st_size == 800000, "an offset means what it meant"
    first, then = (node.order("logs", token=token(1), offsets={"0": at}) for at in (0, 400000))
    assert first is not None and then is not None
    [chunk] = first["chunks"]
    kept = chunk["next"]
    assert chunk["data"].startswith(f"[relaunch: {kept} bytes ") and chunk["data"].endswith("]\n")
    assert 800000 - 2 * 2 * BLOCK < kept <= 800000 - retention.MIN_KEPT_BYTES
    assert then["chunks"][0]["next"] == kept, "a reader that was in the middle goes on there, too"
    rest = node.order("logs", token=token(1), offsets={"0": kept}, max_bytes=10**6)
    assert rest is not None
    assert rest["chunks"][0]["data"].splitlines()[-1] == "0099999"
    assert rest["chunks"][0]["data"].splitlines()[1] == f"{kept // 8 + 1:07d}"
    newest = node.order("logs", token=token(1), tail=2)
    assert newest is not None
    assert newest["chunks"][0]["data"] == "0099998\n0099999\n"


def test_an_old_folder_that_cannot_be_removed_is_left(node: Node) -> None:
    """A rank may leave a mount in it, or what only another user can remove."""
    node.run(1)
    node.stop(1)
    kept = folder(node, "j", 1) / "kept"
    kept.mkdir()
    mount = ["mount", "-t", "tmpfs", "none", str(kept)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        for generation in range(2, MAX_GENERATIONS + 3):
            expect_done(node.prepare(generation))
        listed = expect_done(node.order("list"))["jobs"]
        assert [job["prepared"] for job in listed] == [[1, MAX_GENERATIONS + 2]]
        found = {one.order[1] for one in JobState(node.state, "default", "j").list_generations()}
        assert found == {1, *range(3, MAX_GENERATIONS + 3)}
        assert [path.name for path in folder(node, "j", 1).iterdir()] == ["kept"]
    finally:
        subprocess.run(["umount", str(kept)], check=True)
    expect_done(node.prepare(MAX_GENERATIONS + 3))
    assert not folder(node, "j", 1).exists()
