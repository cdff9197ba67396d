"""Seeded accidents while ranks fail as scripted: each job ends, and ends right.

Messages are lost, delayed and doubled, and watches break.
"""

from __future__ import annotations

import random

import pytest

from relaunch.job.state import Phase
from tests.fakes.nodes import Chaos, Exit, Progress, Script
from tests.workflows.conftest import MakeRig
from tests.workflows.rig import policy

pytestmark = pytest.mark.asyncio(loop_scope="session")
LADDER = {"APPLICATION": [{"strategy": "RESTART_IN_PLACE"}]}
PER_SERVER = 5
"""Seeds in one test: one each would only add names."""


@pytest.mark.parametrize(
    "first",
    [
        0,
        *(
            pytest.param(first, marks=pytest.mark.long)
            for first in range(PER_SERVER, 25, PER_SERVER)
        ),
    ],
)
async def test_jobs_end_launch_generations_once_and_count_faults(
    make_rig: MakeRig, first: int
) -> None:
    for seed in range(first, first + PER_SERVER):
        await _one(make_rig, seed)


async def _one(make_rig: MakeRig, seed: int) -> None:
    dice = random.Random(seed)
    faults = dice.randint(0, 2)
    happenings = [
        Exit(
            generation=g,
            rank=dice.randrange(4),
            exit_code=dice.choice((1, 2)),
            after=dice.random() * 0.3,
        )
        for g in range(1, 10)
    ]
    last = 1
    chaos = Chaos(
        seed=seed,
        lose_order=0.04,
        lose_answer=0.04,
        double=0.2,
        break_watch=0.3,
        delay=0.3,
        seconds=0.05,
        after_orders=3,
    )
    exits = tuple(
        exit for exit in happenings if exit.generation is not None and exit.generation <= faults
    )
    async with make_rig(
        Script(
            (*exits, Progress(generation=99, hangs=True)), chaos=chaos, then="succeed", timeout=5.0
        )
    ) as rig:
        job = await rig.submit(
            policy(
                {"lease": "30s", "lost_after": "5s"},
                max_restarts=50,
                no_progress_stop="off",
                causes=LADDER,
            )
        )
        result = await job.result()
        state = result.state
        assert result.phase is Phase.SUCCEEDED, (seed, result.reason)
        # A launch that lost every answer is no fault of the job's own: it takes a generation
        # and none of the budget.
        own = [t for t in state.tries if t.spent]
        assert len(own) == state.restarts_spent <= faults, seed
        assert result.generation >= last + len(own), seed
        recorded = [
            d
            for incident in result.incidents
            for d in incident.decisions
            if d.decision == "Relaunch"
        ]
        assert len([d for d in recorded if d.spent]) == len(own), seed
        assert [d.strategy for d in recorded] == [t.strategy for t in state.tries], seed
        first_starts = [
            (o.node, o.token.generation) for o in rig.backend.lives if o.kind == "started"
        ]
        ranks = sorted((node, generation) for node, generation in first_starts)
        assert all(ranks.count(one) == 2 for one in set(ranks)), (
            f"seed {seed}: each rank of a generation starts once"
        )
        if not any(t.cause != "APPLICATION" for t in state.tries):
            assert len(own) == faults, seed
            assert result.generation == faults + 1, seed
