"""Recognise a bad checkpoint: resumed generations that end with the same error at the same step.

What a program prints does not prove that, so a person is asked. No decision about a checkpoint is
taken here: relaunch neither chooses nor removes one.
"""

from __future__ import annotations

from relaunch.evidence.causes import Cause
from relaunch.job.copies import replace
from relaunch.job.state import Ask, Diagnosis, FailedResume, JobState
from relaunch.text import count_noun, mask_numbers

CHECKPOINT_CAUSES = (Cause.APPLICATION, Cause.NUMERICS, Cause.UNKNOWN)
"""Causes that a bad checkpoint may have: it cannot be read, does not fit, or holds NaN.

Memory that runs out, a hang or an error of a GPU may repeat as well, and says nothing about the
checkpoint. Nor does a kill: what is UNKNOWN counts only if the program exited by itself.
"""
SIGNALLED = 128
"""Exit codes from here on stand for signals, as in a shell."""
CHECKPOINT_CODES = ("log ckpt_torn", "log ckpt_mismatch")
"""Codes of errors that name a checkpoint: another node would not read it better."""
MAX_ERROR = 200
"""Characters kept of an error, to compare it with the next one."""


def identify_error(diagnosis: Diagnosis) -> str:
    """Return what is the same in two faults of one error; empty: the program named none."""
    return mask_numbers(diagnosis.error)[:MAX_ERROR]


def count_failed_resume(job: JobState, diagnosis: Diagnosis) -> JobState:
    """Record whether a fault ended its generation as the program's error before it did.

    Other faults, such as a lost node, neither count nor begin the count again, unless training got
    further before them.
    """
    known = job.failed_resume
    step = job.progress.step if job.progress is not None else None
    error = identify_error(diagnosis)
    is_kill = diagnosis.cause is Cause.UNKNOWN and (diagnosis.exit_code or SIGNALLED) >= SIGNALLED
    if diagnosis.cause not in CHECKPOINT_CAUSES or is_kill or not error:
        if known is None or step is None or (known.step is not None and step <= known.step):
            return job
        return replace(job, failed_resume=None)
    # A counter that starts again in each epoch does not say where training is.
    has_advanced = step is not None and (
        job.furthest_step is None or step > job.furthest_step or job.counter_restarts
    )
    count = int(job.furthest_step is not None and not has_advanced)
    nodes = diagnosis.nodes
    if known is not None and (known.cause, known.error, known.step) == (
        diagnosis.cause,
        error,
        step,
    ):
        count = known.count + 1 if known.count else 0
        nodes = tuple(node for node in known.nodes if node in nodes)
    found = FailedResume(diagnosis.cause, error, step, count, nodes)
    return replace(job, failed_resume=found)


def raise_failed_step(job: JobState, step: int) -> JobState:
    """Record the last step of ranks that have ended, which their watch may not have known.

    If that is further than any earlier generation had come, the program failed after it had
    resumed well.
    """
    known = job.failed_resume
    if known is None or (job.furthest_step is not None and step <= job.furthest_step):
        return job
    return replace(job, failed_resume=replace(known, step=step, count=0))


def find_bad_checkpoint(job: JobState) -> FailedResume | None:
    """Return the error by which the policy takes the checkpoint for bad; None: there is none."""
    known, limit = job.failed_resume, job.policy.bad_checkpoint_ask
    return known if known is not None and limit != "off" and known.count >= limit else None


def ends_resumes(known: FailedResume, fault: Diagnosis) -> bool:
    """Return whether a fault is that error again."""
    return fault.cause is known.cause and identify_error(fault) == known.error


def may_be_node(job: JobState, known: FailedResume, fault: Diagnosis) -> bool:
    """Return whether another node may help: each time the same one of several was named.

    A file system may not be mounted on it, or it has another image.
    """
    return len(job.slots) > 1 and bool(known.nodes) and fault.code not in CHECKPOINT_CODES


def ask_about_checkpoint(
    job: JobState, known: FailedResume, fault: Diagnosis, answers: str, without: tuple[str, ...]
) -> Ask:
    """Return the question to a person.

    Args:
        job: The job.
        known: The error that repeats.
        fault: Its newest fault.
        answers: A clause with the answers that are possible.
        without: Nodes that an approved launch does not use. Those of the fault are not among them:
            they only read what others cannot read either.
    """
    where = "before any step" if known.step is None else f"at step {known.step}"
    saved = job.ledger.newest_checkpoint
    place = job.spec.checkpoint.directory if job.spec.checkpoint is not None else ""
    which = f" (step {saved})" if saved is not None else ""
    if place:
        which += f" in {place}, which `show` lists"
    return Ask(
        f"{fault.reason}; {count_noun(known.count, 'resumed generation')} in a row ended with this "
        f"error {where}, so the checkpoint is probably bad",
        question=f"rename or remove the newest checkpoint{which}, so that the program resumes from "
        f"an earlier one, then {answers}?",
        without=without,
    )
