"""What must hold in every record of a simulated fleet, whatever was scripted.

Looks only at records, never at nodes.

Each violation is one sentence. Give it `backend.calls`, `backend.orders` and `backend.lives`, or
use `assert_invariants`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from relaunch.generation import Token
from relaunch.job.accounts import Account
from relaunch.job.state import JobState
from tests.backends.upkeep_invariants import upkeep_violations
from tests.fakes.nodes import Call, Life, Obeyed, SimulatedBackend

Job = tuple[str, str]


def assert_invariants(backend: SimulatedBackend, *, all_ended: bool = False) -> None:
    """Fail with every violation. With `all_ended`, also when a rank is alive still."""
    found = (
        *violations(backend.calls, backend.orders, backend.lives),
        *upkeep_violations(backend.upkeep, backend.lives),
    )
    if all_ended:
        found += tuple(
            f"rank {rank} of {token} on {node} is alive at the end"
            for token, node, rank in alive(backend.lives)
        )
    assert not found, "\n".join(found)


def violations(
    calls: Sequence[Call], orders: Sequence[Obeyed], lives: Sequence[Life]
) -> tuple[str, ...]:
    return (
        *two_tokens_alive(lives),
        *started_twice(lives),
        *started_before_all_prepared(orders, lives),
        *started_after_stop(orders, lives),
        *older_tokens_launched(calls),
    )


def alive(lives: Iterable[Life]) -> tuple[tuple[Token, str, int], ...]:
    """Return the ranks that have not ended, in the order of their start."""
    living: dict[tuple[Token, str, int], None] = {}
    for life in lives:
        key = (life.token, life.node, life.rank)
        if life.kind == "started":
            living[key] = None
        else:
            living.pop(key, None)
    return tuple(living)


def two_tokens_alive(lives: Iterable[Life]) -> tuple[str, ...]:
    """No two launches of one job have ranks at the same time, on whatever nodes."""
    found: list[str] = []
    living: dict[Job, dict[Token, dict[tuple[str, int], None]]] = {}
    for life in lives:
        tokens = living.setdefault(_job(life.token), {})
        if life.kind == "started":
            for other, ranks in tokens.items():
                if other != life.token and ranks:
                    node, rank = next(iter(ranks))
                    found.append(
                        f"{life.token} started on {life.node} while rank {rank} of {other} lived "
                        f"on {node}"
                    )
            tokens.setdefault(life.token, {})[life.node, life.rank] = None
        else:
            tokens.get(life.token, {}).pop((life.node, life.rank), None)
    return _once(found)


def started_twice(lives: Iterable[Life]) -> tuple[str, ...]:
    """A launch starts each of its ranks once, on one node."""
    found: list[str] = []
    where: dict[tuple[Token, int], str] = {}
    for life in lives:
        if life.kind == "started":
            before = where.get((life.token, life.rank))
            if before is not None:
                found.append(
                    f"rank {life.rank} of {life.token} started on {life.node} and had started on "
                    f"{before} before"
                )
            where[life.token, life.rank] = life.node
    return _once(found)


def started_before_all_prepared(orders: Iterable[Obeyed], lives: Iterable[Life]) -> tuple[str, ...]:
    """No rank starts before every node that starts ranks of this launch is prepared for it."""
    prepared: dict[tuple[Token, str], int] = {}
    for order in orders:
        if order.command == "prepare" and order.outcome == "done":
            prepared.setdefault((order.token, order.node), order.number)
    first: dict[Token, Life] = {}
    nodes: dict[tuple[Token, str], None] = {}
    for life in lives:
        if life.kind == "started":
            first.setdefault(life.token, life)
            nodes[life.token, life.node] = None
    found: list[str] = []
    for token, node in nodes:
        number = prepared.get((token, node))
        if number is None:
            found.append(f"{token} started on {node}, which was never prepared for it")
        elif number > first[token].number:
            found.append(
                f"{token} started on {first[token].node} before {node} was prepared for it"
            )
    return tuple(found)


def started_after_stop(orders: Iterable[Obeyed], lives: Iterable[Life]) -> tuple[str, ...]:
    """What a node was ordered to stop never starts there again, nor anything below it."""
    found: list[str] = []
    stopped: dict[tuple[Job, str], Token] = {}
    entries: list[Obeyed | Life] = sorted([*orders, *lives], key=lambda entry: entry.number)
    for entry in entries:
        key = (_job(entry.token), entry.node)
        if isinstance(entry, Obeyed):
            if entry.command == "stop":
                stopped[key] = max(entry.token, stopped.get(key, entry.token))
        elif entry.kind == "started" and key in stopped and entry.token <= stopped[key]:
            found.append(
                f"{entry.token} started on {entry.node} after {stopped[key]} was stopped there for "
                "ever"
            )
    return _once(found)


def older_tokens_launched(calls: Iterable[Call]) -> tuple[str, ...]:
    """A controller that has launched a token never launches an older one of the job.

    Records of two controllers may.
    """
    found: list[str] = []
    highest: dict[Job, Token] = {}
    for call in calls:
        if call.command in ("prepare", "start") and call.token is not None:
            known = highest.setdefault(_job(call.token), call.token)
            if call.token < known:
                found.append(
                    f"{call.command} of {call.token} was sent to {call.node} after {known} had been"
                )
            highest[_job(call.token)] = max(known, call.token)
    return _once(found)


def _job(token: Token) -> Job:
    return (token.namespace, token.job)


def _once(found: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(found))


def find_unbalanced(job: JobState) -> list[str]:
    """Return how the accounts of a job that has ended differ from the time that it took.

    Each incident has a price, and no more than what was charged in all.
    """
    found = []
    assert job.ended_at is not None
    took = job.ledger.earlier + (job.ended_at - job.submitted_at)
    charged = sum(job.ledger.totals.values(), timedelta(0))
    if abs(charged - took) > timedelta(seconds=1):
        found.append(f"the accounts of {job.name} have {charged}, and it took {took}")
    for account in Account:
        cost = sum((one.costs.get(account, timedelta(0)) for one in job.incidents), timedelta(0))
        if cost > job.ledger.totals.get(account, timedelta(0)):
            found.append(f"incidents of {job.name} cost more {account} than was charged: {cost}")
    return found


def assert_accounted(report: Mapping[str, Any], shown: Mapping[str, Any]) -> None:
    """Hold `report --json` of a job that has ended against the times in its `show --json`."""
    begin, end = shown["submitted"]["at"], shown["ended"]
    took = (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds()
    charged = sum(one["seconds"] for one in report["accounts"])
    assert abs(charged - took) <= 1 and abs(report["wall"] - took) <= 1, (report, took)
