"""State that is removed while ranks live: by systemd-tmpfiles, or by a person who tidies up."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_node import (
    Node,
    expect_done,
    is_alive,
    python_command,
    read_name,
    refusal,
    token,
    wait_for,
)

HELPERS = ("supervisor", "guard")
"""Processes beside a shim, as the files of their identities are called."""
PRINTS = python_command("import time\nwhile True:\n  print('step', flush=True); time.sleep(0.05)")


@pytest.fixture
def swept(make_node: Callable[..., Node], tmp_path: Path) -> Callable[[Node], list[str]]:
    """Run the real systemd-tmpfiles over the parent of a node's folder: all is too old for it."""
    if shutil.which("systemd-tmpfiles") is None:
        pytest.skip("systemd-tmpfiles is not installed")

    def sweep(node: Node) -> list[str]:
        def list_files() -> set[str]:
            return {str(path.relative_to(node.state)) for path in node.state.rglob("*")}

        before = list_files()
        rules = tmp_path / "rules.conf"
        rules.write_text(f"q {node.state.parent} 1777 root root 1us\n")
        done = subprocess.run(
            ["systemd-tmpfiles", "--clean", rules], capture_output=True, check=False
        )
        assert done.returncode == 0, done
        return sorted(before - list_files())

    return sweep


def remove_records(node: Node) -> None:
    for job in (node.state / "jobs").iterdir():
        removed = node.state.with_name("removed") / job.name  # whole, though its shim may write
        removed.parent.mkdir(exist_ok=True)
        job.rename(removed)
        shutil.rmtree(removed)


def assert_ended(pids: dict[str, int], answer: dict[str, Any], generation: int) -> None:
    """Assert that no rank outlived an order, by it or by its shim.

    Its shim, which makes the records again for that order, may read there that the order has come,
    and end the generation before it is asked. Then the order has stopped none.
    """
    assert [pid for pid in pids.values() if is_alive(pid)] == []
    assert answer["stopped"] in ([[1, generation]], [])


def test_tmpfiles_passes_a_living_generation_by(
    make_node: Callable[..., Node], swept: Callable[[Node], list[str]], tmp_path: Path
) -> None:
    node = make_node("aged/n1")
    pids = node.run(1)
    for who in HELPERS:
        node.pid(who)  # written, and not being written under another name
    time.sleep(0.05)
    assert not [path for path in swept(node) if path.startswith("jobs")]
    assert expect_done(node.stop(1))["stopped"] == [[1, 1]]
    assert not any(map(is_alive, pids.values()))


def test_tmpfiles_keeps_what_must_be_remembered_of_dead_jobs(
    make_node: Callable[..., Node], swept: Callable[[Node], list[str]]
) -> None:
    node = make_node("aged/n1")
    node.run(1)
    expect_done(node.stop(1))
    wait_for(lambda: not node.list_leftovers())
    log = node.folder() / "logs" / "rank_0.log"
    assert log.exists()
    time.sleep(0.05)
    swept(node)
    assert not log.exists(), "the rule had no effect at all"
    assert refusal(node.prepare(1)) == "stopped"


def test_what_lives_is_stopped_though_nothing_of_it_is_written(node: Node) -> None:
    pids = node.run(1)
    remove_records(node)
    assert_ended(pids, expect_done(node.stop(1)), 1)
    assert refusal(node.prepare(1)) == "stopped"


def test_what_a_frozen_shim_has_lost_is_stopped_too(node: Node) -> None:
    pids = node.run(1)
    shim = node.pid("shim")
    os.kill(shim, signal.SIGSTOP)
    remove_records(node)
    expect_done(node.stop(1))
    assert not any(map(is_alive, pids.values()))


def test_the_next_generation_starts_alone_and_a_lower_one_never(node: Node) -> None:
    old = node.run(2)
    remove_records(node)
    assert refusal(node.prepare(1)) == "not_above"
    assert all(map(is_alive, old.values())), "an order that is refused stops nothing"
    remove_records(node)
    assert_ended(old, expect_done(node.prepare(3)), 2)


def test_a_preparation_that_is_repeated_starts_no_second_shim(node: Node) -> None:
    first = expect_done(node.prepare(1))
    shim = node.pid("shim")
    node.pid(
        "supervisor"
    )  # one that is still being born dies with its folder, and is prepared again
    remove_records(node)
    again = expect_done(node.prepare(1))
    assert again == first
    assert node.pid("shim") == shim
    remove_records(node)
    expect_done(node.start(1))


def end_helpers(node: Node) -> None:
    """Kill the shim and what guards it, so that only the token tells of ranks."""
    node.pid("supervisor")
    helpers = [
        json.loads(path.read_text())["pid"]
        for path in node.folder().glob("*.json")
        if path.stem in HELPERS
    ]
    for number in (signal.SIGSTOP, signal.SIGKILL):  # each ends what is left when another dies
        for pid in [*helpers, node.pid("shim")]:
            os.kill(pid, number)


def test_ranks_without_shim_and_records_are_found_by_their_token(node: Node) -> None:
    away = (
        "import subprocess, time; subprocess.Popen(['setsid', 'sleep', '1000']); time.sleep(1000)"
    )
    node.run(1, python_command(away), ranks=1)
    sleeping = wait_for(lambda: [pid for pid in node.list_processes() if _is_sleep(pid)])
    end_helpers(node)
    remove_records(node)
    assert refusal(node.prepare(1)) == "not_above", "it was launched, and is not launched again"
    assert all(map(is_alive, sleeping))
    assert expect_done(node.stop(1))["stopped"] == [[1, 1]]
    assert not any(map(is_alive, sleeping))


@pytest.mark.long
def test_an_exiting_process_is_waited_for_without_environment(node: Node, tmp_path: Path) -> None:
    """A process that frees much memory lost its environment and still holds files and devices."""
    told = tmp_path / "pid"
    # In small pages: as many as it takes to be busy with for tenths of a second.
    large = f"""
import mmap, os, time
memory = mmap.mmap(-1, 1 << 30)
memory.madvise(mmap.MADV_NOHUGEPAGE)
for page in range(0, len(memory), mmap.PAGESIZE):
    memory[page] = 1
open({str(told)!r}, "w").write(f"{{os.getpid()}}.")
time.sleep(1000)"""
    away = (
        "import subprocess, sys, time; subprocess.Popen(['setsid', sys.executable, '-c', "
        f"{large!r}]); time.sleep(1000)"
    )
    node.run(1, python_command(away), ranks=1)
    pid = int(
        wait_for(
            lambda: told.exists() and told.read_text().endswith(".") and told.read_text()
        ).rstrip(".")
    )
    end_helpers(node)
    remove_records(node)  # which also name the control group
    assert is_alive(pid)
    assert expect_done(node.stop(1))["stopped"] == [[1, 1]]
    assert not is_alive(pid)


def _is_sleep(pid: int) -> bool:
    return read_name(pid) == "sleep"


def test_a_shim_makes_its_files_again_and_training_goes_on(node: Node) -> None:
    pids = node.run(1, PRINTS, ranks=1)
    watch = node.watch()
    watch.read_until("heartbeat")
    remove_records(node)
    wait_for(
        lambda: (node.state / "jobs").iterdir() and list((node.state / "jobs").glob("*/1-1/sock"))
    )
    wait_for(lambda: list((node.state / "jobs").glob("*/highest.json")))
    assert all(map(is_alive, pids.values()))
    [row] = expect_done(node.order("list"))["jobs"]
    assert (row["prepared"], row["generations"][0]["state"]) == ([1, 1], "running")
    assert node.watch().read_until("heartbeat")["alive"] == [0]
    chunk = expect_done(node.order("logs", token=token(1), offsets={"0": 0}))["chunks"][0]
    assert "step" in chunk["data"], "what the rank goes on printing is read through its shim"
    os.kill(pids["0"], signal.SIGKILL)
    assert watch.read_observation("RankExited")["signal"] == 9, "who watched before hears of it"
    assert [seen["kind"] for seen in node.journal()] == ["RankExited"]


def test_the_journal_is_whole_again_with_earlier_reports(node: Node) -> None:
    node.run(1, ["sh", "-c", "exec sleep $S"], rank_env=[{"S": "0"}, {"S": "1000"}])
    node.watch().read_observation("RankExited")
    remove_records(node)
    wait_for(lambda: list((node.state / "jobs").glob("*/1-1/sock")))
    watch = node.watch()
    assert watch.read_observation("RankExited")["rank"] == 0
    assert watch.read_until("heartbeat")["alive"] == [1]


def test_a_generation_stopped_while_its_records_were_gone_ends(node: Node) -> None:
    """The mark was written by an agent that looks for files alone."""
    pids = node.run(1)
    highest = node.folder().parent / "highest.json"
    marked = {**json.loads(highest.read_text()), "stopped": [1, 1]}
    remove_records(node)
    highest.parent.mkdir(exist_ok=True)
    highest.write_text(json.dumps(marked))
    wait_for(lambda: not any(map(is_alive, pids.values())))


def test_a_lock_that_is_taken_again_says_that_the_shim_lives(node: Node) -> None:
    node.run(1)
    (node.folder() / "shim.lock").unlink()
    os.kill(node.pid("shim"), signal.SIGCHLD)
    wait_for((node.folder() / "shim.lock").exists)
    [row] = expect_done(node.order("list"))["jobs"]
    assert row["generations"][0]["state"] == "running"
