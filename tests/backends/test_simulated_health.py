"""How simulated nodes fall ill, are examined and are mended, and what the record says of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from relaunch.backends.base import Preparation, Refusal, StopOrder, Unreachable
from relaunch.evidence.dcgm import read_diag
from relaunch.evidence.findings import Verdict
from relaunch.spec.fleet import FleetSpec
from tests.backends.test_simulated import launch, prepare_order, start_order, token
from tests.backends.upkeep_invariants import assert_upkeep, upkeep_violations
from tests.fakes.nodes import (
    Chaos,
    DiagHangs,
    Exit,
    Fault,
    Life,
    Lingers,
    ManualClock,
    Reboot,
    RebootFails,
    RebootHangs,
    Refuse,
    ResetFails,
    Script,
    ShimDies,
    Sick,
    SimulatedBackend,
    Takes,
    Upkeep,
)
from tests.fakes.nodes.health import bus_id
from tests.fakes.nodes.script import Happening

pytestmark = pytest.mark.asyncio

WITHIN = 600.0


def fleet(nodes: int = 1, gpus: int = 8) -> FleetSpec:
    named = [
        {"name": f"n{one}", "address": f"10.0.0.{one}", "gpus": gpus} for one in range(1, nodes + 1)
    ]
    return FleetSpec.model_validate({"name": "test", "backend": "simulated", "nodes": named})


def simulated(
    *happenings: Happening,
    clock: ManualClock | None = None,
    faults: tuple[Fault, ...] = (),
    nodes: int = 1,
) -> SimulatedBackend:
    return SimulatedBackend(fleet(nodes), Script(happenings, faults), clock)


async def probe(
    backend: SimulatedBackend, node: str = "n1", kernel_since: float | None = None
) -> Mapping[str, Any]:
    return await backend.probe(node, 20.0, kernel_since)


async def gpu(backend: SimulatedBackend, index: int) -> Mapping[str, Any]:
    found: Mapping[str, Any] = (await probe(backend))["gpus"]["gpus"][index]
    return found


async def diagnosed(backend: SimulatedBackend, level: int = 2) -> Verdict:
    answer = await backend.diagnose("n1", "r1", level, WITHIN)
    assert not isinstance(answer, Refusal), answer
    return read_diag(answer["stdout"], answer["exit_code"], level=level).verdict


def why(answer: object) -> str:
    assert isinstance(answer, Refusal), answer
    return answer.why


def moments(backend: SimulatedBackend) -> list[tuple[str, str, str, str]]:
    return [(one.kind, one.command, one.id, one.reason) for one in backend.upkeep]


# --- how they are ---------------------------------------------------------------------------------


async def test_a_node_of_which_the_script_says_nothing_is_healthy() -> None:
    backend = simulated()
    facts = await probe(backend)
    assert [one["index"] for one in facts["gpus"]["gpus"]] == list(range(8))
    assert len({one["bus_id"] for one in facts["gpus"]["gpus"]}) == 8
    for one in facts["gpus"]["gpus"]:
        assert one["remapped"] == {
            "correctable": 0,
            "uncorrectable": 0,
            "pending": False,
            "failed": False,
        }
        assert (one["recovery_action"], one["processes"], one["nvlink_inactive"]) == (0, [], [])
    assert json.loads(json.dumps(facts)) == facts
    assert facts["kernel"] == {"lines": []} and all(disk["writable"] for disk in facts["disks"])


@pytest.mark.parametrize("level", [1, 2, 3])
async def test_dcgm_finds_a_healthy_node_healthy_at_every_level(level: int) -> None:
    assert await diagnosed(simulated(), level) is Verdict.HEALTHY


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize(
    "sick",
    [Sick(gpu_lost=3), Sick(remap_pending=3), Sick(remap_failed=3), Sick(dcgm_error=(3, 52))],
    ids=["lost", "pending", "failed", "error"],
)
async def test_dcgm_finds_a_sick_gpu_at_every_level(sick: Sick, level: int) -> None:
    assert await diagnosed(simulated(sick), level) is Verdict.UNHEALTHY


async def test_nvml_tells_of_each_sickness_in_its_own_way() -> None:
    pending = Sick(remap_pending=1)
    backend = simulated(
        Sick(gpu_lost=0), pending, Sick(remap_failed=2), Sick(recovery_action=(3, 2))
    )
    assert await gpu(backend, 0) == {"index": 0, "lost": "GPU_IS_LOST", "bus_id": bus_id(0)}
    assert (await gpu(backend, 1))["remapped"]["pending"] is True and (await gpu(backend, 1))[
        "ecc"
    ]["volatile_uncorrected"] == 1
    assert (await gpu(backend, 2))["remapped"]["failed"] is True
    assert (await gpu(backend, 3))["recovery_action"] == 2
    assert (await gpu(backend, 4))["recovery_action"] == 0
    hangs = simulated(Sick(nvml_unreadable="NVML did not answer within 10 s"))
    assert (await probe(hangs))["gpus"] == {"unreadable": "NVML did not answer within 10 s"}
    disk = (await probe(simulated(Sick(disk_read_only=True))))["disks"][0]
    assert (disk["writable"], disk["reason"]) == (False, "it is mounted read-only")


async def test_a_node_falls_ill_at_the_moment_that_the_script_names() -> None:
    clock = ManualClock()
    backend = simulated(
        Sick(gpu_lost=0, when="running", after=5.0, kernel=("NVRM: Xid 79",)), clock=clock
    )
    assert "lost" not in await gpu(backend, 0)
    await launch(backend, 1, ("n1",))
    await clock.advance(4.0)
    assert "lost" not in await gpu(backend, 0)
    await clock.advance(1.0)
    assert "lost" in await gpu(backend, 0)
    await clock.advance(30.0)
    said = ["[    5.000000] NVRM: Xid 79"]
    assert (await probe(backend, kernel_since=60.0))["kernel"]["lines"] == said
    assert (await probe(backend, kernel_since=10.0))["kernel"]["lines"] == []


async def test_kernel_lines_of_a_rank_are_logged_once_until_a_reboot() -> None:
    backend = simulated(
        Exit(generation=1, kernel=("NVRM: Xid 79",)),
        ShimDies(generation=2, kernel=("oom-kill:",)),
    )
    await launch(backend, 1, ("n1",))
    await launch(backend, 2, ("n1",))
    lines = (await probe(backend))["kernel"]["lines"]
    assert [line.partition("] ")[2] for line in lines] == ["NVRM: Xid 79", "oom-kill:"]
    backend.lose_power("n1")
    assert (await probe(backend))["kernel"]["lines"] == []


async def test_ranks_use_the_gpus_of_their_node() -> None:
    backend = simulated()
    await launch(backend, 1, ("n1",))
    used = [len(one["processes"]) for one in (await probe(backend))["gpus"]["gpus"]]
    assert used == [1, 1, 0, 0, 0, 0, 0, 0]


# --- mending --------------------------------------------------------------------------------------


async def reset(backend: SimulatedBackend, *gpus: int, id: str = "r1") -> Mapping[str, Any]:
    boot = (await probe(backend))["boot_id"]
    answer = await backend.reset_gpus(
        "n1", id, boot, tuple(bus_id(index) for index in gpus), WITHIN
    )
    assert not isinstance(answer, Refusal), answer
    return answer


async def test_a_reset_cures_the_named_gpus_of_what_a_reset_cures() -> None:
    backend = simulated(Sick(remap_pending=1, until="reset"), Sick(remap_pending=2, until="reset"))
    assert (await reset(backend, 1))["exit_code"] == 0
    assert [(await gpu(backend, index))["remapped"]["pending"] for index in (1, 2)] == [False, True]
    assert await diagnosed(backend) is Verdict.UNHEALTHY
    assert "successfully reset" in (await reset(backend))["output"]
    assert await diagnosed(backend) is Verdict.HEALTHY
    assert_upkeep(backend)


async def test_a_reset_misses_a_lost_gpu_and_a_reboot_restores_it() -> None:
    backend = simulated(Sick(gpu_lost=5, until="reboot"), Sick(remap_failed=6))
    answer = await reset(backend, 5)
    assert answer["exit_code"] == 15 and "GPU is lost" in answer["output"]
    assert not isinstance(await backend.reboot("n1", "r1", "n1-boot-1", "GPU 5 is lost"), Refusal)
    assert "lost" not in await gpu(backend, 5)
    assert (await gpu(backend, 6))["remapped"]["failed"] is True
    assert await diagnosed(backend) is Verdict.UNHEALTHY


async def test_a_gpu_that_is_not_there_cannot_be_reset() -> None:
    backend = simulated()
    answer = await backend.reset_gpus("n1", "r1", "n1-boot-1", ("00000000:00:00.0",), WITHIN)
    assert not isinstance(answer, Refusal) and answer["exit_code"] == 6


async def test_resets_and_reboots_fail_as_often_as_scripted() -> None:
    backend = simulated(
        ResetFails(exit_code=255, times=1),
        RebootFails(reason="sudo: a password is required", times=1),
    )
    assert [(await reset(backend))["exit_code"] for _ in range(2)] == [255, 0]
    refused = await backend.reboot("n1", "r1", "n1-boot-1", "Xid 79")
    assert why(refused) == "cannot_reboot"
    assert (await probe(backend))["reboots"] == []
    await launch(backend, 1, ("n1",))
    await backend.stop("n1", StopOrder(token(1), 15.0))
    assert not isinstance(await backend.reboot("n1", "r1", "n1-boot-1", "Xid 79"), Refusal)
    assert [one["id"] for one in (await probe(backend))["reboots"]] == ["r1"]
    assert_upkeep(backend)


async def test_a_reboot_takes_its_time_after_the_answer_has_left() -> None:
    clock = ManualClock()
    backend = simulated(Takes(command="reboot", seconds=300.0), clock=clock)
    assert await backend.reboot("n1", "r1", "n1-boot-1", "Xid 79") == {
        "outcome": "done",
        "boot_id": "n1-boot-1",
    }
    assert why(await backend.prepare("n1", prepare_order(1, 0))) == "rebooting"
    await clock.advance(1.0)
    with pytest.raises(Unreachable):
        await probe(backend)
    await clock.advance(300.0)
    facts = await probe(backend)
    assert (facts["boot_id"], facts["stamp"] < 10.0) == ("n1-boot-2", True)
    await launch(backend, 1, ("n1",))
    assert_upkeep(backend)


async def test_a_reboot_that_hangs_never_comes_back_by_itself() -> None:
    clock = ManualClock()
    backend = simulated(RebootHangs(times=1), clock=clock)
    await backend.reboot("n1", "r1", "n1-boot-1", "Xid 79")
    await clock.advance(36_000.0)
    with pytest.raises(Unreachable):
        await probe(backend)
    backend.lose_power("n1")
    assert (await probe(backend))["boot_id"] == "n1-boot-2"
    assert not isinstance(await backend.reboot("n1", "r2", "n1-boot-2", "once more"), Refusal)
    assert (await probe(backend))["boot_id"] == "n1-boot-3"


async def test_a_reboot_that_hangs_keeps_its_boot_and_takes_no_launch() -> None:
    clock = ManualClock()
    backend = simulated(RebootHangs(answers=True, times=1), clock=clock)
    await backend.reboot("n1", "r1", "n1-boot-1", "Xid 79")
    await clock.advance(30.0)
    assert (await backend.reboot("n1", "r1", "n1-boot-1", "Xid 79")) == {
        "outcome": "done",
        "boot_id": "n1-boot-1",
        "already": True,
    }
    assert why(await backend.reboot("n1", "r2", "n1-boot-1", "another wants it too")) == "held"
    assert why(await backend.prepare("n1", prepare_order(1, 0))) == "rebooting"
    facts = await probe(backend)
    assert facts["boot_id"] == "n1-boot-1" and [one["id"] for one in facts["reboots"]] == ["r1"]
    await clock.advance(60.0)
    await backend.reboot("n1", "r1", "n1-boot-1", "Xid 79")
    facts = await probe(backend)
    assert facts["boot_id"] == "n1-boot-2" and [one["id"] for one in facts["reboots"]] == ["r1"]
    assert_upkeep(backend)


# --- the hold -------------------------------------------------------------------------------------


async def test_a_launch_waits_two_seconds_for_a_diagnosis_then_refuses() -> None:
    clock = ManualClock()
    backend = simulated(Takes(command="diagnose", seconds=10.0), clock=clock)
    diagnosing = asyncio.create_task(backend.diagnose("n1", "r1", 2, WITHIN))
    await clock.advance(5.0)
    early = asyncio.create_task(backend.prepare("n1", prepare_order(1, 0)))
    await clock.advance(1.9)
    assert not early.done()
    await clock.advance(0.1)
    answer = await early
    assert isinstance(answer, Refusal) and answer.why == "held"
    assert "(diagnose, r1)" in answer.reason
    await clock.advance(2.0)
    late = asyncio.create_task(backend.prepare("n1", prepare_order(1, 0)))
    await clock.advance(1.0)
    assert isinstance(await late, Preparation)
    assert isinstance(await diagnosing, dict)
    assert_upkeep(backend)


async def test_a_diagnosis_waits_for_a_prepare_and_is_then_refused() -> None:
    clock = ManualClock()
    backend = simulated(Lingers(generation=1, rank=0, seconds=7.0), clock=clock)
    await launch(backend, 1, ("n1",))
    preparing = asyncio.create_task(backend.prepare("n1", prepare_order(2, 0, 1)))
    await clock.advance(1.0)
    diagnosing = asyncio.create_task(backend.diagnose("n1", "r1", 1, WITHIN))
    await clock.advance(2.0)
    answer = await diagnosing
    assert isinstance(answer, Refusal) and answer.why == "held"
    assert "launch" in answer.reason
    await clock.advance(5.0)
    assert isinstance(await preparing, Preparation)


async def test_a_generation_that_has_ended_does_not_keep_its_node() -> None:
    backend = simulated(Exit(exit_code=1))
    await launch(backend, 1, ("n1",))
    assert (await probe(backend))["jobs"] == []
    assert await diagnosed(backend) is Verdict.HEALTHY
    assert not isinstance(await backend.reboot("n1", "r1", "n1-boot-1", "Xid 79"), Refusal)
    assert_upkeep(backend)


async def test_a_diagnosis_that_hangs_is_killed_when_its_time_is_over() -> None:
    clock = ManualClock()
    backend = simulated(DiagHangs(times=1), clock=clock)
    diagnosing = asyncio.create_task(backend.diagnose("n1", "r1", 3, 900.0))
    await clock.advance(899.0)
    assert not diagnosing.done() and (await probe(backend))["held"]["by"] == "diagnose"
    await clock.advance(1.0)
    answer = await diagnosing
    assert not isinstance(answer, Refusal) and (
        answer["exit_code"],
        answer["stdout"],
        answer["took"],
    ) == (None, "", 900.0)
    assert await diagnosed(backend) is Verdict.HEALTHY


async def test_a_node_down_during_a_diagnosis_is_silent_then_free() -> None:
    clock = ManualClock()
    backend = simulated(
        Takes(command="diagnose", seconds=60.0),
        Reboot(when="first_call", after=10.0, down_for=30.0),
        clock=clock,
    )
    diagnosing = asyncio.create_task(backend.diagnose("n1", "r1", 2, WITHIN))
    await clock.advance(10.0)
    with pytest.raises(Unreachable):
        await diagnosing
    await clock.advance(30.0)
    facts = await probe(backend)
    assert (facts["boot_id"], facts["held"], facts["reboots"]) == ("n1-boot-2", None, [])
    assert moments(backend) == [
        ("began", "diagnose", "r1", ""),
        ("ended", "diagnose", "r1", "lost"),
        ("rebooted", "reboot", "", ""),
    ]


async def test_an_order_of_a_repair_is_refused_as_scripted() -> None:
    backend = simulated(
        Refuse(
            command="reset-gpus", why="busy", reason="pid 4242 uses GPU 00000000:1B:00.0", times=1
        )
    )
    answer = await backend.reset_gpus("n1", "r1", "n1-boot-1", (), WITHIN)
    assert isinstance(answer, Refusal) and (answer.why, "4242" in answer.reason) == ("busy", True)
    assert (await reset(backend))["exit_code"] == 0
    assert moments(backend)[0] == ("refused", "reset-gpus", "r1", "busy")


# --- the network ----------------------------------------------------------------------------------


async def test_boot_id_and_journal_prove_a_reboot_with_a_lost_answer() -> None:
    backend = simulated(faults=(Fault(kind="lose_answer", command="reboot"),))
    with pytest.raises(Unreachable):
        await backend.reboot("n1", "r1", "n1-boot-1", "Xid 79")
    facts = await probe(backend)
    assert (facts["boot_id"], [one["id"] for one in facts["reboots"]]) == ("n1-boot-2", ["r1"])
    refused = await backend.reboot("n1", "r1", "n1-boot-1", "Xid 79")
    assert isinstance(refused, Refusal) and (refused.why, refused.boot_id) == (
        "boot_changed",
        "n1-boot-2",
    )
    assert [call.outcome for call in backend.calls if call.command == "reboot"] == [
        "unreachable",
        "refused:boot_changed",
    ]


async def test_a_reboot_that_was_lost_on_its_way_has_left_no_trace() -> None:
    backend = simulated(faults=(Fault(kind="lose_order", command="reboot"),))
    with pytest.raises(Unreachable):
        await backend.reboot("n1", "r1", "n1-boot-1", "Xid 79")
    facts = await probe(backend)
    assert (facts["boot_id"], facts["reboots"], backend.upkeep) == ("n1-boot-1", [], [])


async def test_a_late_copy_of_a_reboot_does_not_end_the_next_boot() -> None:
    backend = simulated(faults=(Fault(kind="double", command="reboot", after_orders=1),))
    await backend.reboot("n1", "r1", "n1-boot-1", "Xid 79")
    await launch(backend, 1, ("n1",))
    assert why(await backend.diagnose("n1", "r1", 1, WITHIN)) == "busy"
    await backend.settled()
    assert moments(backend)[-1] == ("refused", "reboot", "r1", "boot_changed")
    assert (await probe(backend))["boot_id"] == "n1-boot-2"
    assert_upkeep(backend)


async def answered(call: Callable[..., Awaitable[Any]], *given: Any) -> Any:
    while True:
        try:
            return await call(*given)
        except Unreachable:
            continue


@pytest.mark.parametrize("seed", range(12))
async def test_under_chaos_no_order_touches_a_node_on_which_ranks_live(seed: int) -> None:
    chaos = Chaos(
        seed=seed,
        lose_order=0.2,
        lose_answer=0.2,
        double=0.4,
        delay=0.3,
        seconds=0.004,
        after_orders=4,
    )
    takes = (Takes(command="diagnose", seconds=0.002), Takes(command="reset-gpus", seconds=0.002))
    backend = SimulatedBackend(fleet(), Script(takes, chaos=chaos, timeout=0.002))

    async def train() -> None:
        for generation in range(1, 9):
            prepared: object = None
            while not isinstance(prepared, Preparation):
                prepared = await answered(backend.prepare, "n1", prepare_order(generation, 0))
            started = await answered(
                backend.start, "n1", start_order(generation, "n1", ("n1",), 1, prepared)
            )
            assert not isinstance(started, Refusal), started
            await answered(backend.stop, "n1", StopOrder(token(generation), 15.0))

    async def repair(name: str) -> None:
        for number in range(8):
            id = f"{name}-{number}"
            boot = (await answered(backend.probe, "n1", 20.0, None))["boot_id"]
            await answered(backend.diagnose, "n1", id, 1, WITHIN)
            await answered(backend.reset_gpus, "n1", id, boot, (), WITHIN)
            await answered(backend.reboot, "n1", id, boot, "Xid 79")

    await asyncio.gather(train(), repair("a"), repair("b"))
    await backend.settled()
    assert sum(life.kind == "started" for life in backend.lives) == 8
    kinds = {(one.kind, one.reason) for one in backend.upkeep}
    assert ("ended", "done") in kinds and any(kind == "refused" for kind, _ in kinds)
    assert_upkeep(backend)


# --- the judge ------------------------------------------------------------------------------------


def moment(
    number: int, kind: Any, command: Any, id: str, reason: str = "", boot: int = 1
) -> Upkeep:
    return Upkeep(number, float(number), kind, "n1", command, id, f"n1-boot-{boot}", reason)


async def test_the_invariants_see_a_repair_that_touches_a_living_rank() -> None:
    started = Life(2, 0.0, "started", token(1), "n1", 0)
    ended = Life(5, 0.0, "ended", token(1), "n1", 0)
    began, over = moment(1, "began", "diagnose", "r1"), moment(3, "ended", "diagnose", "r1", "done")
    assert upkeep_violations((began, over), (started, ended)) == (
        "rank 0 of default/job/100/1 started on n1 during diagnose r1",
    )
    after = moment(4, "began", "reset-gpus", "r2")
    assert upkeep_violations((after,), (started, ended)) == (
        "reset-gpus r2 began on n1 while rank 0 of default/job/100/1 lived there",
    )
    assert upkeep_violations((replace(after, number=6),), (started, ended)) == ()


async def test_the_invariants_see_two_holders_and_reboots_of_one_boot() -> None:
    two = (moment(1, "began", "diagnose", "r1"), moment(2, "began", "reboot", "r2"))
    assert upkeep_violations(two, ()) == ("reboot r2 began on n1 during diagnose r1",)
    told = (moment(1, "ended", "reboot", "r1", "done"), moment(9, "ended", "reboot", "r2", "done"))
    assert upkeep_violations(told, ()) == (
        "n1-boot-1 was ordered to end for r1, and 8 s later for r2",
    )
    again = moment(100, "ended", "reboot", "r1", "done")
    assert upkeep_violations((told[0], again), ()) == ()
    rebooted = (
        told[0],
        *(moment(number, "rebooted", "reboot", "r1", boot=number) for number in (2, 3)),
    )
    assert upkeep_violations(rebooted, ()) == (
        "n1 rebooted into n1-boot-3 for r1, which had not ordered it",
    )
