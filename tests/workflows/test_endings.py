"""No ending of a program costs a node: real jobs under each preset, their fleet, its repairs.

The nodes are simulated and healthy. Programs end on them in any order in every way that they can:
with codes, signals and words that accuse the hardware, with kernel messages about what a program
did to a GPU, and by killing the shim of their ranks. Nodes may be examined, nothing else.
"""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import Phase as Search
from hypothesis import strategies as st

from relaunch.job.state import JobState, Phase
from relaunch.pool.state import FleetState, NodeStatus
from relaunch.spec.policy import Policy, preset_names
from tests.fakes.nodes import Exit, Script, ShimDies, error_file
from tests.fakes.nodes.health import bus_id
from tests.workflows.claimants import until_fleet
from tests.workflows.conftest import MakeRig
from tests.workflows.rig import policy

pytestmark = pytest.mark.asyncio(loop_scope="session")
RANKS = 2
GENERATIONS = 9
"""More than any preset launches for faults of programs alone; what follows succeeds."""

SAID = (
    "ValueError: bad batch",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "RuntimeError: loss is nan",
    "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    "RuntimeError: CUDA error: an illegal memory access was encountered",
    "RuntimeError: CUDA error: unspecified launch failure",
    "RuntimeError: NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'",
    "RuntimeError: NVML Unknown Error; GPU has fallen off the bus",
    "NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus.",
    "NVRM: Xid (PCI:0000:1b:00): 95, pid=1, Uncontained ECC error",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "OSError: [Errno 28] No space left on device",
    "OSError: [Errno 5] Input/output error",
    "slurmstepd: error: *** JOB 1 ON n1 CANCELLED AT 2026-11-20T03:12:45 DUE TO PREEMPTION ***",
    "srun: error: Node failure on n1",
    "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0",
    "train.py: error: unrecognized arguments: --fast",
    "Watchdog caught collective operation timeout",
)
KERNEL = tuple(
    (f"[  100.0] NVRM: Xid (PCI:{bus_id(0)[4:-2]}): {code}, pid=4711, name=python, Ch 00000008",)
    for code in (13, 31, 43, 69)
)
CODES = (0, 1, 2, 7, 13, 93, 126, 127, 134, 137, 139, 143, 255)
SIGNALS = (4, 6, 7, 8, 9, 11, 15)
ACCUSING = tuple(line for line in SAID if re.search(r"ECC|NVML|Xid|EDAC|Cuda failure", line))
"""What a program may say that reads like a fault of the hardware."""
ENDINGS: tuple[Callable[[random.Random], dict[str, Any]], ...] = (
    lambda dice: {"exit_code": dice.choice(CODES)},
    lambda dice: {"exit_code": None, "signal": dice.choice(SIGNALS)},
    lambda dice: {"exit_code": dice.choice(CODES), "log_tail": tuple(dice.choices(SAID, k=2))},
    lambda dice: {"error": error_file(dice.choice(SAID))},
    lambda dice: {"error": error_file(dice.choice(ACCUSING))},
    lambda dice: {"exit_code": None, "signal": 6, "kernel": dice.choice(KERNEL)},
)


def draw_lives(seed: int) -> tuple[Exit | ShimDies, ...]:
    """Return how each generation ends: one rank of a node, all of them, or their shim.

    A program that fails in its own way often fails again in that way, which is what uses up the
    tries of one ladder, so every other generation ends as the one before.
    """
    dice = random.Random(seed)
    lives: list[Exit | ShimDies] = []
    for generation in range(1, GENERATIONS + 1):
        if lives and dice.random() < 0.5:
            lives.append(replace(lives[-1], generation=generation))
        elif dice.random() < 0.15:
            lives.append(ShimDies(generation=generation))
        else:
            rank, after = dice.choice((None, *range(RANKS))), dice.choice((0.0, 0.02))
            how = dice.choice(ENDINGS)(dice)
            lives.append(Exit(generation=generation, rank=rank, after=after, **how))
    return tuple(lives)


def at_once(name: str) -> Policy:
    """Return a preset without its delays and without its limits over all ladders."""
    rules = policy(extends=name)
    soon = {"delay": timedelta(0), "backoff": 1.0}
    causes = {
        cause: tuple(rung.model_copy(update=soon) for rung in ladder)
        for cause, ladder in rules.causes.items()
    }
    # Each ladder is to be walked to its end, whatever the other limits say.
    limits = {"no_progress_stop": "off", "startup_stop": "off", "max_restarts": GENERATIONS}
    # After a rank that exits with 0 nothing else happens in these scripts: five minutes of waiting.
    # And no node is ever silent here, but a busy machine may hold back the heartbeats of all.
    times = rules.timeouts.model_copy(
        update={
            "exit_barrier": timedelta(seconds=0.5),
            "heartbeat": timedelta(seconds=5),
            "fence_after": timedelta(seconds=10),
            "lost_after": timedelta(minutes=3),
        }
    )
    return rules.model_copy(update={**limits, "causes": causes, "timeouts": times})


SEEDS = st.integers(0, 2**16)


def rests(state: JobState) -> bool:
    return state.phase.is_final or state.phase is Phase.WAITING_FOR_PERSON


def all_in_service(state: FleetState) -> bool:
    return all(node.status is NodeStatus.IN_SERVICE for node in state.nodes)


async def check(make_rig: MakeRig, lives: tuple[Exit | ShimDies, ...]) -> None:
    names = preset_names()
    async with make_rig(
        Script(lives, then="succeed"),
        nodes=2 * len(names),
        gpus=RANKS,
        name=f"f-{uuid.uuid4().hex[:8]}",
        limits={"nodes_out": "100%"},
        all_ended=False,
    ) as rig:
        jobs = {name: await rig.submit(at_once(name), nodes=1, ranks=RANKS) for name in names}
        for name, job in jobs.items():
            state = await job.until(rests, f"{name} at rest")
            assert not [one for one in state.avoided if one.isolated], (name, state.incidents)
        # On a busy machine jobs meet on other nodes. One on which three jobs have failed is
        # examined, once a job that waits for a person has left it.
        for job in jobs.values():
            if not (await job.state()).phase.is_final:
                await job.handle.signal("cancel")
                await job.result()
        fleet = await until_fleet(rig, all_in_service, "every node in service")
        assert not [mark for node in fleet.nodes for mark in node.marks if mark.isolated]
        assert {one.command for one in rig.backend.upkeep} <= {"diagnose"}


def searched(examples: int) -> settings:
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Search.generate,),  # to shrink one example takes longer than to read it
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.long
@searched(2)
@given(seed=SEEDS)
async def test_no_ending_of_a_program_costs_a_node(make_rig: MakeRig, seed: int) -> None:
    await check(make_rig, draw_lives(seed))


@pytest.mark.long
@pytest.mark.timeout(3600)
@searched(60)
@given(seed=SEEDS)
async def test_no_ending_costs_a_node_in_many_orders(make_rig: MakeRig, seed: int) -> None:
    await check(make_rig, draw_lives(seed))
