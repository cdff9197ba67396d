"""Activities on a single node: examining it, and carrying out the steps of a repair.

`relaunch.repair.machine` decides what is next.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from temporalio import activity
from temporalio.exceptions import ApplicationError

from relaunch.access.orders import STRATEGIES, RepairStep, SignedText, check_repair_step
from relaunch.activities.power import cycle_power
from relaunch.activities.stop import send_heartbeats
from relaunch.backends.base import (
    Backend,
    BackendError,
    CyclesPower,
    Fleets,
    Refusal,
    RefusesResets,
    identity,
)
from relaunch.evidence.catalog import catalog
from relaunch.evidence.findings import Verdict
from relaunch.evidence.health import Health, read_health
from relaunch.job.state import ExaminedNode, ForeignUse, Slot
from relaunch.messages.nodes import ExamineNodesInput, FindForeignInput, NodeHealth
from relaunch.pool.inventory import describe_foreign
from relaunch.repair.state import (
    NoAnswer,
    NodeDiagnosed,
    NodeProbed,
    OrderDone,
    OrderRefused,
    RepairEvent,
)
from relaunch.spec.access import Access

PROBE_TIMEOUT_S = 20.0
"""Seconds for a probe. A healthy node needs less than one; on the node, a hanging driver is
abandoned after ten."""
DIAGNOSE_TIMEOUTS = {1: timedelta(minutes=3), 2: timedelta(minutes=15), 3: timedelta(minutes=60)}
"""Time limit of each DCGM level, some six times the duration in NVIDIA's documentation: `dcgmi
diag` itself has no limit."""
REPAIR_WORKFLOW = "NodeRepair"
MAX_PROBES = 3
PROBE_INTERVAL_S = 2.0
"""Seconds between two probes. One lost answer says nothing about a node."""
MAX_EXAMINATIONS = 64
"""Most examinations at once: each is a session and minutes of DCGM on its node."""


@dataclass(frozen=True, slots=True)
class NodeInput:
    fleet: str
    node: str


@dataclass(frozen=True, slots=True)
class NodeTerms:
    """What the fleet file says about repairing a node."""

    repairs: Literal["act", "ask", "observe"]
    gpus: int
    unknown: str = ""
    """Why there is no such node here; empty: there is one."""
    power: bool = False
    """Whether the node's power can be cycled."""
    no_reset: str = ""
    """Why its GPUs cannot be reset; empty: they can."""
    access: Access | None = None
    """Who may repair it; None: everyone."""


@dataclass(frozen=True, slots=True)
class RepairOrder:
    """One step of the repair of one node."""

    fleet: str
    node: str
    id: str
    verb: str
    """probe, diagnose, reset-gpus, reboot or power-cycle."""
    within: timedelta
    boot_id: str = ""
    gpus: tuple[str, ...] = ()
    level: int = 0
    reason: str = ""
    kernel_since: timedelta | None = None
    by: str = ""
    """Who ordered what acts on the node, and who approved it, for the node's own journal."""
    signed: SignedText | None = None
    """The order or the approval of a person, as the repair has received it; only with what acts on
    the node."""


class NodeActivities:
    def __init__(self, fleets: Fleets) -> None:
        self._fleets = fleets

    @activity.defn
    async def examine_nodes(self, input: ExamineNodesInput) -> tuple[ExaminedNode, ...]:
        """Examine nodes whose GPUs are free.

        Return a verdict for every node; one that does not answer is UNKNOWN.
        """
        healths = await self._examine(input)
        return tuple(ExaminedNode(node, health.verdict, health.reason) for node, health in healths)

    @activity.defn
    async def check_nodes(self, input: ExamineNodesInput) -> tuple[NodeHealth, ...]:
        """Examine nodes for a person, and return all findings.

        If no node is named, examine the whole fleet.
        """
        try:
            backend = self._fleets.backend(input.fleet)
            names = input.nodes or tuple(node.name for node in self._fleets.spec(input.fleet).nodes)
        except KeyError as error:
            raise ApplicationError(
                str(error.args[0]), type="BadInput", non_retryable=True
            ) from None
        known = {node.name for node in self._fleets.spec(input.fleet).nodes}
        if unknown := [name for name in names if name not in known]:
            raise ApplicationError(
                f"fleet {input.fleet} has no node {unknown[0]}", type="BadInput", non_retryable=True
            )
        found = await self._examine(replace(input, nodes=names))
        return tuple(NodeHealth(node, backend.node(node).gpus, health) for node, health in found)

    @activity.defn
    async def find_foreign_processes(self, input: FindForeignInput) -> tuple[ForeignUse, ...]:
        """Return the nodes on which processes that relaunch did not start use a job's GPUs.

        Read now, by a reading that changes nothing. A node that does not answer, or cannot read its
        GPUs, is left out.
        """
        backend = self._fleets.backend(input.fleet)

        async def ask_one(slot: Slot) -> ForeignUse | None:
            for attempt in range(MAX_PROBES):
                if attempt:
                    await asyncio.sleep(PROBE_INTERVAL_S)
                try:
                    answer = await asyncio.wait_for(
                        backend.list(slot.node, gpus=True), PROBE_TIMEOUT_S
                    )
                except (BackendError, TimeoutError):
                    continue
                processes = describe_foreign(answer.get("gpus"), slot.gpus)
                return ForeignUse(slot.node, processes) if processes else None
            return None

        async with send_heartbeats():
            found = await asyncio.gather(*(ask_one(slot) for slot in input.slots))
        return tuple(one for one in found if one is not None)

    async def _examine(self, input: ExamineNodesInput) -> list[tuple[str, Health]]:
        backend = self._fleets.backend(input.fleet)
        gate = asyncio.Semaphore(MAX_EXAMINATIONS)

        async def examine_one(node: str) -> tuple[str, Health]:
            async with gate:
                return node, await _examine(backend, node, input)

        async with send_heartbeats() as shown:
            shown.append({"examining": list(input.nodes[:8]), "nodes": len(input.nodes)})
            return await asyncio.gather(*(examine_one(node) for node in input.nodes))

    @activity.defn
    async def read_terms(self, input: NodeInput) -> NodeTerms:
        try:
            spec, backend = self._fleets.spec(input.fleet), self._fleets.backend(input.fleet)
        except KeyError as error:
            return NodeTerms("observe", 0, str(error.args[0]))
        if input.node not in {node.name for node in spec.nodes}:
            return NodeTerms("observe", 0, f"fleet {input.fleet} has no node {input.node}")
        node = backend.node(input.node)
        return NodeTerms(
            spec.repairs,
            node.gpus,
            power=node.power is not None or isinstance(backend, CyclesPower),
            no_reset=backend.no_reset if isinstance(backend, RefusesResets) else "",
            access=spec.access,
        )

    @activity.defn
    async def order_repair(self, order: RepairOrder) -> RepairEvent:
        """Carry out one step, without retries.

        After a missing answer, the caller must check the node before it orders again.
        """
        backend = self._fleets.backend(order.fleet)
        if refusal := self._check_proof(order):
            return OrderRefused("not_proven", refusal)
        async with send_heartbeats():
            try:
                return await _carry_out(backend, order)
            except BackendError as error:
                return NoAnswer(error.reason)

    def _check_proof(self, order: RepairOrder) -> str:
        """Return why an order that acts on a node is not obeyed; empty: it is.

        Raises:
            ApplicationError: It does not come from a repair.
        """
        spec, info = self._fleets.spec(order.fleet), activity.info()
        if spec.access is None:
            return ""
        if info.workflow_type != REPAIR_WORKFLOW:
            # The server lets every client start an activity by itself, past all permits.
            raise ApplicationError(
                f"{order.verb} of {order.node}: only a repair orders that",
                type="BadInput",
                non_retryable=True,
            )
        # With `repairs: act` jobs and fleets order repairs, which sign nothing.
        if spec.repairs == "act" or order.verb not in STRATEGIES:
            return ""
        step = RepairStep(
            order.verb,  # type: ignore[arg-type]
            order.fleet,
            order.node,
            info.namespace,
            info.workflow_id or "",
            info.workflow_run_id or "",
        )
        return check_repair_step(spec.access, step, order.signed, datetime.now(UTC))


async def _carry_out(backend: Backend, order: RepairOrder) -> RepairEvent:
    within, fleet = order.within.total_seconds(), _identity(backend, order.fleet)
    answer: Mapping[str, Any] | Refusal
    match order.verb:
        case "probe":
            return NodeProbed(
                await _probe_with_context(backend, order.node, within, order.kernel_since)
            )
        case "diagnose":
            return NodeDiagnosed(
                await _diagnose(backend, order.node, order.id, order.level, order.within, fleet)
            )
        case "reset-gpus":
            answer = await backend.reset_gpus(
                order.node,
                order.id,
                order.boot_id,
                order.gpus,
                within,
                fleet,
                order.reason,
                order.by,
            )
        case "reboot":
            answer = await backend.reboot(
                order.node, order.id, order.boot_id, order.reason, fleet, order.by
            )
        case "power-cycle":
            power = backend.node(order.node).power
            if power is None and isinstance(backend, CyclesPower):
                return OrderDone(dict(await backend.cycle_power(order.node, order.id, within)))
            return await cycle_power(order.node, power, within)
        case _:
            raise ValueError(f"{order.verb!r} is no step of a repair")
    if isinstance(answer, Refusal):
        return OrderRefused(answer.why, answer.reason, answer.boot_id)
    return OrderDone(dict(answer))


async def _probe_with_context(
    backend: Backend, node: str, within: float, kernel_since: timedelta | None
) -> dict[str, Any]:
    """Probe a node, and add what only this side knows: the time here, from which the offset of its
    clock is computed, and which of its network ports are unused."""
    sent = time.time()
    answer = await backend.probe(node, within, _seconds(kernel_since))
    return {
        **answer,
        "exchange": {"sent": sent, "received": time.time()},
        "unused_ports": list(backend.node(node).unused_ports),
    }


def _identity(backend: Backend, fleet: str) -> str:
    return identity(activity.info().namespace, fleet, backend.server)


async def _diagnose(
    backend: Backend, node: str, id_: str, level: int, within: timedelta, fleet: str
) -> dict[str, Any]:
    """Run DCGM, and run it again if the connection broke.

    If the node is still held by this same order, wait for that run.

    Raises:
        BackendError: no answer, PROBES times or until the time is up.
    """
    ends = datetime.now(UTC) + within
    unanswered = 0
    while True:
        left = max(1.0, (ends - datetime.now(UTC)).total_seconds())
        try:
            answer = await backend.diagnose(node, id_, level, left, fleet)
        except BackendError:
            unanswered += 1
            if unanswered == MAX_PROBES or left <= 1.0:
                raise
        else:
            if not isinstance(answer, Refusal):
                return dict(answer)
            if answer.why != "held" or answer.held_by != id_ or left <= 1.0:
                return {"refused": answer.why, "reason": answer.reason}
        await asyncio.sleep(PROBE_INTERVAL_S)


def _seconds(span: timedelta | None) -> float | None:
    return None if span is None else span.total_seconds()


async def _examine(backend: Backend, node: str, input: ExamineNodesInput) -> Health:
    try:
        expected = backend.node(node).gpus
    except KeyError:
        return Health(Verdict.UNKNOWN, "it is in the fleet file no more")
    ends = datetime.now(UTC) + input.within
    facts, unread = await _probe(backend, node, input.kernel_since)
    diag: dict[str, Any] | None = None
    level = input.level if expected else 0
    if facts is not None and level:
        within = min(
            DIAGNOSE_TIMEOUTS[level],
            max(timedelta(seconds=1), ends - datetime.now(UTC) - timedelta(seconds=10)),
        )
        try:
            diag = await _diagnose(
                backend, node, input.id, level, within, _identity(backend, input.fleet)
            )
        except BackendError as error:
            diag = {"refused": "no_answer", "reason": error.reason}
    return read_health(
        facts,
        diag,
        expected_gpus=expected,
        level=level,
        catalog=catalog(input.catalog),
        unread=unread,
    )


async def _probe(
    backend: Backend, node: str, kernel_since: timedelta | None
) -> tuple[Mapping[str, Any] | None, str]:
    unread = ""
    for attempt in range(MAX_PROBES):
        if attempt:
            await asyncio.sleep(PROBE_INTERVAL_S)
        try:
            return await _probe_with_context(backend, node, PROBE_TIMEOUT_S, kernel_since), ""
        except BackendError as error:
            unread = f"{node} does not answer: {error.reason}"
    return None, unread
