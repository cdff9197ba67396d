"""What every backend promises about examining and repairing a node, held against each of them."""

from __future__ import annotations

import asyncio
import getpass
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from relaunch.backends.base import Backend, Refusal, StopProof, Unreachable
from relaunch.evidence.dcgm import read_diag
from relaunch.evidence.findings import Verdict
from tests.backends.fleets import (
    RUNS,
    SSH_FLEETS,
    Does,
    Fleet,
    LocalFleet,
    SimulatedFleet,
    Tools,
)
from tests.backends.test_contract import (
    alive,
    done,
    launch,
    prepare,
    prepare_order,
    reached,
    refusal,
    start_order,
    stop_order,
    token,
)

pytestmark = pytest.mark.asyncio

Make = Callable[..., Fleet]
PATIENCE = 60.0
"""Seconds after which a test has failed; a new boot of a local node takes one of them."""


@pytest_asyncio.fixture(
    params=[
        "simulated",
        "local",
        *(pytest.param(name, marks=pytest.mark.long) for name in SSH_FLEETS),
    ]
)
async def make(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Make]:
    fleets: list[Fleet] = []

    def made(tools: Tools | None = None, does: Mapping[int, Does] | None = None) -> Fleet:
        fleet: Fleet
        given = does or {1: RUNS, 2: RUNS}
        if request.param == "simulated":
            fleet = SimulatedFleet(given, 1, tools)
        else:
            real = LocalFleet if request.param == "local" else SSH_FLEETS[request.param]
            fleet = real(given, 1, tmp_path, request.getfixturevalue("agent"), tools)
        fleets.append(fleet)
        return fleet

    yield made
    for fleet in fleets:
        await fleet.close()


async def probe(backend: Backend) -> Mapping[str, Any]:
    return await backend.probe("n1", 10.0, None)


async def boot_id(backend: Backend) -> str:
    return str((await probe(backend))["boot_id"])


async def eventually(look: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await look():  # noqa: ASYNC110  (a node sends no event)
            await asyncio.sleep(0.02)


async def read_holder(backend: Backend) -> Any:
    return (await backend.list("n1"))["held"]


# --- asking ---------------------------------------------------------------------------------------


async def test_a_probe_tells_of_a_node_on_which_nothing_ever_ran(make: Make) -> None:
    facts = await probe(make().backend)
    assert facts["outcome"] == "done" and facts["boot_id"]
    assert facts["stamp"] > 0 and facts["wall"] > 1_700_000_000 and facts["load"] >= 0
    assert 0 < facts["memory"]["available"] <= facts["memory"]["total"]
    assert facts["disks"]
    for disk in facts["disks"]:
        assert 0 <= disk["free"] <= disk["total"] and disk["path"].startswith("/")
        assert disk["inodes_free"] is None or disk["inodes_free"] > 0
    assert facts["disks"][0]["writable"] is True
    assert isinstance(facts["kernel"]["lines"], list)
    assert (facts["jobs"], facts["held"], facts["reboots"]) == ([], None, [])


async def test_a_node_without_nvml_says_so(make: Make) -> None:
    gpus = (await probe(make().backend))["gpus"]
    assert gpus.keys() == {"unreadable"} and "libnvidia-ml.so.1" in gpus["unreadable"]


async def test_s2_10_a_look_has_gpus_and_strangers_where_asked_to(
    make: Make,
) -> None:
    fleet = make(Tools())
    pid = fleet.visit("n1")
    read = (await fleet.backend.list("n1", gpus=True))["gpus"]
    (gpu,) = read["gpus"]
    assert (
        read["driver"]
        and gpu["name"].startswith("NVIDIA ")
        and gpu["memory"]["total"] > gpu["memory"]["used"] > 0
    )
    (process,) = gpu["processes"]
    assert (
        process.items()
        >= {"pid": pid, "ours": False, "user": getpass.getuser(), "program": "sleep"}.items()
    )
    assert "gpus" not in await fleet.backend.list("n1")
    refused = refusal(await fleet.backend.diagnose("n1", "r1", 1, 30.0))
    assert (refused.why, str(pid) in refused.reason) == ("busy", True)
    fleet.leave("n1")
    assert (await fleet.backend.list("n1", gpus=True))["gpus"]["gpus"][0]["processes"] == []


async def test_a_look_at_gpus_of_a_node_without_nvml_says_so(make: Make) -> None:
    listed = await make().backend.list("n1", gpus=True)
    assert listed["gpus"].keys() == {"unreadable"}
    assert "libnvidia-ml.so.1" in listed["gpus"]["unreadable"]


async def test_a_look_reads_no_gpus_of_a_node_that_is_examined(make: Make) -> None:
    fleet = make(Tools(diag="hangs"))
    examining = asyncio.create_task(fleet.backend.diagnose("n1", "r1", 1, 600.0))
    await eventually(lambda: is_held(fleet.backend))
    assert "gpus" not in await fleet.backend.list("n1", gpus=True)
    examining.cancel()
    await asyncio.gather(examining, return_exceptions=True)


async def is_held(backend: Backend) -> bool:
    return await read_holder(backend) is not None


async def test_a_probe_names_the_generations_that_live_on_the_node(make: Make) -> None:
    fleet = make()
    await launch(fleet)
    named = {"namespace": "default", "job": "contract", "submission": 100, "generation": 1}
    assert (await probe(fleet.backend))["jobs"] == [named]
    await fleet.backend.stop("n1", stop_order(token(1)))
    assert (await probe(fleet.backend))["jobs"] == []


async def test_a_node_that_is_cut_off_answers_no_order_of_a_repair(make: Make) -> None:
    fleet = make(Tools())
    boot = await boot_id(fleet.backend)
    fleet.cut("n1")
    orders: list[Awaitable[object]] = [
        fleet.backend.probe("n1", 0.1, None),
        fleet.backend.diagnose("n1", "r1", 1, 0.1),
        fleet.backend.reset_gpus("n1", "r1", boot, (), 0.1),
        fleet.backend.reboot("n1", "r1", boot, "a test wants it"),
    ]
    answers = await asyncio.gather(*orders, return_exceptions=True)
    assert [type(answer) for answer in answers] == [Unreachable] * 4


# --- examining ------------------------------------------------------------------------------------


async def test_a_diagnosis_brings_what_dcgm_printed_and_how_it_ended(make: Make) -> None:
    fleet = make(Tools())
    answer = done(await fleet.backend.diagnose("n1", "r1", 1, 30.0))
    assert answer["boot_id"] == await boot_id(fleet.backend)
    assert (answer["exit_code"], answer["stderr"]) == (0, "") and answer["took"] >= 0
    assert read_diag(answer["stdout"], answer["exit_code"], level=1).verdict is Verdict.HEALTHY
    assert await read_holder(fleet.backend) is None


async def test_a_node_without_dcgm_or_nvidia_smi_says_so(make: Make) -> None:
    backend = make().backend
    boot = await boot_id(backend)
    diagnosed = done(await backend.diagnose("n1", "r1", 1, 30.0))
    assert diagnosed["missing"].startswith("dcgmi ")
    reset = done(await backend.reset_gpus("n1", "r1", boot, (), 30.0))
    assert reset["missing"].startswith("nvidia-smi ")


async def test_a_diagnosis_that_hangs_blocks_launches(make: Make) -> None:
    fleet = make(Tools(diag="hangs"))
    assert (await probe(fleet.backend))["held"] is None
    diagnosing = asyncio.create_task(fleet.backend.diagnose("n1", "r1", 2, 600.0))

    async def is_named() -> bool:
        """Who holds it is written a moment after it is held."""
        holder = await read_holder(fleet.backend)
        return holder is not None and (holder["by"], holder["id"]) == ("diagnose", "r1")

    await eventually(is_named)
    assert (await probe(fleet.backend))["held"]["id"] == "r1"
    refused = refusal(await prepare(fleet, "n1", prepare_order(token(1))))
    assert refused.why == "held" and "r1" in refused.reason
    assert not diagnosing.done()
    diagnosing.cancel()


async def test_a_diagnosis_that_hangs_is_killed_and_frees_the_node(make: Make) -> None:
    fleet = make(Tools(diag="hangs"))
    answer = done(await fleet.backend.diagnose("n1", "r1", 2, 0.5))
    assert (
        answer["exit_code"] is None
        and read_diag(answer["stdout"], None, level=2).verdict is Verdict.UNKNOWN
    )
    await launch(fleet)


async def test_a_diagnosis_without_a_caller_ends_and_frees_the_node(
    make: Make,
) -> None:
    fleet = make(Tools(diag="hangs"))
    diagnosing = asyncio.create_task(fleet.backend.diagnose("n1", "r1", 2, 600.0))

    async def is_held() -> bool:
        return await read_holder(fleet.backend) is not None

    async def is_free() -> bool:
        return not await is_held()

    await eventually(is_held)
    diagnosing.cancel()
    await eventually(is_free)
    await launch(fleet)


async def test_of_two_orders_for_one_node_the_second_waits_a_little(make: Make) -> None:
    fleet = make(Tools(diag_takes=0.5))
    answers = await asyncio.gather(
        *(fleet.backend.diagnose("n1", f"r{number}", 1, 30.0) for number in range(2))
    )
    assert [done(answer)["exit_code"] for answer in answers] == [0, 0]


async def test_of_two_orders_for_one_node_the_second_waits_briefly(make: Make) -> None:
    fleet = make(Tools(diag="hangs"))
    first, second = await asyncio.gather(
        *(fleet.backend.diagnose("n1", f"r{number}", 1, 3.5) for number in range(2))
    )
    refused, answered = (first, second) if isinstance(first, Refusal) else (second, first)
    assert refusal(refused).why == "held" and done(answered)["exit_code"] is None


async def test_nothing_is_examined_reset_or_rebooted_while_ranks_live(make: Make) -> None:
    fleet = make(Tools())
    await launch(fleet)
    boot = await boot_id(fleet.backend)
    for answer in (
        await fleet.backend.diagnose("n1", "r1", 1, 30.0),
        await fleet.backend.reset_gpus("n1", "r1", boot, (), 30.0),
        await fleet.backend.reboot("n1", "r1", boot, "a test wants it"),
    ):
        refused = refusal(answer)
        assert refused.why == "busy" and "contract generation 1" in refused.reason
    assert await alive(fleet.backend, 1) == [0, 1]
    assert (await probe(fleet.backend))["reboots"] == []
    assert await fleet.backend.stop("n1", stop_order(token(1))) == StopProof("n1")
    assert done(await fleet.backend.diagnose("n1", "r1", 1, 30.0))["exit_code"] == 0


async def test_a_generation_that_may_yet_start_holds_the_node(
    make: Make,
) -> None:
    fleet = make(Tools())
    done(await prepare(fleet, "n1", prepare_order(token(1))))
    assert refusal(await fleet.backend.diagnose("n1", "r1", 1, 30.0)).why == "busy"
    done(await fleet.backend.start("n1", start_order(fleet, token(1))))
    assert await alive(fleet.backend, 1) == [0, 1]


# --- repairing ------------------------------------------------------------------------------------


async def test_gpus_are_reset_only_on_the_boot_that_was_read(make: Make) -> None:
    fleet = make(Tools())
    boot = await boot_id(fleet.backend)
    answer = done(await fleet.backend.reset_gpus("n1", "r1", boot, ("00000000:1B:00.0",), 30.0))
    assert (answer["exit_code"], answer["boot_id"]) == (0, boot) and "All done." in answer["output"]
    refused = refusal(await fleet.backend.reset_gpus("n1", "r1", "another", (), 30.0))
    assert (refused.why, refused.boot_id) == ("boot_changed", boot)


async def test_a_reset_that_fails_is_done_with_its_exit_code(make: Make) -> None:
    fleet = make(Tools(reset=255))
    answer = done(
        await fleet.backend.reset_gpus("n1", "r1", await boot_id(fleet.backend), (), 30.0)
    )
    assert answer["exit_code"] == 255 and "GPU is in use" in answer["output"]


async def test_a_reboot_gives_another_boot_id_and_is_in_the_journal(make: Make) -> None:
    fleet = make()
    before = await boot_id(fleet.backend)
    assert done(await fleet.backend.reboot("n1", "r1", before, "Xid 79"))["boot_id"] == before

    async def is_another() -> bool:
        return await reached(lambda: boot_id(fleet.backend)) != before

    await eventually(is_another)
    facts = await probe(fleet.backend)
    assert [(one["id"], one["reason"], one["boot_id"]) for one in facts["reboots"]] == [
        ("r1", "Xid 79", before)
    ]
    assert abs(facts["reboots"][0]["at"] - facts["wall"]) < 60
    refused = refusal(await fleet.backend.reboot("n1", "r1", before, "Xid 79"))
    assert (refused.why, refused.boot_id) == ("boot_changed", facts["boot_id"])
    assert len((await probe(fleet.backend))["reboots"]) == 1
    await launch(fleet)


async def test_the_same_reboot_ordered_twice_at_once_is_one(make: Make) -> None:
    fleet = make()
    before = await boot_id(fleet.backend)
    orders = (fleet.backend.reboot("n1", "r1", before, "Xid 79") for _ in range(3))
    await asyncio.gather(*orders, return_exceptions=True)

    async def is_another() -> bool:
        return await reached(lambda: boot_id(fleet.backend)) != before

    await eventually(is_another)
    facts = await probe(fleet.backend)
    assert [one["boot_id"] for one in facts["reboots"]] == [before]
    for _ in range(5):
        assert await boot_id(fleet.backend) == facts["boot_id"]
