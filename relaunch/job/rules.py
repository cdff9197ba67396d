"""The rules of a job's logic that 0.1.0 did not have.

The history of a running job may have decisions from before a rule: they are replayed without it.
Each rule has a patch of the workflow, recorded where it first made a difference.
"""

from __future__ import annotations

from enum import StrEnum

from relaunch.evidence.observations import RankExited
from relaunch.job.events import (
    DeadlinePassed,
    DrainRequested,
    Event,
    FaultObserved,
    LaunchFailed,
    LaunchRefused,
    NodeReturned,
    NodesAcquired,
    NodesMissing,
    NodeUnreachable,
    RanksHung,
    StepReached,
)
from relaunch.job.state import JobState, Phase


class Rule(StrEnum):
    """Its value is the name of the patch, which is never changed."""

    NODE_REFUSES = "a-node-refuses"
    """A node that refuses what has run before, or what other nodes accept, is at fault itself."""
    LOST_DEADLINE = "keep-the-deadline-of-lost-nodes"
    """A person is still asked about lost nodes when one of them has come back, or another one was
    lost, or ranks have failed."""
    OPEN_QUESTION = "an-open-question-stays"
    """What happens to ranks beside a lost node closes no question to a person that it would only
    ask again, and nothing that a person has taken over."""
    LATE_GRANT = "no-grant-after-a-question"
    """Nodes that are granted when a person is asked start no launch."""
    FEWER_GPUS = "a-node-with-fewer-gpus"
    """A GPU that is missing once the job has trained is missing from the node, not from what the
    user wrote."""
    EARLY_DRAIN = "drain-of-a-granted-node"
    """A request to leave a node counts before the job has taken the node in."""
    SAME_QUESTION = "a-reminder-asks-the-same"
    """A question about a lost node that is asked again stays that of the ladder which asked it."""
    BROKEN_BESIDE_LOST = "broken-beside-a-lost-node"
    """A node whose hardware is broken is left together with one that is lost."""


Rules = tuple[Rule, ...]
ALL_RULES: Rules = tuple(Rule)


REPORTS = (
    FaultObserved
    | RanksHung
    | NodeUnreachable
    | NodeReturned
    | StepReached
    | LaunchFailed
    | LaunchRefused
)
"""What ranks and nodes do, about one generation."""


NO_SUCH_GPU = ("invalid device ordinal", "cudaErrorInvalidDevice", "the device count")
"""What the row `device_count` of the catalog's log lines reads."""


def is_open_question(job: JobState, event: Event) -> bool:
    """Return whether an event reports what happened while the newest generation, of which a node is
    lost, has its ranks left alone because a person is asked."""
    return (
        isinstance(event, REPORTS)
        and event.generation == job.generation
        and job.phase is Phase.WAITING_FOR_PERSON
        and bool(job.lost)
        and job.launched_at is not None
    )


def may_lack_gpus(job: JobState, fault: FaultObserved) -> bool:
    """Return whether ranks of a job that has trained may miss a GPU now: a quick look, because a
    second diagnosis without the rule costs as much as the first."""
    return job.furthest_step is not None and any(
        words in line
        for one in fault.observations
        if isinstance(one, RankExited)
        for line in (*one.log_tail, *_list_errors(one))
        for words in NO_SUCH_GPU
    )


def _list_errors(exit_: RankExited) -> tuple[str, ...]:
    return () if exit_.error is None else (exit_.error.message, exit_.error.traceback or "")


def list_affected(job: JobState, event: Event) -> Rules:
    """Return the rules that may make a difference for an event, most often none."""
    is_asked = job.phase is Phase.WAITING_FOR_PERSON
    lost: Rules = (Rule.LOST_DEADLINE,) if job.lost else ()
    asked: Rules = (Rule.OPEN_QUESTION,) if is_asked else ()
    match event:
        case LaunchRefused():
            return (Rule.NODE_REFUSES, *lost, *asked)
        case NodeReturned() | StepReached() if job.lost:
            return (*lost, *asked)
        case DrainRequested():
            return (Rule.EARLY_DRAIN,)
        case NodesAcquired() | NodesMissing() if is_asked:
            return (Rule.LATE_GRANT,)
        case FaultObserved():
            missing = (Rule.FEWER_GPUS,) if may_lack_gpus(job, event) else ()
            broken = (Rule.BROKEN_BESIDE_LOST,) if job.lost else ()
            return (*missing, *broken, *lost, *asked)
        case RanksHung() | NodeUnreachable() | LaunchFailed():
            return (*lost, *asked)
        case DeadlinePassed() if is_asked and job.lost:
            return (Rule.SAME_QUESTION,)
        case _:
            return ()
