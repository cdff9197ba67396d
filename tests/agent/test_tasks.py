"""The record of each running rank: there before its command starts, gone after its exit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from typing import Any

import pytest
from real_node import Node, expect_done, is_alive, python_command, token, wait_for

from relaunch.agent.processes import read_process
from relaunch.agent.state import read_boot_id

LOOK = """
import os, sys
folder = os.path.dirname(os.environ["RELAUNCH_PROGRESS_FILE"]) + "/../running"
print(open(f"{folder}/rank_{sys.argv[1]}.json").read(), os.getpid(), flush=True)
"""
"""The first that a rank does: it prints its record, and its pid."""
WAIT = "import time; time.sleep(1000)"


def records(node: Node) -> dict[str, Any]:
    """The records of ranks, found as the agent finds them: a file that is being written is none."""
    folder = node.folder() / "running"
    found = {}
    for path in sorted(folder.glob("rank_*")):
        with contextlib.suppress(FileNotFoundError):  # removed since it was listed
            found[path.name] = json.loads(path.read_text())
    return found


def test_s2_5_a_task_is_recorded_before_its_command_starts(node: Node) -> None:
    command = ["sh", "-c", 'exec "$@" "$R"', "sh", *python_command(LOOK + WAIT)]
    pids = node.run(1, command, rank_env=[{"R": "0"}, {"R": "1"}])
    for rank in (0, 1):
        text = wait_for(lambda rank=rank: node.log(rank).strip())
        found, _, pid = text.rpartition(" ")
        record = json.loads(found)
        assert int(pid) == pids[str(rank)]
        running = read_process(int(pid))
        assert running is not None
        assert record.pop("at") > 0
        assert record == {
            "token": token(1),
            "node": "n1",
            "boot_id": read_boot_id(node.state),
            "rank": rank,
            "pid": running.pid,
            "started": running.started,
        }
    assert sorted(records(node)) == ["rank_0.json", "rank_1.json"]


def test_s2_5_a_task_killed_before_its_command_leaves_none(node: Node) -> None:
    """Its process dies between the record and the command: it ran nothing, and it is reported."""
    failpoint = node.set_failpoint("rank.recorded")
    node.run(1, ["sh", "-c", "echo begun"], ranks=1, rank_env=[{}])
    exited = node.watch().read_observation("RankExited")
    assert (exited["rank"], exited["signal"], node.log(0)) == (0, signal.SIGKILL, "")
    assert not failpoint.exists()
    wait_for(lambda: records(node) == {})


@pytest.mark.parametrize("ending", ["an order", "SIGKILL", "SIGTERM"])
def test_s2_5_the_record_of_a_task_is_removed_at_its_exit(node: Node, ending: str) -> None:
    pids = node.run(1)
    wait_for(lambda: len(records(node)) == 2)
    if ending == "an order":
        expect_done(node.stop())
    else:
        os.kill(pids["0"], getattr(signal, ending))
    wait_for(lambda: records(node) == {})
    assert not any(map(is_alive, pids.values()))


def test_s2_5_only_the_record_of_the_task_that_ended_goes(node: Node) -> None:
    command = ["sh", "-c", 'test "$R" = 0 || exec sleep 1000']
    node.run(1, command, rank_env=[{"R": "0"}, {"R": "1"}])
    assert node.watch().read_observation("RankExited")["rank"] == 0
    wait_for(lambda: sorted(records(node)) == ["rank_1.json"])


def test_s2_5_the_records_of_a_killed_shim_go_with_its_tasks(node: Node) -> None:
    pids = node.run(1)
    node.pid("supervisor")
    os.kill(node.pid("shim"), signal.SIGKILL)
    wait_for(lambda: records(node) == {})
    assert not any(map(is_alive, pids.values()))


def test_s2_5_a_record_that_a_boot_left_says_of_which_boot(node: Node) -> None:
    node.run(1)
    boot = read_boot_id(node.state)
    node.kill_everything()
    (node.state / "boot_id").write_text("second")
    assert {record["boot_id"] for record in records(node).values()} == {boot}
    assert boot != read_boot_id(node.state)
    expect_done(node.stop())
    assert records(node) == {}


def test_s2_5_a_task_that_cannot_be_started_leaves_no_record(node: Node) -> None:
    assert node.prepare(1) is not None
    answer = node.start(1, ["no-such-program"])
    assert answer is not None and answer["why"] == "command_not_found"
    wait_for(lambda: records(node) == {})
