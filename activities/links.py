"""Activity that finds out which nodes of a job's gang reach each other over its network."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from temporalio import activity

from relaunch.activities.launch import find_address
from relaunch.activities.stop import send_heartbeats
from relaunch.backends.base import Backend, BackendError, CallsPeers, Fleets, LinkListener
from relaunch.evidence.reachability import LinkCall, LinkFindings, choose_calls, judge_links
from relaunch.job.state import Slot

LISTEN_TIMEOUT_S = 10.0
"""Seconds for a node to begin to listen."""
CALL_TIMEOUT_S = 10.0
"""Seconds in which a node repeats its calls. A call takes milliseconds, and on a line of 500 ms
that loses a third of its packets a few seconds."""
ANSWER_TIMEOUT_S = 10.0
"""Seconds for the answer of a node beyond its calls."""
MAX_WITNESSES = 2
FEW_NODES = 3
"""Gangs of up to this many nodes have witnesses: other nodes of the fleet, which show which node of
a pair fails with a third as well."""
MAX_CONCURRENT_CALLS = 256

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class CheckLinksInput:
    fleet: str
    slots: tuple[Slot, ...]
    """The gang, by group rank."""
    earlier: tuple[tuple[str, str], ...] = ()
    """Links found broken before, since training last advanced."""


class LinkActivities:
    def __init__(self, fleets: Fleets) -> None:
        self._fleets = fleets

    @activity.defn
    async def check_links(self, input: CheckLinksInput) -> LinkFindings:
        """Have the nodes of a gang call each other; return which cannot reach each other."""
        backend = self._fleets.backend(input.fleet)
        if not isinstance(backend, CallsPeers):
            return LinkFindings(
                "whether its nodes reach each other cannot be checked in this fleet"
            )
        async with send_heartbeats() as shown:
            shown.append({"links of": [slot.node for slot in input.slots[:8]]})
            return await check_links(backend, backend, input, self._choose_witnesses(input))

    def _choose_witnesses(self, input: CheckLinksInput) -> tuple[Slot, ...]:
        """Return other nodes of the fleet, spares first: they are the least busy."""
        if len(input.slots) > FEW_NODES:
            return ()
        gang = {slot.node for slot in input.slots}
        others = [one for one in self._fleets.spec(input.fleet).nodes if one.name not in gang]
        others.sort(key=lambda one: not one.spare)
        return tuple(Slot(one.name, one.address) for one in others[:MAX_WITNESSES])


async def check_links(
    backend: Backend, caller: CallsPeers, input: CheckLinksInput, witnesses: Sequence[Slot]
) -> LinkFindings:
    """Check the links of a gang.

    Args:
        backend: What knows the addresses of the nodes.
        caller: The same backend.
        input: The gang.
        witnesses: Other nodes, which take part if they answer.
    """
    slots = (*input.slots, *witnesses)
    addresses = {slot.node: find_address(backend, slot) for slot in slots}
    stay = LISTEN_TIMEOUT_S + CALL_TIMEOUT_S + ANSWER_TIMEOUT_S
    answers = await _ask_each(
        list(addresses),
        lambda node: caller.listen_for_peers(node, addresses[node], stay),
        LISTEN_TIMEOUT_S,
    )
    listeners = {node: one for node, one in answers.items() if isinstance(one, LinkListener)}
    gang = [slot.node for slot in input.slots]
    unusable = {node: one for node, one in answers.items() if isinstance(one, str) and node in gang}
    plan = _plan_calls(gang, [slot.node for slot in witnesses], listeners)
    reports = await _ask_each(
        list(plan),
        lambda node: caller.call_peers(node, plan[node], CALL_TIMEOUT_S),
        CALL_TIMEOUT_S + ANSWER_TIMEOUT_S,
    )
    calls = [
        LinkCall(node, target, problem)
        for node, report in reports.items()
        for target, problem in report.items()
    ]
    return judge_links(gang, calls, unusable, input.earlier)


def _plan_calls(
    gang: Sequence[str], witnesses: Sequence[str], listeners: Mapping[str, LinkListener]
) -> dict[str, tuple[LinkListener, ...]]:
    """Return which listeners each node calls."""
    chosen = {
        node: [gang[other] for other in others]
        for node, others in zip(gang, choose_calls(len(gang)), strict=True)
    }
    for witness in witnesses:
        chosen[witness] = list(gang)
        for node in gang:
            chosen[node].append(witness)
    plan = {
        node: tuple(listeners[target] for target in targets if target in listeners)
        for node, targets in chosen.items()
    }
    return {node: targets for node, targets in plan.items() if targets}


async def _ask_each(
    nodes: Sequence[str], ask: Callable[[str], Awaitable[Answer]], within: float
) -> dict[str, Answer]:
    """Ask all nodes in parallel, and return the answers of those that gave one in time."""
    gate = asyncio.Semaphore(MAX_CONCURRENT_CALLS)

    async def ask_one(node: str) -> Answer | None:
        async with gate:
            try:
                return await asyncio.wait_for(ask(node), within)
            except (BackendError, TimeoutError):
                return None

    answers = await asyncio.gather(*(ask_one(node) for node in nodes))
    return {node: answer for node, answer in zip(nodes, answers, strict=True) if answer is not None}
