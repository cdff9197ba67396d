"""Reboots of a real node: once for each boot, and written down before.

Never the machine that the test runs on.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_node import Node, boottime, expect_done, is_alive, refusal, wait_for

from relaunch.agent.node import reboots
from relaunch.agent.state import read_boot_id
from relaunch.backends import local_power
from relaunch.backends.local import LIBRARIES, PROGRAMS, LocalBackend
from relaunch.spec.fleet import FleetNode, FleetSpec
from tests.doubles.install import calls, install_nvml, install_tool

MACHINE = Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@pytest.fixture
def count_reboots(programs: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """A reboot command that is only counted.

    The node stays on its boot, as one does whose services stop slowly.
    """
    install_tool(programs, "power")
    monkeypatch.setenv("RELAUNCH_REBOOT_COMMAND", json.dumps([str(programs / "power")]))
    return lambda: len(calls(programs, "power"))


def test_a_reboot_kills_processes_and_changes_the_boot_id_only(node: Node, programs: Path) -> None:
    before = read_boot_id(node.state)
    session = node.session().pid
    answer = expect_done(node.order("reboot", **node.make_reboot_order(), by="ada (claimed)"))
    assert answer["boot_id"] == before
    wait_for(lambda: read_boot_id(node.state) != before)
    wait_for(lambda: not is_alive(session))
    node.await_session_end()
    assert read_boot_id(node.state).startswith(MACHINE)
    assert Path("/proc/sys/kernel/random/boot_id").read_text().strip() == MACHINE
    probed = expect_done(node.order("probe", within=10.0, kernel_since=None))
    assert probed["boot_id"] == read_boot_id(node.state) != before
    [entry] = probed["reboots"]
    assert (entry["id"], entry["reason"], entry["boot_id"]) == (
        "r1",
        "Xid 79 on GPU 0000:05:00",
        before,
    )
    assert entry["by"] == "ada (claimed)"
    assert abs(entry["at"] - time.time()) < 60
    assert expect_done(node.prepare(1)), "the new boot takes launches"
    refused = node.order("reboot", **node.make_reboot_order(boot_id=before))
    assert refused is not None
    assert (refusal(refused), refused["boot_id"]) == ("boot_changed", read_boot_id(node.state))


def test_a_reboot_held_up_until_its_caller_gave_up_is_not_done(
    node: Node, count_reboots: Callable[[], int]
) -> None:
    """It waited for a lock, or its disk: a person may have forbidden reboots since."""
    expect_done(node.order("list"))
    lock = os.open(node.state / "node.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    until = boottime() + 1.0
    ordered = node.begin("reboot", **node.make_reboot_order(until=until))
    wait_for(lambda: boottime() > until)
    os.close(lock)
    # A slow machine may have let the wait for the lock end first.
    assert refusal(ordered.read_rest()[-1]) in ("late", "held")
    assert count_reboots() == 0
    assert reboots.list_newest(node.state) == []


def test_a_reboot_killed_before_its_command_is_done_by_a_repeat(node: Node, programs: Path) -> None:
    before = read_boot_id(node.state)
    node.set_failpoint("reboot.recorded")
    assert node.order("reboot", **node.make_reboot_order()) is None
    assert read_boot_id(node.state) == before
    [entry] = reboots.list_newest(node.state)
    assert entry["id"] == "r1" and "by" not in entry, "an order of an older controller"
    refused = node.prepare(1)
    assert refused is not None
    assert (refused["why"], refused["id"]) == ("rebooting", "r1")
    expect_done(node.order("reboot", **node.make_reboot_order()))
    wait_for(lambda: read_boot_id(node.state) != before)
    assert [entry["id"] for entry in reboots.list_newest(node.state)] == ["r1"], (
        "it is one reboot, and counts once"
    )
    node.await_session_end()
    expect_done(node.prepare(1))


def test_a_reboot_that_died_before_its_command_blocks_no_repair(node: Node, programs: Path) -> None:
    before = read_boot_id(node.state)
    node.set_failpoint("reboot.recorded")
    assert node.order("reboot", **node.make_reboot_order()) is None
    expect_done(node.order("reboot", **node.make_reboot_order(id="r2")))
    wait_for(lambda: read_boot_id(node.state) != before)
    assert [entry["id"] for entry in reboots.list_newest(node.state)] == ["r1", "r2"]


def test_two_reboots_ordered_at_once_run_one_command(
    node: Node, count_reboots: Callable[[], int]
) -> None:
    same = [node.begin("reboot", **node.make_reboot_order()) for _ in range(2)]
    answers = [stream.read_next() for stream in same]
    assert [expect_done(answer)["boot_id"] for answer in answers] == [read_boot_id(node.state)] * 2
    assert sorted(bool(answer and answer.get("already")) for answer in answers) == [False, True]
    other = node.order("reboot", **node.make_reboot_order(id="r2"))
    assert other is not None
    assert refusal(other) == "held" and "(reboot, r1)" in other["reason"]
    assert count_reboots() == 1
    assert len(reboots.list_newest(node.state)) == 1
    assert refusal(node.prepare(1)) == "rebooting"


def test_a_repeat_after_the_grace_of_services_reboots_again(
    node: Node, count_reboots: Callable[[], int]
) -> None:
    expect_done(node.order("reboot", **node.make_reboot_order()))
    record = json.loads((node.state / "rebooting.json").read_text())
    (node.state / "rebooting.json").write_text(json.dumps({**record, "ran": record["ran"] - 61}))
    assert "already" not in expect_done(node.order("reboot", **node.make_reboot_order()))
    assert count_reboots() == 2
    assert len(reboots.list_newest(node.state)) == 1


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ('["false"]', "false ended with 1: "),
        ('["/no/such/program"]', "/no/such/program cannot be run: No such file or directory"),
        (
            '["sh", "-c", "echo Interactive authentication required >&2; exit 4"]',
            "ended with 4: Interactive authentication required",
        ),
    ],
)
def test_a_failed_reboot_leaves_a_usable_node_and_does_not_count(
    node: Node, programs: Path, monkeypatch: pytest.MonkeyPatch, command: str, reason: str
) -> None:
    monkeypatch.setenv("RELAUNCH_REBOOT_COMMAND", command)
    refused = node.order("reboot", **node.make_reboot_order())
    assert refused is not None
    assert refusal(refused) == "cannot_reboot"
    assert reason.strip() in refused["reason"]
    assert reboots.list_newest(node.state) == []
    expect_done(node.prepare(1))


def test_a_reboot_command_that_is_none_is_said(
    node: Node, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAUNCH_REBOOT_COMMAND", "systemctl reboot")
    refused = node.order("reboot", **node.make_reboot_order())
    assert refused is not None
    assert refused["reason"].startswith("RELAUNCH_REBOOT_COMMAND ")


def test_a_reboot_that_cannot_be_written_down_is_not_done(
    node: Node, count_reboots: Callable[[], int]
) -> None:
    (node.state / "reboots.jsonl").mkdir()
    refused = node.order("reboot", **node.make_reboot_order())
    assert refused is not None
    assert refusal(refused) == "cannot_reboot"
    assert refused["reason"].endswith(os.strerror(errno.EISDIR))
    assert count_reboots() == 0
    assert expect_done(node.order("probe", within=10.0, kernel_since=None))["reboots"] == []


def test_the_journal_goes_on_after_a_torn_line_and_gives_twenty(node: Node) -> None:
    for number in range(25):
        reboots.record(node.state, f"r{number}", "a test")
    with open(node.state / "reboots.jsonl", "a") as file:
        file.write('{"at": 1, "id": "to')
    reboots.record(node.state, "r25", "after a loss of power")
    assert [entry["id"] for entry in reboots.list_newest(node.state)] == [
        f"r{number}" for number in range(6, 26)
    ]


# --- through the backend --------------------------------------------------------------------------


async def test_a_local_node_finds_its_own_tools_and_reboots_alone(
    tmp_path: Path, agent: Path, nvml_built: Path
) -> None:
    nodes = tuple(FleetNode(name=f"n{number}", address=f"127.0.0.{number}") for number in (1, 2))
    backend = LocalBackend(FleetSpec(name="lab", backend="local", nodes=nodes), tmp_path, agent)
    folder = backend.folder("n1")
    install_tool(folder / PROGRAMS, "dcgmi", stdout="of n1")
    install_nvml(folder / LIBRARIES, nvml_built)
    try:
        first, second = [await backend.probe(name, 20.0, None) for name in ("n1", "n2")]
        assert len(first["gpus"]["gpus"]) == 2
        assert second["gpus"].keys() == {"unreadable"}
        diagnosed = await backend.diagnose("n1", "r1", 1, 20.0)
        assert isinstance(diagnosed, dict)
        assert diagnosed["stdout"] == "of n1"
        rebooted = await backend.reboot("n1", "r1", first["boot_id"], "a test")
        assert isinstance(rebooted, dict)
        deadline = time.monotonic() + 60
        while read_boot_id(folder) == first["boot_id"]:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        assert read_boot_id(backend.folder("n2")) == second["boot_id"]
        assert (await backend.probe("n2", 20.0, None))["boot_id"] == second["boot_id"]
    finally:
        await backend.close()


def test_what_cuts_the_power_is_not_of_the_node_and_outlives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two that are ordered at once stop each other, and the node is left half dead."""
    started: list[dict[str, Any]] = []
    monkeypatch.setenv("RELAUNCH_AGENT_STATE", str(tmp_path))
    monkeypatch.setattr(local_power.subprocess, "Popen", lambda words, **more: started.append(more))
    local_power._main("order", tmp_path)
    [given] = started
    assert not [name for name in given["env"] if name.startswith("RELAUNCH_")]
    assert given["start_new_session"] is True
