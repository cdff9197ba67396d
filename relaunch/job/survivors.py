"""Decide which ranks that outlive a fault of their gang are killed at once.

It refuses to guess: where it is not known that what they wait for never comes, they get the usual
time between SIGTERM and SIGKILL.
"""

from __future__ import annotations

from relaunch.evidence.causes import Cause
from relaunch.job.state import FaultRecord, JobState

SPARED_CAUSES = (Cause.HANG, Cause.PREEMPTED)
SPARED_CODES = ("SIGTERM", "exit 143")
"""Of a hang no rank is gone. A rank that SIGTERM ended may be one of many that were sent it,
because the machines are wanted back: the others may be saving what they have."""


def kills_survivors(job: JobState, up_to: int) -> bool:
    """Return whether ranks that may be alive are to be killed without `stop_grace`.

    Args:
        job: The state in which they are ordered to stop.
        up_to: The newest generation that is stopped.
    """
    when = job.policy.kill_survivors
    if when == "never" or job.spec.gang != "lockstep" or job.incident is None:
        return False
    if when == "checkpointed" and job.ledger.running.checkpoint_at is None:
        return False
    broken = {fault.generation for fault in job.incident.faults if _breaks_gang(fault)}
    newest = job.submission, up_to
    alive = [one for one in job.launched if (one.submission, one.generation) <= newest]
    return bool(alive) and all(
        one.submission == job.submission and one.generation in broken for one in alive
    )


def _breaks_gang(fault: FaultRecord) -> bool:
    """Return whether a rank of the gang is gone, so that its others never advance."""
    if fault.withdrawn or fault.cause in SPARED_CAUSES or fault.code in SPARED_CODES:
        return False
    return bool(fault.ranks) or fault.cause is Cause.NODE_LOST
