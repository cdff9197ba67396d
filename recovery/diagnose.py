"""From what was observed to its cause. What to do about it is `decide`'s."""

from __future__ import annotations

import signal as signals

from recovery.catalog import exit_meaning, is_cascade
from recovery.causes import Cause
from recovery.events import FaultObserved, LaunchFailed, LaunchRefused, Observation, RankExited, RanksFenced, RanksHung, RanksVanished
from recovery.fencing import fences
from recovery.model import Certainty, Diagnosis, JobState

DO_NOT_RESTART = 93
"""Exit code by which a rank refuses to be restarted (nvidia-resiliency-ext's default for the same)."""

REFUSAL_CAUSES = {
    "command_not_found": Cause.USER_INPUT,
    "workdir_missing": Cause.USER_INPUT,
    "cannot_start": Cause.USER_INPUT,
    "secret_missing": Cause.USER_INPUT,
    "stuck": Cause.NODE_FAULT,
}
"""What an agent's refusal says about the world; any other word is between the controller and the agent: PLATFORM."""

Fault = FaultObserved | RanksHung | LaunchFailed | LaunchRefused


def diagnose(job: JobState, fault: Fault) -> Diagnosis:
    """Name the root cause. Cascades never win; among roots the earliest does."""
    match fault:
        case LaunchFailed():
            return Diagnosis(Cause.NODE_LOST, fault.because, nodes=fault.unreachable)
        case LaunchRefused():
            return _of_refusal(fault)
        case RanksHung() | FaultObserved() if job.lost:
            silent = ", ".join(job.lost_names[:4]) + (f" and {len(job.lost) - 4} more" if len(job.lost) > 4 else "")
            then = fault.because if isinstance(fault, RanksHung) else _first_words(fault.observations)
            return Diagnosis(Cause.NODE_LOST, f"{silent}: no answer ({job.lost[0].because}); then {then}", nodes=job.lost_names)
        case RanksHung() if fault.silent and fences(job):
            # A gang that stands still while one of its nodes is silent waits for that node.
            nodes = tuple(node for node, _ in fault.silent)
            return Diagnosis(Cause.NODE_LOST, f"{', '.join(nodes[:4])}: no answer, and {fault.because}", nodes=nodes)
        case RanksHung():
            return Diagnosis(Cause.HANG, fault.because, ranks=fault.ranks)
        case FaultObserved():
            diagnosis = _of_observations(fault.observations, fault.more)
            if diagnosis.cause is Cause.NETWORK and fault.silent:
                nodes = tuple(node for node, _ in fault.silent)
                return Diagnosis(Cause.NODE_LOST, f"{', '.join(nodes[:4])}: no answer; {diagnosis.because}", nodes=nodes)
            return diagnosis


def is_root(observation: Observation) -> bool:
    """Whether this may be a cause, not the echo of one on another rank."""
    match observation:
        case RankExited():
            return observation.failed and not observation.stopped and not is_cascade(_last_words(observation))
        case RanksFenced():
            return observation.why != "superseded"
        case RanksVanished():
            return True


def _of_observations(observations: tuple[Observation, ...], more: int) -> Diagnosis:
    roots = sorted((o for o in observations if is_root(o)), key=lambda o: o.at)
    for observation in roots:
        if isinstance(observation, RanksVanished):
            return Diagnosis(
                Cause.NODE_FAULT, f"{observation.node}: {observation.because}", nodes=(observation.node,), certainty=Certainty.CERTAIN
            )
    for observation in roots:
        if isinstance(observation, RanksFenced):
            return Diagnosis(
                Cause.NODE_LOST,
                f"{observation.node} stopped its own ranks: {observation.because}",
                nodes=(observation.node,),
                certainty=Certainty.CERTAIN,
            )
    exits = [o for o in roots if isinstance(o, RankExited)]
    if not exits:
        return _of_cascades(observations)
    return _of_exit(_root_exit(exits), others=len(exits) - 1 + more)


def _root_exit(exits: list[RankExited]) -> RankExited:
    """The first that arrived; where that one wrote an error file, the one with the smallest timestamp in it (torchelastic's rule)."""
    first = exits[0]
    if first.error is None or first.error.timestamp is None:
        return first
    return min(
        (e for e in exits if e.error and e.error.timestamp is not None),
        key=lambda e: (e.error.timestamp if e.error and e.error.timestamp else 0.0, e.rank),
    )


def _of_exit(root: RankExited, others: int) -> Diagnosis:
    meaning = exit_meaning(root.exit_code, root.signal)
    if root.signal is not None:
        what = f"was killed by {signal_name(root.signal)}"
        exit_code = 128 + root.signal
    else:
        exit_code = root.exit_code if root.exit_code is not None else 1
        what = f"exited with code {exit_code}"
    if root.error:
        detail = root.error.message.splitlines()[0] if root.error.message else "an error without a message"
    elif meaning:
        detail = meaning.meaning
    elif root.error_unreadable:
        detail = f"its error file is unreadable: {root.error_unreadable}"
    else:
        detail = next((line for line in reversed(root.log_tail) if line.strip()), "it said nothing")
    cause = Cause(meaning.cause) if meaning else Cause.APPLICATION
    because = f"rank {root.rank} on {root.node} {what}: {detail[:300]}"
    if others > 0:
        because += f" ({others} more failed)"
    return Diagnosis(
        cause,
        because,
        nodes=(root.node,),
        ranks=(root.rank,),
        certainty=Certainty.CERTAIN if root.error else Certainty.LIKELY if cause is not Cause.UNKNOWN else Certainty.GUESS,
        exit_code=exit_code,
        do_not_restart=root.exit_code == DO_NOT_RESTART,
        traceback=root.error.traceback if root.error else "",
    )


def _of_cascades(observations: tuple[Observation, ...]) -> Diagnosis:
    """Only echoes: whatever broke the connections was seen by nobody."""
    failed = [o for o in observations if isinstance(o, RankExited) and o.failed and not o.stopped]
    if not failed:
        return Diagnosis(Cause.PLATFORM, _first_words(observations), certainty=Certainty.GUESS)
    first = min(failed, key=lambda o: o.at)
    return Diagnosis(
        Cause.NETWORK,
        f"rank {first.rank} on {first.node} lost a connection and no rank failed by itself: {(_last_words(first) or ('',))[-1][:200]}",
        nodes=tuple(dict.fromkeys(o.node for o in failed)),
        ranks=tuple(o.rank for o in failed),
        certainty=Certainty.GUESS,
        exit_code=first.exit_code,
        traceback=first.error.traceback if first.error else "",
    )


def _of_refusal(fault: LaunchRefused) -> Diagnosis:
    for refusal in fault.refusals:
        if cause := REFUSAL_CAUSES.get(refusal.why):
            code = 127 if refusal.why == "command_not_found" else 1
            return Diagnosis(
                cause, f"{refusal.node}: {refusal.because}", nodes=(refusal.node,), certainty=Certainty.CERTAIN, exit_code=code
            )
    first = fault.refusals[0]
    return Diagnosis(Cause.PLATFORM, f"{first.node} refused to launch: {first.because}", certainty=Certainty.CERTAIN)


def _last_words(observation: RankExited) -> tuple[str, ...]:
    """Where a rank says why it ends: its error's message, else the end of its log (the last line of a traceback)."""
    if observation.error:
        return (observation.error.message,)
    return tuple(line for line in observation.log_tail if line.strip())[-3:]


def _first_words(observations: tuple[Observation, ...]) -> str:
    if not observations:
        return "nothing was observed"
    first = min(observations, key=lambda o: o.at)
    match first:
        case RankExited():
            end = signal_name(first.signal) if first.signal is not None else f"code {first.exit_code}"
            return f"rank {first.rank} on {first.node} ended with {end}"
        case RanksFenced() | RanksVanished():
            return f"{first.node}: {first.because}"


def signal_name(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"
