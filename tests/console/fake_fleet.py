"""A fleet workflow that only remembers what people said, for the command line's tests.

With it comes the activity that reads the fleet's file.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from temporalio import activity, workflow
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from relaunch.evidence.causes import Cause
    from relaunch.messages.fleets import FleetFile, FleetInput, ReadFleetInput
    from relaunch.messages.jobs import AnswerMessage
    from relaunch.pool.events import FleetFileContent
    from relaunch.pool.messages import Claim, DrainRequest, Place
    from relaunch.pool.state import (
        Breaker,
        ClaimRecord,
        FleetState,
        LiveGeneration,
        Mark,
        NodeProbe,
        NodeRecord,
        NodeStatus,
    )
    from relaunch.repair.machine import begin
    from relaunch.repair.state import RepairRules, RepairState, Stage
    from relaunch.spec.fleet import FleetLimits, FleetNode
    from relaunch.spec.policy import Strategy

T0 = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
DEAF = "deaf"
"""A reason that this fleet does not understand."""


def node(number: int, **changes: Any) -> NodeRecord:
    name = f"gpu-{number:02}"
    spec = FleetNode.model_validate(
        {"name": name, "address": f"10.0.0.{number}", "gpus": 8, **changes.pop("spec", {})}
    )
    return NodeRecord(
        **{
            "spec": spec,
            "probe": NodeProbe(name, boot_id=f"boot {number}"),
            "probed_at": T0,
            **changes,
        }
    )


def silent(number: int, **changes: Any) -> NodeRecord:
    look = NodeProbe(f"gpu-{number:02}", silent="connection refused")
    return node(number, **{"probe": look, "silent_since": T0 - timedelta(minutes=5), **changes})


def living(number: int, *jobs: str, **changes: Any) -> NodeRecord:
    look = NodeProbe(
        f"gpu-{number:02}",
        boot_id=f"boot {number}",
        generations=tuple(LiveGeneration(job, 7, 2) for job in jobs),
    )
    return node(number, **{"probe": look, **changes})


def mark(ago: timedelta, **changes: Any) -> Mark:
    known = {
        "job": "llama",
        "submission": 7,
        "generation": 3,
        "cause": Cause.GPU_FATAL,
        "reason": "GPU 5 fell off the bus",
        "code": "Xid 79",
    }
    return Mark(**{"at": T0 - ago, **known, **changes})


def claim(job: str, *places: Place, nodes: int | None = None, **changes: Any) -> ClaimRecord:
    """One that has these places, or waits where it has none."""
    wanted = Claim(job, 7, 1, len(places) if nodes is None else nodes, running=bool(places))
    return ClaimRecord(
        **{
            "claim": wanted,
            "granted": places or None,
            "waiting_since": None if places else T0,
            **changes,
        }
    )


def fleet(*nodes: NodeRecord, **changes: Any) -> FleetState:
    return FleetState(
        **{
            "name": "default",
            "nodes": nodes,
            "awaited_jobs": (),
            "probe_count": 1,
            "is_file_read": True,
            **changes,
        }
    )


FILE = FleetFileContent(
    "act", tuple(node(number).spec for number in (1, 2, 4)), FleetLimits(repairs_at_once=3)
)


@activity.defn
async def read_fleet(input: ReadFleetInput) -> FleetFile:
    if input.fleet != "default":
        return FleetFile(
            None, f"fleet {input.fleet!r} is not served by this worker: expected default"
        )
    return FleetFile(FILE)


@workflow.defn(name="NodeRepair", sandboxed=False)
class FakeRepair:
    """Asks one thing, and ends with what was answered."""

    def __init__(self) -> None:
        self._told: AnswerMessage | None = None

    @workflow.run
    async def run(self, order: Any = None) -> str:
        await workflow.wait_condition(
            lambda: self._told is not None and workflow.all_handlers_finished()
        )
        assert self._told is not None
        return f"{self._told.decision}: {self._told.reason}"

    @workflow.query
    def state(self) -> RepairState:
        rules = RepairRules("ask", 2, 0, timedelta(minutes=10), timedelta(minutes=10))
        asked = begin(
            id="repair-1",
            fleet="default",
            node="gpu-01",
            strategy=Strategy.REBOOT_NODE,
            gpus=(),
            reason="Xid 79",
            by="ada",
            rules=rules,
            now=T0,
        )
        return replace(asked, stage=Stage.ASKING)

    @workflow.update
    async def answer(self, message: AnswerMessage) -> None:
        self._told = message

    @answer.validator
    def _check_answer(self, message: AnswerMessage) -> None:
        if message.reason == DEAF:
            raise ApplicationError(
                "nothing is asked: the node is looked at", type="BadInput", non_retryable=True
            )


@workflow.defn(name="Fleet", sandboxed=False)
class FakeFleet:
    """gpu-02 belongs to llama; gpu-03 is not in the file any more."""

    @workflow.init
    def __init__(self, start: FleetInput) -> None:
        self._state = fleet(
            node(1),
            node(2),
            node(3),
            name=start.name,
            repairs="act",
            claims=(claim("llama", Place("gpu-02")),),
        )

    @workflow.run
    async def run(self, start: FleetInput) -> None:
        await workflow.wait_condition(lambda: False)

    @workflow.query
    def state(self) -> FleetState:
        return self._state

    def _change(self, name: str, **changes: Any) -> None:
        nodes = tuple(
            replace(one, **changes) if one.name == name else one for one in self._state.nodes
        )
        self._state = replace(self._state, nodes=nodes)

    def _note(self, what: str) -> None:
        self._state = replace(self._state, notices=(*self._state.notices, what))

    @workflow.signal
    def quarantine(self, message: Any = None) -> None:
        self._note(f"quarantine {sorted(message.items())}")
        if message["reason"] == DEAF:
            return
        asked = {"reason": message["reason"], "by": message["by"]}
        drain = (
            DrainRequest(message["node"], **asked, until=T0 + timedelta(minutes=30))
            if message["drain"]
            else None
        )
        self._change(
            message["node"],
            status=NodeStatus.QUARANTINED,
            since=workflow.now(),
            drain=drain,
            **asked,
        )

    @workflow.signal
    def release(self, message: Any = None) -> None:
        self._change(
            message["node"],
            status=NodeStatus.IN_SERVICE,
            reason="",
            by="",
            since=workflow.now(),
            drain=None,
        )

    @workflow.signal
    def pause(self, message: Any = None) -> None:
        self._state = replace(
            self._state,
            breaker=Breaker(paused=f"{message['by']}: {message['reason']}", paused_since=T0),
        )

    @workflow.signal
    def resume(self, message: Any = None) -> None:
        self._state = replace(self._state, breaker=Breaker())

    @workflow.signal
    def apply(self, message: Any = None) -> None:
        kept = {one.name: one for one in self._state.nodes}
        nodes = tuple(kept.get(spec.name) or node(4) for spec in FILE.nodes)
        self._state = replace(self._state, nodes=nodes, limits=FILE.limits)
