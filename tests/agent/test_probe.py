"""What a node tells of itself: each part a value or why there is none, whatever the others do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from real_node import Node, boottime, wait_for

from relaunch.agent import processes, tools
from relaunch.agent.node import hold, links, probe, reboots
from relaunch.agent.state import read_boot_id

PROBE = {"within": 10.0, "kernel_since": None}
XID = "[    0.471100] NVRM: Xid (PCI:0000:05:00): 79, GPU has fallen off the bus."
"""Half a second after boot, which is past on every machine: lines of the future count as new."""


def ask(node: Node, **more: Any) -> dict[str, Any]:
    answer = node.order("probe", **{**PROBE, **more})
    assert answer is not None
    assert answer["outcome"] == "done", answer
    return answer


def test_a_probe_tells_how_an_idle_node_is(node: Node) -> None:
    before = set(os.listdir(node.state))
    answer = ask(node)
    assert answer["boot_id"] == read_boot_id(node.state)
    assert abs(answer["stamp"] - boottime()) < 10
    assert abs(answer["wall"] - time.time()) < 10
    assert answer["load"] >= 0
    assert 0 < answer["memory"]["available"] < answer["memory"]["total"]
    disk = answer["disks"][0]
    assert (disk["path"], disk["writable"], "reason" in disk) == (str(node.state), True, False)
    assert 0 < disk["free"] < disk["total"]
    assert (answer["jobs"], answer["held"], answer["reboots"]) == ([], None, [])
    left = set(os.listdir(node.state)) - before
    assert left <= {links.RECORD_FILE}, "a probe leaves the record of network ports, if there are"
    assert answer["resets"] == [] and isinstance(answer["links"]["ports"], list)


def test_a_file_system_is_reported_once(node: Node) -> None:
    rows = ask(node)["disks"]
    devices = [os.stat(row["path"]).st_dev for row in rows]
    assert len(set(devices)) == len(devices)


def test_a_probe_names_the_generations_that_live_here(node: Node) -> None:
    node.run(3)
    job = {"namespace": "default", "job": "j", "submission": 1, "generation": 3}
    assert ask(node)["jobs"] == [job]
    node.stop(3)
    assert ask(node)["jobs"] == []


def test_a_prepared_generation_counts_because_it_may_start(node: Node) -> None:
    node.prepare(1)
    assert [each["generation"] for each in ask(node)["jobs"]] == [1]


def test_an_ended_generation_is_not_counted_for_a_lingering_shim(
    node: Node,
) -> None:
    node.run(1, ["true"])
    shim = node.pid("shim")
    wait_for(lambda: ask(node)["jobs"] == [])
    assert shim in node.list_processes()


def test_processes_without_a_keeper_count_by_their_token(node: Node) -> None:
    node.run(1, ranks=1)
    environment = {
        **os.environ,
        "RELAUNCH_TOKEN": "default/other/4/9",
        "RELAUNCH_NODE_STATE": str(node.state),
    }
    with subprocess.Popen(["sleep", "1000"], env=environment) as stray:
        try:
            found = wait_for(lambda: len(jobs := ask(node)["jobs"]) == 2 and jobs)
            assert found[1] == {
                "namespace": "default",
                "job": "other",
                "submission": 4,
                "generation": 9,
            }
        finally:
            stray.kill()


def test_a_disk_that_cannot_be_written_is_said_to_be_so() -> None:
    row = probe._check_disk(Path("/proc"), writes=True)
    assert row["writable"] is False
    assert row["reason"]


def test_a_disk_that_does_not_answer_costs_its_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(probe, "_test_write", lambda folder: time.sleep(100))
    began = time.monotonic()
    rows = probe._check_disks(tmp_path, 0.3)
    assert time.monotonic() - began < 30
    assert rows[0]["writable"] is False and "within 0.3 s" in rows[0]["reason"]


def test_a_look_says_nothing_of_a_disk_that_takes_long(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(probe, "LOOK_TIMEOUT", 0.3)
    monkeypatch.setattr(probe.gpus, "read", lambda *_, **__: {"gpus": []})
    monkeypatch.setattr(probe, "_test_write", lambda folder: time.sleep(100))
    (disk,) = probe.look_at_hardware(tmp_path)["disks"]
    assert disk == {"unreadable": "it did not answer within 0.3 s"}


def test_a_look_leaves_counters_to_examinations(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(probe.gpus, "read", lambda *_, **__: {"gpus": []})
    monkeypatch.setattr(probe.links, "read_ports", lambda *_, **how: asked.append(how) or {})
    probe.look_at_hardware(tmp_path)
    assert asked == [{"counts": False}]


def test_the_test_of_a_disk_leaves_no_file_if_it_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[list[Path]] = []
    monkeypatch.setattr(os, "fsync", lambda handle: seen.append(list(tmp_path.iterdir())))
    assert probe._test_write(tmp_path) is None
    assert seen == [[]]


def test_work_that_dies_in_its_child_is_no_answer() -> None:
    def dies() -> dict[str, Any]:
        os.kill(os.getpid(), 9)
        return {}

    assert tools.run_bounded(dies, 5.0) is None
    assert tools.run_bounded(lambda: {"all": "well"}, 5.0) == {"all": "well"}


def test_work_that_sigkill_does_not_end_gets_another_parent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # What hangs in the kernel looks like this: no signal ends it.
    kill, written = os.kill, tmp_path / "pid"
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    monkeypatch.setattr(processes, "die_with", lambda parent: None)

    def hangs() -> dict[str, Any]:
        written.write_text(str(os.getpid()))
        time.sleep(1000)
        return {}

    assert tools.run_bounded(hangs, 1.0) is None
    left = processes.read_process(int(wait_for(lambda: written.exists() and written.read_text())))
    assert left is not None and left.is_alive
    try:
        # This process may become a shim, which takes its children for ranks.
        assert left.pid not in {one.pid for one in processes.list_descendants(os.getpid())}
    finally:
        kill(left.pid, 9)


# --- the kernel log -------------------------------------------------------------------------------


@pytest.fixture
def kernel_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "kernel.log"
    monkeypatch.setenv("RELAUNCH_KERNEL_LOG", str(path))
    return path


def test_the_kernel_log_is_reported_as_far_as_it_is_evidence(node: Node, kernel_log: Path) -> None:
    kernel_log.write_text(f"[    1.000000] usb 1-1: new device\n{XID}\n")
    assert ask(node)["kernel"] == {"lines": [XID]}


def test_a_log_that_cannot_be_read_says_why(node: Node, kernel_log: Path) -> None:
    kernel = ask(node)["kernel"]
    assert kernel["lines"] == [] and kernel.keys() == {"unreadable", "lines"}
    assert kernel["unreadable"].endswith(f": {kernel_log}")


def test_at_most_the_newest_two_hundred_lines_are_reported(node: Node, kernel_log: Path) -> None:
    kernel_log.write_text(
        "".join(f"[{number}.000000] NVRM: Xid {number}\n" for number in range(300))
    )
    lines = ask(node)["kernel"]["lines"]
    assert (len(lines), lines[0], lines[-1]) == (
        200,
        "[100.000000] NVRM: Xid 100",
        "[299.000000] NVRM: Xid 299",
    )


def test_only_the_seconds_asked_for_are_reported_for_timed_lines(
    node: Node, kernel_log: Path
) -> None:
    uptime = time.monotonic()  # parts of it: this machine may have been booted a minute ago
    new, old = (
        f"[{at:.6f}] NVRM: Xid {name}" for at, name in ((0.9 * uptime, "new"), (uptime / 4, "old"))
    )
    kernel_log.write_text(f"{old}\nnode kernel: {new}\nkernel: {old}\nNVRM: Xid timeless\n")
    assert ask(node, kernel_since=uptime / 2)["kernel"]["lines"] == [
        f"node kernel: {new}",
        "NVRM: Xid timeless",
    ]
    assert len(ask(node)["kernel"]["lines"]) == 4


def test_lines_from_before_a_reboot_are_not_reported_again(node: Node, kernel_log: Path) -> None:
    kernel_log.write_text(f"{XID}\n")
    reboots.record_log_position(node.state)
    assert ask(node)["kernel"]["lines"] == [XID], "the node has not rebooted yet"
    assert ask(node, kernel_since=0.001)["kernel"]["lines"] == []
    (node.state / "boot_id").write_text("another\n")
    assert ask(node)["kernel"]["lines"] == []
    with open(kernel_log, "a") as file:
        file.write("[ 3.000000] NVRM: Xid (PCI:0000:05:00): 48\n")
    assert ask(node)["kernel"]["lines"] == ["[ 3.000000] NVRM: Xid (PCI:0000:05:00): 48"]


def test_untimed_lines_from_before_a_reset_are_not_what_followed(
    node: Node, kernel_log: Path
) -> None:
    kernel_log.write_text("NVRM: Xid old\n")
    reboots.record_log_position(node.state)
    with open(kernel_log, "a") as file:
        file.write("NVRM: Xid new\n")
    assert ask(node, kernel_since=60)["kernel"]["lines"] == ["NVRM: Xid new"]
    assert ask(node)["kernel"]["lines"] == ["NVRM: Xid old", "NVRM: Xid new"]


# --- orders that make no sense --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ({"kernel_since": None}, "within is missing; expected a number of at least 0.1"),
        ({"within": 0, "kernel_since": None}, "within is 0; expected a number of at least 0.1"),
        (
            {"within": 5, "kernel_since": "yesterday"},
            'kernel_since is "yesterday"; expected a number of at least 0',
        ),
    ],
)
def test_an_order_to_probe_that_makes_no_sense_is_refused(
    node: Node, order: dict[str, Any], reason: str
) -> None:
    answer = node.order("probe", **order)
    assert answer == {"outcome": "refused", "why": "bad_order", "reason": reason}


def test_one_call_answers_a_probe(node: Node) -> None:
    call = [sys.executable, "-S", str(node.agent), "probe"]
    given = json.dumps({"protocol": 1, **PROBE}).encode()
    done = subprocess.run(call, input=given, capture_output=True, env=node.environment, timeout=100)
    assert json.loads(done.stdout)["outcome"] == "done"


def test_a_process_waiting_for_its_kill_is_not_one_that_lives() -> None:
    status = (
        "Name:\tpython\nState:\tD (disk sleep)\nSigPnd:\t{}\nShdPnd:\t{}\n"
        "SigBlk:\t0000000000000100\n"
    )
    none, kill = "0" * 16, "0000000000000100"
    assert hold.has_kill_pending(status.format(kill, none))
    assert hold.has_kill_pending(status.format(none, "0000000000004100"))
    assert not hold.has_kill_pending(status.format(none, "0000000000004000"))
    assert not hold.is_kill_pending(os.getpid())
