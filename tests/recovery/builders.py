"""Small builders for tables: a job in a phase, an observation, an event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from relaunch.evidence.causes import Cause
from relaunch.evidence.findings import Verdict
from relaunch.evidence.observations import RankError, RankExited, RanksVanished
from relaunch.evidence.reachability import LinkFindings
from relaunch.evidence.stacks import HungRank
from relaunch.job import step as core
from relaunch.job.apply import apply_decision, apply_event
from relaunch.job.events import (
    Event,
    FaultObserved,
    Launched,
    LaunchFailed,
    LaunchRefused,
    NodeRefusal,
    NodeReturned,
    NodesAcquired,
    NodesExamined,
    NodesMissing,
    NodeUnreachable,
    RanksHung,
    RepairEnded,
    Submitted,
)
from relaunch.job.ladder import climb
from relaunch.job.state import (
    Ask,
    Decision,
    Diagnosis,
    Examine,
    ExaminedNode,
    Ignore,
    JobState,
    Phase,
    Recovery,
    Relaunch,
    Repair,
    Slot,
    Stop,
)
from relaunch.spec.job import JobSpec
from relaunch.spec.policy import Policy, preset, resolve

T0 = datetime(2026, 11, 21, 3, 0, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def spec(**changes: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "llama",
            "command": ["python", "train.py"],
            "nodes": 2,
            "nproc_per_node": 2,
            **changes,
        }
    )


def policy(**changes: Any) -> Policy:
    return resolve(changes) if changes else preset("default")


def new_job(*, policy: Policy | None = None, **spec_changes: Any) -> JobState:
    return JobState(
        "default", "llama", 1000, spec(**spec_changes), policy or preset("default"), "ada", T0
    )


def step(job: JobState, event: Event, now: datetime = T0) -> tuple[JobState, Decision]:
    """One turn of the workflow's loop."""
    return core.step(job, event, now)


def record(job: JobState, event: Event, now: datetime = T0) -> JobState:
    """Record an event without deciding about it."""
    return apply_event(job, event, core.diagnose_event(job, event), now)


def play(job: JobState, *events: Event, now: datetime = T0) -> tuple[JobState, Decision]:
    assert events
    for event in events:
        job, decision = step(job, event, now)
    return job, decision


def running(*, policy: Policy | None = None, generation: int = 1, **spec_changes: Any) -> JobState:
    """A job whose generation runs on n1, n2, …."""
    job = new_job(policy=policy, **spec_changes)
    job, _ = step(job, Submitted("", "ada"))
    job = replace(job, generation=generation)
    slots = tuple(Slot(f"n{i + 1}", f"10.0.0.{i + 1}", 1, 1) for i in range(job.spec.node_count))
    job, _ = play(job, NodesAcquired(slots), Launched(generation, T0, T0))
    assert job.phase is Phase.RUNNING
    return job


def first_launch(*, policy: Policy | None = None, **spec_changes: Any) -> JobState:
    """A job to which n1, n2, … were granted, and whose ranks are about to be started."""
    job = new_job(policy=policy, **spec_changes)
    slots = tuple(Slot(f"n{i + 1}", f"10.0.0.{i + 1}", 1, 1) for i in range(job.spec.node_count))
    return play(job, Submitted("", "ada"), NodesAcquired(slots))[0]


def refused(why: str, *nodes: str, generation: int = 1) -> LaunchRefused:
    """Nodes have refused to launch with this code."""
    return LaunchRefused(generation, tuple(NodeRefusal(node, why, "…") for node in nodes))


def relaunched(job: JobState, now: datetime = T0) -> JobState:
    """The launch that was decided upon went well."""
    job, _ = step(job, Launched(job.generation, now, now), now)
    return job


def exited(
    rank: int = 3,
    node: str = "n2",
    *,
    code: int | None = None,
    signal: int | None = None,
    seconds: float = 0.0,
    **more: Any,
) -> RankExited:
    return RankExited(node, rank, rank % 2, code, signal, at(seconds), **more)


FOREIGN_KILL = (
    "[ 5784.649694] python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0",
    "[ 5784.649950] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,"
    "oom_memcg=/other,task_memcg=/other,task=python,pid=17669,uid=0",
    "[ 5784.649979] Memory cgroup out of memory: Killed process 17669 (python)",
)
"""What a node's kernel said of another container while a rank failed (2026-11-24)."""


def error(message: str = "RuntimeError: boom", timestamp: float | None = 1.0) -> RankError:
    return RankError(message, f"Traceback (most recent call last):\n{message}\n", timestamp)


def fault(job: JobState, *observations: RankExited, seconds: float = 0.0) -> FaultObserved:
    return FaultObserved(job.generation, observations, 0, at(seconds))


# --- walks: many turns, each with what was decided as one line ----------------------------------

Turn = tuple[Callable[[JobState], Event], str]
"""An event made for the job as it is by then, and what must be decided, as `describe` writes it."""


def describe(decision: Decision) -> str:
    """A decision as one line of a table: the act, its nodes, who is left out, who is avoided."""
    match decision:
        case Relaunch():
            text = str(decision.strategy or "LAUNCH")
            text += f" without {' '.join(decision.without)}" if decision.without else ""
            return text + (f" avoiding {' '.join(decision.avoid)}" if decision.avoid else "")
        case Examine():
            what = "CALL" if decision.links else "EXAMINE"
            what = "ASK WHO USES" if decision.foreign_processes else what
            return f"{what} {' '.join(decision.nodes)}"
        case Repair():
            return " ".join((decision.strategy, *decision.nodes, *decision.gpus))
        case Stop():
            return f"{decision.phase} {decision.exit_code}"
        case Ask():
            return "ASK"
        case Ignore():
            return "IGNORE"
        case _:
            return f"WAIT {decision.phase}"


def walk(job: JobState, *turns: Turn, now: datetime = T0) -> JobState:
    """Play the turns and compare each decision.

    A launch that was decided upon goes well, unless the next turn is about it.
    """
    for number, (make, expected) in enumerate(turns, start=1):
        event = make(job)
        if job.phase is Phase.LAUNCHING and not isinstance(
            event, LaunchFailed | LaunchRefused | NodesMissing | NodesAcquired | Launched
        ):
            job = relaunched(job, now)
        job, decision = step(job, event, now)
        assert describe(decision) == expected, f"turn {number}: {decision}"
    return job


def died(
    code: int = 1, node: str = "n2", rank: int = 3, **more: Any
) -> Callable[[JobState], Event]:
    """A rank has exited with a code that no table knows more about, and said nothing."""
    return lambda job: fault(job, exited(rank, node, code=code, **more))


def raised(
    message: str = "ValueError: bad batch", node: str = "n2", code: int = 1
) -> Callable[[JobState], Event]:
    return lambda job: fault(job, exited(3, node, code=code, error=error(message)))


def xid(number: int, text: str = "", *, gpu: str = "0000:05:00", uptime: float = 1234.0) -> str:
    """A line of the kernel log, as NVIDIA's driver writes it."""
    return f"[ {uptime:.6f}] NVRM: Xid (PCI:{gpu}): {number}, {text or 'pid=4711, name=python'}"


def sick(
    *lines: str, node: str = "n2", code: int = 1, rank: int = 3
) -> Callable[[JobState], Event]:
    """A rank has exited, and its node's kernel had something to say."""
    return lambda job: fault(job, exited(rank, node, code=code, kernel=lines))


def fallen(node: str = "n2") -> Callable[[JobState], Event]:
    """The node rebooted: no doing of a program."""
    return lambda job: FaultObserved(
        job.generation, (RanksVanished(node, T0, "the node rebooted", rebooted=True),), 0, T0
    )


def hung(
    *ranks: int, suspects: tuple[HungRank, ...] = (), is_cut_off: bool = False
) -> Callable[[JobState], Event]:
    return lambda job: RanksHung(
        job.generation,
        ranks or (0,),
        "step 7 has not changed for 1800 s",
        T0,
        suspects=suspects,
        is_cut_off=is_cut_off,
    )


def lose(node: str = "n2", seconds: float = 0.0) -> Callable[[JobState], Event]:
    return lambda job: NodeUnreachable(
        job.generation, node, timedelta(seconds=seconds), "no answer within 5 s"
    )


def back(node: str = "n2") -> Callable[[JobState], Event]:
    return lambda job: NodeReturned(job.generation, node)


def examine(**verdicts: str) -> Callable[[JobState], Event]:
    """`examine(n1="HEALTHY", n2="UNHEALTHY")`: the answer to an examination."""
    nodes = tuple(
        ExaminedNode(node, Verdict(verdict), f"dcgmi said so of {node}")
        for node, verdict in verdicts.items()
    )
    return lambda job: NodesExamined(job.generation, nodes)


def called(links: LinkFindings | None = None) -> Callable[[JobState], Event]:
    """The nodes have called each other; without findings, all were answered."""
    return lambda job: NodesExamined(
        job.generation, (), links=links or LinkFindings("n1, n2 reach each other")
    )


def mended(
    outcome: Literal["done", "refused", "ambiguous"] = "done", reason: str = "boot id b1 is b2"
) -> Callable[[JobState], Event]:
    """The repair that was ordered last has ended."""

    def make(job: JobState) -> Event:
        assert job.recovering is not None
        return RepairEnded(
            job.generation, job.tries[-1].strategy, job.recovering.fault.nodes, outcome, reason
        )

    return make


def this(event: Event) -> Callable[[JobState], Event]:
    """An event that is the same however the job has come on."""
    return lambda _: event


# --- single climbs: a ladder, a fault, no walk --------------------------------------------------


def rungs(*ladder: dict[str, Any], cause: str = "APPLICATION", **changes: Any) -> Policy:
    """The default policy with this one ladder, and room in all other budgets."""
    room = {"no_progress_stop": "off", "startup_stop": "off", "max_restarts": 100}
    return resolve({**room, "exhaust_restarts": False, "causes": {cause: list(ladder)}, **changes})


def suspected(
    cause: Cause = Cause.APPLICATION,
    *nodes: str,
    gpus: tuple[str, ...] = (),
    code: str = "exit 1",
    exit_code: int | None = 1,
) -> Diagnosis:
    return Diagnosis(cause, "boom", nodes=nodes, gpus=gpus, code=code, exit_code=exit_code)


def climbed(
    job: JobState, fault: Diagnosis, now: datetime = T0, without: tuple[str, ...] = ()
) -> tuple[JobState, Decision]:
    """Take the first rung for a fault as if just diagnosed, and write the decision down."""
    decision = climb(job, Recovery(fault), now, without)
    return apply_decision(replace(job, recovering=None), decision, now), decision
