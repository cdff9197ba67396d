"""What must hold after every round, whatever was hit. Each violation is one sentence."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

from relaunch.cli import job_views
from tests.chaos.rounds import Expected
from tests.chaos.world import Job, Unmet, eventually
from tests.invariants import find_unbalanced


async def violations(job: Job, expected: Expected) -> list[str]:
    now = await job.look()
    if now.state is None:
        return [f"the state of {job.name} cannot be read"]
    state, found = now.state, []
    if (now.phase, state.exit_code) != (expected.phase, expected.exit_code):
        ended = f"it ended as {now.phase} with exit code {state.exit_code}: {state.reason}"
        found.append(f"{ended}; expected {expected.phase} with {expected.exit_code}")
    tries = tuple((str(t.cause), str(t.strategy), t.spent) for t in state.tries)
    if expected.tries is not None and tries not in expected.tries:
        found.append(
            f"it tried {tries}, expected {' or '.join(str(allowed) for allowed in expected.tries)}"
        )
    wanted = expected.generation or 1 + len(tries)
    if expected.tries is not None and state.generation != wanted:
        found.append(f"it is in generation {state.generation}, expected {wanted}")
    found += launched_once(job, state.spec.world_size, state.generation)
    overlaps = [
        line
        for line in job.lines("violations")
        if int(line["alive"].rpartition(".")[2]) not in expected.paused
    ]
    found += [f"two generations were alive at once: {line}" for line in overlaps]
    found += find_unbalanced(state)
    found += await agreement(job)
    try:
        await eventually(
            lambda: _none_left(job), f"ranks of {job.name} are left: {job.rank_pids()}", 20.0
        )
    except Unmet as unmet:
        found.append(str(unmet))
    return found


async def _none_left(job: Job) -> bool:
    return not job.rank_pids()


def launched_once(job: Job, world_size: int, generation: int) -> list[str]:
    """Every rank of a generation was started at most once, those of the last one exactly once."""
    found = []
    counted = Counter((line["token"], line["rank"]) for line in job.starts())
    found += [
        f"rank {rank} of {token} was started {times} times"
        for (token, rank), times in counted.items()
        if times > 1
    ]
    tokens = {token for token, _ in counted}
    above = [token for token in tokens if int(token.rpartition("/")[2]) > generation]
    found += [
        f"{token} was started, and the job knows only {generation} generations" for token in above
    ]
    last = {rank for token, rank in counted if int(token.rpartition("/")[2]) == generation}
    if last != set(range(world_size)):
        found.append(
            f"generation {generation} started ranks {sorted(last)}, expected all {world_size}"
        )
    return found


async def agreement(job: Job) -> list[str]:
    """`show` and `history` tell the same story."""
    state, incidents = await job.state(), await job.incidents()
    moment = datetime.now(UTC)
    show, history = (
        job_views.show(state, None, moment),
        [job_views.history_entry(incident, state) for incident in incidents],
    )
    found = []
    if show["incidents"] != len(history):
        found.append(f"show counts {show['incidents']} incidents, history has {len(history)}")
    decisions = [decision for entry in history for decision in entry["decisions"]]
    strategies = Counter(decision["strategy"] for decision in decisions if decision["strategy"])
    if strategies != Counter(str(t.strategy) for t in state.tries):
        found.append(
            f"history has the strategies {dict(strategies)}, show the tries "
            f"{[str(t.strategy) for t in state.tries]}"
        )
    spent = sum(decision["spent"] for decision in decisions)
    if (
        spent != sum(t.spent for t in state.tries)
        or show["budgets"]["max_restarts"]["spent"] > spent
    ):
        found.append(
            f"history says that {spent} restarts were spent, show "
            f"{show['budgets']['max_restarts']['spent']}"
        )
    if open_ones := [entry["reason"] for entry in history if entry["closed"] is None]:
        found.append(f"the job has ended and an incident is open: {open_ones}")
    if show["incident"] is not None and show["incident"] != history[-1]:
        found.append("show's last incident is not history's")
    return found
