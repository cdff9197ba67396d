"""Rebooting and power-cycling container instances.

Done once, proven, and finished by the next controller to look.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.backends.base import Refusal, Unreachable
from relaunch.backends.ecs import repairs as repairs_module
from relaunch.backends.ecs.aws import Aws, AwsError, Kind
from relaunch.backends.ecs.quarantine import Marks
from relaunch.backends.ecs.reboots import (
    KEPT,
    LONGEST,
    Journal,
    JournalEntry,
    JournalPhase,
    Way,
    format_entry,
    read,
)
from relaunch.backends.ecs.repairs import HARD_RESET
from relaunch.backends.ecs.tasks import build_started_by
from relaunch.evidence.catalog import catalog
from relaunch.evidence.findings import Verdict
from relaunch.generation import Token
from relaunch.pool.messages import Claim, Place
from relaunch.pool.state import ClaimRecord, FleetState, NodeRecord, NodeStatus
from relaunch.repair.machine import begin, step
from relaunch.repair.state import (
    FinishRepair,
    NoAnswer,
    NodeDiagnosed,
    NodeProbed,
    OrderDone,
    OrderRefused,
    RepairEvent,
    RepairRules,
    WaitEnded,
)
from relaunch.spec.fleet import FleetNode
from relaunch.spec.policy import Strategy
from tests.backends.ecs_site import (
    CHECKED,
    REPAIR,
    Calls,
    Make,
    Site,
    add_worker,
    aws,
    eventually,
    make,
    nothing_told,
    real,
)
from tests.doubles.aws import LOST, RESET, THROTTLE, error
from tests.doubles.aws.groups import Group
from tests.recovery.nodes import PASS

__all__ = ["aws", "make", "nothing_told", "real"]


class Killed(Exception):
    """The worker is gone."""


ACTS = (
    "CreateTags",
    "DeleteTags",
    "EnterStandby",
    "ExitStandby",
    "UpdateContainerInstancesState",
    "RebootInstances",
    "StopInstances",
    "StartInstances",
)


class Dying(Calls):
    """Before its next call that changes anything, after so many of them.

    Where it dies between two looks makes no difference.
    """

    def __init__(self, real: Aws, at: int | None = None) -> None:
        super().__init__(real)
        self.at, self.acted = at, 0

    async def call(self, service: str, operation: str, **request: Any) -> dict[str, Any]:
        if operation in ACTS:
            if self.acted == self.at:
                raise Killed
            self.acted += 1
        return await super().call(service, operation, **request)


# --- reboots: S1.6


async def test_s1_6_a_reboot_needs_a_new_boot_id_and_its_agent_back(
    make: Make,
) -> None:
    """The reference took an instance event with status ACTIVE for the node's return.

    That was 0.6 s after the order, and it launched there.
    """
    make()  # ECS says something else where it has no ACTIVE instance at all
    site = make(dcgmi=PASS)
    before = await site.probe()
    site.instance.machine.connects = False  # as long as the test wants
    answer = await site.repairs.reboot(
        "n1", site.ec2_id, REPAIR, before["boot_id"], "Xid 79", site.probe
    )
    assert answer == {"outcome": "done", "boot_id": before["boot_id"]}
    with pytest.raises(Unreachable, match=r"has not gone down|has not come back"):
        await add_worker(site).settled(0.0)
    await _booted(site)
    placed = await site.run("airflow")
    assert not placed.startswith("arn:") and site.status == "DRAINING", (
        "its agent is back, and the node was not examined yet"
    )
    after = await add_worker(site).probe()
    assert after["boot_id"] != before["boot_id"] and site.status == "ACTIVE"
    [entry] = after["reboots"]
    assert (entry["id"], entry["boot_id"]) == (REPAIR, before["boot_id"])
    assert site.health(after, None).reboots[0].id == REPAIR
    again = await site.reboot(before["boot_id"], id="repair/other")
    assert isinstance(again, Refusal) and (again.why, again.boot_id) == (
        "boot_changed",
        site.instance.boot_id,
    )
    assert site.count_requests("RebootInstances") == 1


async def _booted(site: Site) -> None:
    """Wait until it has rebooted and a probe has seen that its agent was away."""
    await eventually(lambda: site.instance.boots == 2)
    with pytest.raises(Unreachable, match="has not come back"):
        await add_worker(site).settled(0.0)
    site.instance.connect()


async def test_the_same_order_twice_is_one_reboot(make: Make) -> None:
    site = make()
    site.instance.machine.connects = False
    boot = site.instance.boot_id
    assert await site.reboot() == {"outcome": "done", "boot_id": boot}
    assert await add_worker(site).reboot(boot) == {
        "outcome": "done",
        "boot_id": boot,
        "already": True,
    }
    other = await site.reboot(boot, id="repair/other")
    assert isinstance(other, Refusal) and other.why == "held"
    await _booted(site)
    await site.settled()
    assert (await site.reboot(boot))["already"] is True  # type: ignore[index]
    assert (site.count_requests("RebootInstances"), site.instance.boots) == (1, 2)


async def test_nothing_that_runs_there_is_rebooted_away(make: Make) -> None:
    site = make()
    site.double.script("train", after=None)

    async def facts(**more: Any) -> Any:
        return await site.repairs.reboot(
            "n1", site.ec2_id, REPAIR, "b", "Xid", lambda: _answer_probe({"boot_id": "b", **more})
        )

    for refused in (
        await facts(jobs=[{"job": "llama", "generation": 3}]),
        await facts(held={"by": "diagnose", "id": "r9"}),
        await facts(gpus={"gpus": [{"bus_id": "0", "processes": [{"pid": 42}]}]}),
    ):
        assert isinstance(refused, Refusal) and refused.why == "busy"
    await site.run("ecs-svc/1")
    await site.run(build_started_by(Token("default", "j", 1, 2)))
    late = await facts()  # it was placed after the probe
    assert isinstance(late, Refusal) and "job j generation 2" in late.reason
    assert (site.status, site.count_requests("RebootInstances")) == ("ACTIVE", 0)
    assert (await Journal.read(site.aws, site.ec2_id)).entries == ()


async def _answer_probe(facts: dict[str, Any]) -> Mapping[str, Any]:
    return {"outcome": "done", **facts}


async def test_an_instance_that_ec2_gives_up_is_not_rebooted_but_moved(make: Make) -> None:
    impaired, retired, unproven = make(), make(), make(CHECKED)
    impaired.instance.status(system="impaired")
    retired.instance.status(event="instance-retirement")
    for site in (impaired, retired, unproven):
        refused = await site.reboot()
        assert isinstance(refused, Refusal) and refused.why == "cannot_reboot", (
            "recovery cycles its power then"
        )
        assert site.count_requests("RebootInstances") == 0


async def test_a_refused_order_is_withdrawn_and_an_unanswered_one_not(make: Make) -> None:
    denied, throttled, lost = make(), make(), make()
    site = denied
    site.double.faults.add("RebootInstances", error("UnauthorizedOperation", "no", 403))
    refused = await denied.reboot()
    assert isinstance(refused, Refusal) and (refused.why, denied.status) == (
        "cannot_reboot",
        "ACTIVE",
    )
    site.double.faults.add("RebootInstances", THROTTLE)
    with pytest.raises(Unreachable, match="RequestLimitExceeded"):
        await throttled.reboot()
    assert (
        throttled.status == "ACTIVE"
        and (await Journal.read(throttled.aws, throttled.ec2_id)).entries == ()
    )
    before = lost.instance.boot_id
    site.double.faults.add("RebootInstances", LOST)
    with pytest.raises(Unreachable, match="not answered"):
        await lost.reboot()
    await eventually(
        lambda: lost.instance.boots == 2 and lost.instance.machine.registered.agent_connected
    )
    lost.clock.ahead = 400
    journal = await lost.settled()
    assert [one["boot_id"] for one in journal.list_reboots(lost.instance.boot_id, None)] == [before]
    assert (lost.count_requests("RebootInstances"), lost.status) == (1, "ACTIVE")


async def test_a_node_that_never_returns_is_unknown_until_power_cycled(
    make: Make,
) -> None:
    site = make()
    site.instance.never_returns()
    await site.reboot()
    await eventually(lambda: not site.instance.machine.registered.agent_connected)
    site.clock.ahead = 1500
    with pytest.raises(
        Unreachable, match=r"reboot was ordered 150\d s ago, and its ECS agent has not come back"
    ):
        await site.settled(0.2)
    site.instance.never_returns(True)
    answer = await site.repairs.cycle_power("n1", site.ec2_id, REPAIR, 20.0)
    assert (answer["exit_code"], "instance store" in answer["output"]) == (0, True)
    journal = await add_worker(site).settled()
    assert {entry.way for entry in journal.entries if entry.over} == {Way.REBOOT, Way.POWER}
    assert (site.status, site.instance.machine.power) == ("ACTIVE", "running")


@pytest.mark.parametrize(
    ("of", "in_group", "acts"),
    [
        pytest.param("reboot", False, 4, id="a reboot"),
        pytest.param("reboot", True, 7, id="a reboot in a group", marks=pytest.mark.long),
        pytest.param("power", False, 5, id="a stop and start", marks=pytest.mark.long),
        pytest.param("power", True, 8, id="those in a group", marks=pytest.mark.long),
    ],
)
async def test_s1_6_a_worker_killed_between_two_calls_reboots_once(
    make: Make, of: str, in_group: bool, acts: int
) -> None:
    """However much of it was done, the next look finishes it.

    Or nothing of it is left and it is ordered again.
    """
    whole = make()
    if in_group:
        grouped(whole)
    alive = add_worker(whole, Dying(whole.aws.real))
    await _ordered(alive, of)
    assert alive.aws.acted == acts

    async def killed_after(acts: int) -> None:
        site = make()
        group = grouped(site) if in_group else None
        before = site.instance.boot_id
        with pytest.raises(Killed):
            await _ordered(add_worker(site, Dying(site.aws.real, acts)), of)
        await _recovered(add_worker(site), before, of)
        assert (site.instance.boots, site.status) == (2, "ACTIVE"), (
            f"killed after {acts} of {alive.aws.acted}"
        )
        assert site.count_requests("RebootInstances") == (1 if of == "reboot" else 0)
        if group is not None:
            await eventually(lambda: (state_in(group, site), group.desired) == ("InService", 1))

    await asyncio.gather(*(killed_after(acts) for acts in range(alive.aws.acted)))


@pytest.mark.long_after(variants=1)
@pytest.mark.parametrize("call", ["ExitStandby", "UpdateContainerInstancesState", "CreateTags"])
async def test_s1_6_a_worker_killed_as_a_node_returns_is_replaced(make: Make, call: str) -> None:
    """The calls after the reboot: out of Standby, to ACTIVE, and the end of the journal's entry."""
    site = make()
    group = grouped(site)
    site.instance.machine.connects = False
    await site.reboot()
    await _booted(site)
    dying = add_worker(site, DyingAt(site.aws.real, call))
    with pytest.raises(Killed):
        await dying.settled()
    journal = await add_worker(site).settled()
    assert [entry.over for entry in journal.entries] == [True]
    await eventually(lambda: (state_in(group, site), group.desired) == ("InService", 1))
    assert (site.status, site.instance.boots) == ("ACTIVE", 2)
    assert [site.count_requests(name) for name in ("EnterStandby", "ExitStandby")] == [1, 1]


class DyingAt(Calls):
    """Before its first call of an operation."""

    def __init__(self, real: Aws, operation: str) -> None:
        super().__init__(real)
        self._operation = operation

    async def call(self, service: str, operation: str, **request: Any) -> dict[str, Any]:
        if operation == self._operation:
            raise Killed
        return await super().call(service, operation, **request)


async def _ordered(site: Site, of: str) -> None:
    await (
        site.reboot()
        if of == "reboot"
        else site.repairs.cycle_power("n1", site.ec2_id, REPAIR, 20.0)
    )


async def _recovered(site: Site, before: str, of: str) -> None:
    """As a repair goes on: it looks, and orders again what never arrived.

    A minute passes with each look that says nothing.
    """
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            journal = await site.settled(0.3)
        except Unreachable:
            site.clock.ahead += 60
            continue
        if site.instance.boot_id != before:
            return
        launched = (await site.cluster.machine(site.ec2_id)).launched_at
        if not journal.list_reboots(before, launched):
            await _ordered(site, of)
    raise AssertionError("it was never rebooted")


# --- reboots in an Auto Scaling group


def grouped(site: Site, min_size: int = 0, max_size: int = 1) -> Group:
    """Put the instance into a new group, which terminates it if it goes down in service."""
    return site.double.add_group(f"group of {site.ec2_id}", [site.ec2_id], min_size, max_size)


def state_in(group: Group, site: Site) -> str:
    return group.states[site.ec2_id]


async def test_s1_6_a_reboot_is_in_the_standby_of_its_group(make: Make) -> None:
    site = make()
    group = grouped(site)
    site.instance.machine.connects = False  # as long as the test wants
    before = site.instance.boot_id
    assert await site.reboot() == {"outcome": "done", "boot_id": before}
    await _booted(site)
    assert (state_in(group, site), group.desired) == ("Standby", 0)
    await add_worker(site).settled()
    await eventually(lambda: (state_in(group, site), group.desired) == ("InService", 1))
    assert (site.status, site.instance.boots) == ("ACTIVE", 2)
    alone = make()
    await alone.reboot()
    await _booted_by_itself(alone)
    await alone.settled()
    assert [alone.count_requests(name) for name in ("EnterStandby", "ExitStandby")] == [0, 0]


async def test_a_group_at_its_minimum_is_why_it_is_not_rebooted(
    make: Make, snapshot: SnapshotAssertion
) -> None:
    site, denied = make(), make()
    group = grouped(site, min_size=1)
    refused = await site.reboot()
    assert isinstance(refused, Refusal) and refused.why == "held", "no power cycle follows that"
    assert refused.reason.replace(site.ec2_id, "i-1") == snapshot
    assert (site.status, site.instance.boots, state_in(group, site)) == ("ACTIVE", 1, "InService")
    assert (await Journal.read(site.aws, site.ec2_id)).entries == ()
    grouped(denied)
    site.double.faults.add("EnterStandby", error("AccessDenied", "no", 403))
    refused = await denied.reboot()
    assert isinstance(refused, Refusal) and refused.reason.endswith("AccessDenied: no")
    site.double.faults.add("DescribeAutoScalingInstances", error("AccessDenied", "no", 403))
    refused = await denied.reboot()
    assert isinstance(refused, Refusal) and refused.why == "held"
    for one in (site, denied):
        assert (one.status, one.count_requests("RebootInstances")) == ("ACTIVE", 0)


async def test_a_reboot_refused_in_standby_leaves_it_again(make: Make) -> None:
    site = make()
    group = grouped(site)
    site.double.faults.add("RebootInstances", error("UnauthorizedOperation", "no", 403))
    refused = await site.reboot()
    assert isinstance(refused, Refusal) and refused.why == "cannot_reboot"
    await eventually(lambda: (state_in(group, site), group.desired) == ("InService", 1))
    assert site.status == "ACTIVE" and (await site.settled(0.1)).entries == ()


async def test_an_instance_in_a_persons_standby_stays_there(make: Make) -> None:
    site, leaving = make(), make()
    group, other = grouped(site), grouped(leaving)
    group.states[site.ec2_id], group.desired = "Standby", 0
    await site.reboot()
    await _booted_by_itself(site)
    await site.settled()
    assert (state_in(group, site), site.status) == ("Standby", "ACTIVE")
    other.states[leaving.ec2_id] = "Terminating"
    refused = await leaving.reboot()
    assert isinstance(refused, Refusal) and "has it Terminating" in refused.reason
    assert (leaving.status, leaving.count_requests("CreateTags")) == ("ACTIVE", 0)


async def _booted_by_itself(site: Site) -> None:
    await eventually(
        lambda: site.instance.boots == 2 and site.instance.machine.registered.agent_connected
    )
    site.clock.ahead += HARD_RESET + 60  # its short absence may have been missed


async def test_a_group_that_takes_it_not_back_is_named(make: Make) -> None:
    site = make()
    group = grouped(site)
    await site.reboot()
    await _booted_by_itself(site)
    group.max_size = 0
    with pytest.raises(Unreachable, match=r"does not take it back from Standby: .* max-size=0"):
        await site.settled(0.1)
    group.max_size = 1
    await add_worker(site).settled()
    await eventually(lambda: state_in(group, site) == "InService")
    assert site.status == "ACTIVE"


@pytest.mark.parametrize("kind", [LOST, RESET], ids=["applied", "not applied"])
async def test_an_answer_of_its_group_that_is_lost_is_looked_at(make: Make, kind: Any) -> None:
    site = make()
    group = grouped(site)
    before = site.instance.boot_id
    site.double.faults.add("EnterStandby", kind)
    with pytest.raises(Unreachable, match="not answered"):
        await site.reboot()
    await _recovered(add_worker(site), before, "reboot")
    await eventually(lambda: (state_in(group, site), group.desired) == ("InService", 1))
    assert (site.count_requests("RebootInstances"), site.status) == (1, "ACTIVE")


async def test_a_group_that_takes_too_long_is_waited_for_later(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make()
    group = grouped(site)
    monkeypatch.setattr(repairs_module, "STANDBY_TIMEOUT", 0.0)
    monkeypatch.setattr(site.double.delays, "standby", 3600.0)
    with pytest.raises(Unreachable, match=r"has it EnteringStandby, 0 s after"):
        await site.reboot()
    site.clock.ahead += HARD_RESET + 60
    with pytest.raises(Unreachable, match="still putting it into Standby"):
        await site.settled(0.1)
    group.states[site.ec2_id] = "Standby"
    await add_worker(site).settled()
    assert (site.count_requests("RebootInstances"), site.status) == (0, "ACTIVE")
    assert (state_in(group, site), group.desired) == ("Pending", 1)


# --- power


@pytest.mark.long
async def test_s1_6_without_node_task_a_launch_time_proves_the_restart(
    make: Make,
) -> None:
    site = make(CHECKED)
    before = await site.probe()
    launched = float(before["boot_id"].rpartition(":")[2])
    await eventually(lambda: time.time() - launched > 1.05)  # launch times are whole seconds
    answer = await site.repairs.cycle_power("n1", site.ec2_id, REPAIR, 20.0)
    assert (answer["program"], answer["exit_code"]) == ("EC2 stop and start", 0)
    after = await site.probe()
    assert after["boot_id"] != before["boot_id"] and after["stamp"] < before["stamp"] + 60
    assert [one["id"] for one in after["reboots"]] == [REPAIR]
    assert (await site.repairs.cycle_power("n1", site.ec2_id, REPAIR, 20.0))["exit_code"] == 0
    assert (site.count_requests("StopInstances"), site.count_requests("StartInstances")) == (1, 1)


@pytest.mark.parametrize("after", [0, pytest.param(1, marks=pytest.mark.long)])
async def test_s1_5_with_only_a_health_check_the_node_restarts_once(make: Make, after: int) -> None:
    site = make(CHECKED)
    site.double.script("check", exit_code=after)
    rules = RepairRules("act", 1, 8, timedelta(minutes=3), timedelta(0), has_power_command=True)
    now = datetime.now(UTC)
    state = begin(
        id=REPAIR,
        fleet="f",
        node="n1",
        strategy=Strategy.REBOOT_NODE,
        gpus=(),
        reason="its check",
        by="j",
        rules=rules,
        now=now,
    )
    state, decision = step(state, (), now, catalog())
    while not isinstance(decision, FinishRepair):
        now += timedelta(seconds=5)
        event = await _carry_out(site, decision)
        state, decision = step(state, [event], now, catalog())
    assert (decision.outcome, decision.verdict) == (
        ("done", Verdict.HEALTHY) if after == 0 else ("refused", Verdict.UNHEALTHY)
    ), decision.reason
    assert "power-cycled" in decision.reason
    assert (
        site.count_requests("StopInstances"),
        site.count_requests("RebootInstances"),
        site.instance.boots,
    ) == (
        1,
        0,
        2,
    )


async def _carry_out(site: Site, decision: Any) -> RepairEvent:
    """As the activities of a repair do it."""
    try:
        match decision.kind:
            case "ProbeNode":
                return NodeProbed(dict(await site.probe()))
            case "RunDiag":
                found = await site.diagnose()
                return (
                    OrderRefused(found.why, found.reason)
                    if isinstance(found, Refusal)
                    else NodeDiagnosed(dict(found))
                )
            case "RebootNode":
                answer = await site.reboot(decision.boot_id)
                return (
                    OrderRefused(answer.why, answer.reason)
                    if isinstance(answer, Refusal)
                    else OrderDone(dict(answer))
                )
            case "PowerCycleNode":
                launched = float((await site.probe())["boot_id"].rpartition(":")[2])
                await eventually(
                    lambda: time.time() - launched > 1.05
                )  # launch times are whole seconds
                return OrderDone(
                    dict(await site.repairs.cycle_power("n1", site.ec2_id, REPAIR, 20.0))
                )
            case _:
                return WaitEnded()
    except Unreachable as error:
        return NoAnswer(error.reason)


async def test_no_capacity_is_said_and_every_later_look_tries_again(make: Make) -> None:
    site = make()
    fault = site.double.faults.add(
        "StartInstances", error("InsufficientInstanceCapacity", "We have none."), times=None
    )
    answer = None
    while answer is None:
        with suppress(Unreachable):  # it has not stopped within that time: the same order again
            answer = await site.repairs.cycle_power("n1", site.ec2_id, REPAIR, 0.8)
    assert answer["exit_code"] == 75 and answer["output"].startswith("it is stopped")
    with pytest.raises(Unreachable, match="InsufficientInstanceCapacity"):
        await add_worker(site).settled(0.1)
    site.double.faults.remove(fault)
    await add_worker(site).settled()
    assert (site.instance.machine.power, site.instance.boots) == ("running", 2)


async def test_a_repair_longer_than_its_order_goes_on_at_the_next_look(
    make: Make,
) -> None:
    site = make()
    with pytest.raises(Unreachable, match="its power is being cycled"):
        await site.repairs.cycle_power("n1", site.ec2_id, REPAIR, 0.0)
    assert (await add_worker(site).settled()).entries[0].over
    assert site.count_requests("StopInstances") == 1


async def test_one_that_cannot_be_stopped_is_left_as_it_is(make: Make) -> None:
    site = make()
    site.double.faults.add(
        "StopInstances", error("OperationNotPermitted", "The instance is protected.")
    )
    answer = await site.repairs.cycle_power("n1", site.ec2_id, REPAIR, 5.0)
    assert answer["exit_code"] == 1 and answer["output"].endswith(
        "OperationNotPermitted: The instance is protected."
    )
    assert (await site.settled(0.1)).list_reboots("", None) == [] or site.instance.boots == 1
    site.double.faults.add("CreateTags", error("UnauthorizedOperation", "no", 403))
    assert (await site.repairs.cycle_power("n1", site.ec2_id, "repair/2", 5.0))["exit_code"] == 1
    assert site.instance.boots == 1


async def test_an_auto_scaling_group_must_leave_it_alone_during_that(make: Make) -> None:
    site = make()
    group = grouped(site)
    assert (await site.repairs.cycle_power("n1", site.ec2_id, REPAIR, 20.0))["exit_code"] == 0
    assert site.instance.boots == 2, "out of Standby the group would have terminated it"
    await eventually(lambda: (state_in(group, site), group.desired) == ("InService", 1))
    group.states[site.ec2_id], group.desired = "Standby", 0  # a person put it there, and it stays
    assert (await site.repairs.cycle_power("n1", site.ec2_id, "repair/2", 20.0))["exit_code"] == 0
    assert (state_in(group, site), group.desired) == ("Standby", 0)
    assert [site.count_requests(name) for name in ("EnterStandby", "ExitStandby")] == [1, 1]


async def test_a_group_at_its_minimum_is_why_it_is_not_stopped(make: Make) -> None:
    site = make()
    group = grouped(site, min_size=1)
    answer = await site.repairs.cycle_power("n1", site.ec2_id, REPAIR, 20.0)
    assert answer["exit_code"] == 1 and "min-size=1" in answer["output"]
    assert (site.instance.boots, state_in(group, site)) == (1, "InService")


async def test_a_stop_that_hangs_is_forced(make: Make) -> None:
    site = make()
    site.instance.machine.node.delays.power_off = 30.0
    try:
        with pytest.raises(Unreachable, match=r"asked to stop it|has been stopping"):
            await site.repairs.cycle_power("n1", site.ec2_id, REPAIR, 0.5)
    finally:
        site.instance.machine.node.delays.power_off = 0.05
    site.clock.ahead = 130
    with pytest.raises(Unreachable, match="asked to stop it by force"):
        await site.settled(0.0)
    stops = [
        one.request.get("Force")
        for one in site.double.requests
        if one.operation == "StopInstances" and site.ec2_id in one.request.values()
    ]
    assert stops == [None, "true"]


# --- the rest


async def test_a_quarantined_instance_says_so_once_its_job_has_left(
    make: Make,
) -> None:
    site = make()
    node = FleetNode(name="n1", address=site.ec2_id)
    marks = Marks("lab", site.cluster, lambda name: node, None)

    async def marked(standing: NodeStatus, *claims: ClaimRecord) -> str | None:
        await marks.nodes(
            FleetState("lab", nodes=(NodeRecord(node, status=standing),), claims=claims), 1
        )
        return (await site.cluster.instance(site.ec2_id)).attributes.get("relaunch.quarantine")

    stays = ClaimRecord(Claim("llama", 1000, 1, 1, holds=(Place("n1"),)))
    assert await marked(NodeStatus.QUARANTINED, stays) is None, "it is launched again where it is"
    assert await marked(NodeStatus.QUARANTINED) == "lab"
    assert await marked(NodeStatus.IN_SERVICE) is None
    instance = await site.cluster.instance(site.ec2_id)
    await site.cluster.put_attributes(instance.arn, {"relaunch.quarantine": "ada"})
    marks._written.clear()
    assert await marked(NodeStatus.IN_SERVICE) == "ada", (
        "what another writer has written is not overwritten"
    )
    writes = site.double.calls["PutAttributes"]
    assert await marked(NodeStatus.QUARANTINED) == "ada"
    assert site.double.calls["PutAttributes"] == writes


def test_gpus_of_an_instance_are_not_reset(make: Make) -> None:
    assert make().repairs.reset_gpus("n1").why == "cannot_reset"


def test_an_entry_is_what_was_written() -> None:
    entry = JournalEntry(
        Way.REBOOT,
        "repair/a b/n1",
        1_800_000_000.0,
        "2f1c+x",
        JournalPhase.DOWN,
        sent=True,
        forced=True,
    )
    assert read(entry.key, format_entry(entry)) == entry
    long = JournalEntry(Way.POWER, "r" * 300, 1.0, "", JournalPhase.INTENT, standby=True)
    kept = read(long.key, format_entry(long))
    assert (
        kept is not None
        and len(format_entry(long)) == LONGEST
        and format_entry(kept) == format_entry(long)
    )
    for key, value in (
        ("Name", "x"),
        ("relaunch:reboot:1", "sent"),
        ("relaunch:reboot:1", "sent now b r"),
        ("relaunch:x:1", "sent 1 b r"),
    ):
        assert read(key, value) is None


@pytest.mark.long
async def test_the_journal_keeps_the_newest_entries(make: Make) -> None:
    site = make()
    journal = await Journal.read(site.aws, site.ec2_id)
    for number in range(KEPT + 2):
        await journal.write(
            JournalEntry(Way.REBOOT, f"r{number}", float(number), "b", JournalPhase.DONE)
        )
        await journal.write(JournalEntry(Way.REBOOT, f"r{number}", float(number), "b"))
        await journal.write(
            JournalEntry(Way.REBOOT, f"r{number}", float(number), "b", JournalPhase.DONE, sent=True)
        )
    kept = await Journal.read(site.aws, site.ec2_id)
    assert [one.id for one in kept.entries] == [f"r{number}" for number in range(2, KEPT + 2)]
    assert kept.entries == journal.entries


async def test_an_aws_that_fails_is_no_news_about_a_node(make: Make) -> None:
    class Failing(Calls):
        async def call(self, service: str, operation: str, **request: Any) -> dict[str, Any]:
            raise AwsError(
                f"{service} {operation}: Rate exceeded", "ThrottlingException", Kind.THROTTLED
            )

    site = make(aws_=Failing(Aws("us-east-1")))
    asked = (
        site.probe,
        site.diagnose,
        site.reboot,
        site.settled,
        lambda: site.repairs.cycle_power("n1", site.ec2_id, "r", 1.0),
    )
    for ask in asked:
        with pytest.raises(Unreachable, match="Rate exceeded"):
            await ask()
