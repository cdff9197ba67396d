"""Each preset on real ranks: what the tables of `tests/recovery` say is what the workflow does."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from relaunch.backends.local import KERNEL_LOG, cut, heal
from relaunch.job.state import Incident
from tests.chaos.world import HANG_AFTER, Job, World, chaos_policy

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


def preset(name: str, **changes: Any) -> Any:
    """The preset with seconds instead of minutes."""
    return chaos_policy(extends=name, hang=changes.pop("hang", {}), **changes)


async def trained(job: Job, generation: int) -> None:
    await job.until_phase("RUNNING", generation=generation)
    await job.until_steps()


async def ended(job: Job, phase: str) -> list[tuple[str, str | None, bool]]:
    """Wait for the end; return (decision, strategy, spent) of all incidents."""
    await job.until_phase(phase)
    incidents: list[Incident] = await job.incidents()
    decisions = [
        (d.decision, d.strategy, d.spent) for incident in incidents for d in incident.decisions
    ]
    await job.world.tidy(job)
    return decisions


def fail(job: Job, rank: int, words: str = "ValueError: bad batch") -> None:
    (job.folder / f"fail.{rank}").write_text(words)


@pytest.mark.long
async def test_s1_5_ecs_reboot_once_examines_after_exit_1_then_fails(
    world: World,
) -> None:
    job = await world.submit(policy=preset("ecs-reboot-once"))
    await trained(job, 1)
    fail(job, 1)
    assert await ended(job, "FAILED") == [("Examine", None, False), ("Stop", None, False)]
    assert (await job.state()).generation == 1
    assert job.rank_pids() == []


@pytest.mark.long  # tests/recovery/test_s1_ecs.py has all
async def test_s1_1_ecs_reboot_once_fails_at_once_for_any_other_exit(world: World) -> None:
    job = await world.submit(policy=preset("ecs-reboot-once"))
    await trained(job, 1)
    os.kill(job.rank_pids()[0], signal.SIGSEGV)
    assert await ended(job, "FAILED") == [("Stop", None, False)]


async def test_s2_3_gputasker_starts_nothing_twice(world: World) -> None:
    job = await world.submit(policy=preset("gputasker"))
    await trained(job, 1)
    os.kill(job.rank_pids()[0], signal.SIGKILL)
    assert await ended(job, "FAILED") == [("Stop", None, False)]
    assert {line["token"].rpartition("/")[2] for line in job.starts()} == {"1"}


@pytest.mark.long
async def test_s2_8_gputasker_keeps_the_ranks_of_a_lost_node(
    world: World,
) -> None:
    job = await world.submit(policy=preset("gputasker"))
    await trained(job, 1)
    await job.until_watched()
    pids = job.rank_pids()
    cut(world.node("n2"), ("controller-in", "controller-out"))
    await job.until_phase("NODE_LOST")
    heal(world.node("n2"))
    await trained(job, 1)
    assert pids == job.rank_pids()
    job.let_end()
    assert {("Wait", None, False)} == set(await ended(job, "SUCCEEDED"))


@pytest.mark.long
async def test_s3_2_torchelastic_restarts_all_ranks_up_to_max_restarts(
    world: World,
) -> None:
    job = await world.submit(policy=preset("torchelastic", max_restarts=2))
    for generation in (1, 2):
        await trained(job, generation)
        os.kill(job.rank_pids()[0], signal.SIGKILL)
    await trained(job, 3)
    fail(job, 0)
    assert await ended(job, "FAILED") == [("Relaunch", "RESTART_IN_PLACE", True)] * 2 + [
        ("Stop", None, False)
    ]


@pytest.mark.long
async def test_s4_4_modelarts_reschedules_the_whole_job_three_times(
    world: World,
) -> None:
    job = await world.submit(policy=preset("modelarts", max_restarts=8))
    for generation in (1, 2, 3):
        await trained(job, generation)
        fail(job, 0)
        await job.until_phase("RUNNING", generation=generation + 1)
    await trained(job, 4)
    fail(job, 0)
    assert await ended(job, "FAILED") == [("Relaunch", "RESCHEDULE_JOB", True)] * 3 + [
        ("Stop", None, False)
    ]


@pytest.mark.long
async def test_s4_7_modelarts_restarts_a_hang_in_place_at_no_cost(world: World) -> None:
    job = await world.submit(
        policy=preset(
            "modelarts", hang={"after": HANG_AFTER, "first_step": "30s", "checkpoint": "30s"}
        )
    )
    await trained(job, 1)
    os.kill(job.rank_pids()[0], signal.SIGSTOP)
    await trained(job, 2)
    assert (await job.state()).restarts_spent == 0
    job.let_end()
    assert ("Relaunch", "RESTART_IN_PLACE", False) in await ended(job, "SUCCEEDED")


XID = (
    "[ 4711.000000] NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, "
    "GPU has fallen off the bus."
)


@pytest.mark.long
async def test_default_goes_on_without_the_node_that_lost_a_gpu(
    world: World,
) -> None:
    log = world.node("n2") / KERNEL_LOG
    log.parent.mkdir(parents=True, exist_ok=True)
    log.touch()
    # Nodes learn of their log when the worker first connects.
    await world.worker.end()
    await world.worker.start()
    job = await world.submit()
    await trained(job, 1)
    with log.open("a") as kernel:
        kernel.write(f"{XID}\n")
    fail(job, 1, "RuntimeError: CUDA error: unspecified launch failure")
    await trained(job, 2)
    state = await job.state()
    assert [(one.cause, one.code, one.nodes, one.gpus, one.spent) for one in state.tries] == [
        ("GPU_FATAL", "Xid 79", ("n2",), ("0000:05:00",), False)
    ]
    assert [slot.node for slot in state.slots] == ["n1", "n3"] and [
        one.node for one in state.avoided
    ] == ["n2"]
    job.let_end()
    assert await ended(job, "SUCCEEDED") == [("Relaunch", "REPLACE_NODE", False)]
    log.unlink()


RAISES_ON_RANK_1 = """
import os, time
if os.environ["RANK"] == "1":
    raise ValueError("bad batch")
time.sleep(600)
"""


WALKED = [
    ("Relaunch", "RESTART_IN_PLACE", True),
    ("Relaunch", "RESTART_IN_PLACE", True),
    ("Examine", None, False),
    ("Relaunch", "REPLACE_NODE", True),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "then"),
    [
        pytest.param(
            {},
            # Each launch ended at once with the same error, the last one without the node that all
            # others had named: `startup_stop`.
            [("Stop", None, False)],
            id="by its start-up errors",
        ),
        pytest.param(
            {"startup_stop": "off", "no_progress_stop": "off"},
            [*WALKED[:3], ("Stop", None, False)],
            id="by its whole ladder",
        ),
    ],
)
async def test_default_restarts_examines_replaces_then_blames_the_code(
    world: World, changes: dict[str, Any], then: list[tuple[str, str | None, bool]]
) -> None:
    job = await world.submit(
        command=[world.python, "-S", "-c", RAISES_ON_RANK_1], policy=chaos_policy(**changes)
    )
    decisions = await ended(job, "FAILED")
    assert decisions == [*WALKED, *then]
    state = await job.state()
    assert (state.slots[0].node, state.slots[1].node, state.avoided) == ("n1", "n3", ())
