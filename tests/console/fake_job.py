"""A job workflow that only remembers what people said, for the command line's tests.

With it come the two reading activities.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from temporalio import activity, workflow
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from relaunch.evidence.causes import Cause
    from relaunch.job.state import DecisionRecord, Incident, JobState, Phase, Slot
    from relaunch.messages.jobs import AnswerMessage, JobResult, TrainingJobInput
    from relaunch.messages.logs import (
        LogPiece,
        ReadIncidentsInput,
        ReadIncidentsOutput,
        ReadLogsInput,
        ReadLogsOutput,
    )
    from relaunch.pool.state import LiveGeneration, NodeProbe
    from relaunch.spec.job import JobSpec
    from relaunch.spec.policy import preset

T0 = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
ENDED = T0 + timedelta(seconds=9)
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 7\nValueError: loss is nan'


def job_state(**changes: Any) -> JobState:
    spec = JobSpec(name="llama", command=("python", "train.py"), nodes=2, nproc_per_node=2)
    slots = (Slot("local-1", "127.77.0.1"), Slot("local-2", "127.77.0.2"))
    known = {
        "namespace": "default",
        "name": "llama",
        "submission": 1,
        "spec": spec,
        "policy": preset("default"),
        "submitted_by": "ann",
    }
    return JobState(
        **{
            **known,
            "submitted_at": T0,
            "slots": slots,
            "generation": 1,
            "phase": Phase.RUNNING,
            "launched_at": T0,
            **changes,
        }
    )


def incident(opened: datetime = T0, **changes: Any) -> Incident:
    decision = DecisionRecord(
        opened + timedelta(seconds=1), "Relaunch", "RESTART_IN_PLACE", "first try of 3", True
    )
    known = {
        "cause": Cause.APPLICATION,
        "reason": "rank 3 exited with code 1",
        "nodes": ("local-2",),
        "traceback": TRACEBACK,
    }
    times = {"detected": opened + timedelta(seconds=0.25), "decided": opened + timedelta(seconds=1)}
    return Incident(
        **{"opened": opened, "generation": 1, **known, **times, "decisions": (decision,), **changes}
    )


@workflow.defn(name="TrainingJob", sandboxed=False)
class FakeTrainingJob:
    """Ends when cancelled, or at once when its command says so: (`exit`, CODE)."""

    @workflow.init
    def __init__(self, start: TrainingJobInput) -> None:
        before = start.previous
        old = before.incidents if before else ()
        base = job_state(name=start.spec.name, spec=start.spec, policy=start.policy, incidents=old)
        slots = tuple(
            Slot(f"local-{n}", f"127.77.0.{n}") for n in range(1, start.spec.node_count + 1)
        )
        self._state = replace(base, slots=slots, submission=before.submission + 1 if before else 1)
        if start.spec.command[0] == "exit" and start.spec.command[1] != "0":
            self._state = replace(self._state, incidents=(*old, incident(closed=ENDED, ranks=(1,))))

    @workflow.run
    async def run(self, start: TrainingJobInput) -> JobResult:
        phase, code = Phase.CANCELLED, 143
        if start.spec.command[0] == "exit":
            code = int(start.spec.command[1])
            phase = Phase.FAILED if code else Phase.SUCCEEDED
        else:
            await workflow.wait_condition(lambda: self._state.reason.startswith("cancelled"))
        self._state = replace(self._state, phase=phase, exit_code=code, ended_at=ENDED)
        state = self._state
        return JobResult(
            state.name, phase, code, state.reason, state.generation, state.incidents, 0, state
        )

    @workflow.signal
    def cancel(self, message: Any = None) -> None:
        self._state = replace(self._state, reason=f"cancelled: {message['reason']}")

    @workflow.signal
    def force_retry(self, message: Any = None) -> None:
        self._state = replace(
            self._state,
            generation=self._state.generation + 1,
            notices=(str(message["avoid_nodes"]),),
        )

    @workflow.signal
    def report(self, message: Any = None) -> None:
        self._state = replace(
            self._state,
            notices=(
                *self._state.notices,
                f"{message['node']} {message['declared']}: {message['reason']}",
            ),
        )

    @workflow.update
    def answer(self, message: AnswerMessage) -> str:
        told = f"{message.decision} {message.node or message.within}: {message.reason}"
        self._state = replace(self._state, notices=(*self._state.notices, told))
        return f"{message.decision} is taken"

    @answer.validator
    def _check_answer(self, message: AnswerMessage) -> None:
        if message.decision == "deny" and not message.node:
            raise ApplicationError(
                "it is RUNNING and asks nothing", type="BadInput", non_retryable=True
            )

    @workflow.query
    def state(self) -> JobState:
        return self._state


@activity.defn
async def probe_nodes(input: dict[str, Any]) -> tuple[NodeProbe, ...]:
    """Only local-2 answers."""
    living = (LiveGeneration("llama", 1, 1),)
    return tuple(
        NodeProbe(node, generations=living)
        if node == "local-2"
        else NodeProbe(node, "no route to host")
        for node in input["nodes"]
    )


@activity.defn
async def read_logs(input: ReadLogsInput) -> ReadLogsOutput:
    """Each rank prints two lines, the second without an end; one call gives one of them."""
    lines = {
        rank: f"g{input.generation} rank {rank} begins\ng{input.generation} rank {rank} ends"
        for rank in range(2)
    }
    chunks = []
    for rank, text in lines.items():
        at = (input.offsets or {}).get(rank, 0)
        if piece := text[at : at + 17]:
            chunks.append(LogPiece(rank, at + len(piece), piece))
    return ReadLogsOutput(tuple(chunks), ended=not chunks)


@activity.defn
async def read_incidents(input: ReadIncidentsInput) -> ReadIncidentsOutput:
    return ReadIncidentsOutput(
        (
            incident(
                T0 - timedelta(days=1),
                reason=f"an old one of {input.job}",
                closed=T0 - timedelta(hours=23),
            ),
        )
    )
