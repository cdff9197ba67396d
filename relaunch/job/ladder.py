"""Choose the next rung of a ladder for a fault, count tries, and report the remaining budgets.

What a program does never costs a node: where all evidence of a fault is what the program did, a
rung that isolates, resets or reboots examines the suspects first, and does that only to those
found unhealthy. Otherwise it launches as it would have, and leaves the nodes alone. A rung with
`when` does as the policy says.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import assert_never

from relaunch.evidence.causes import HARDWARE_CAUSES, OWN_CAUSES, Cause
from relaunch.evidence.findings import Verdict
from relaunch.evidence.reachability import CUT_OFF
from relaunch.fields import duration
from relaunch.job.copies import replace
from relaunch.job.diagnose import UNPREPARED
from relaunch.job.resumes import (
    ask_about_checkpoint,
    ends_resumes,
    find_bad_checkpoint,
    may_be_node,
)
from relaunch.job.slow_nodes import SLOW_NODE
from relaunch.job.state import (
    Ask,
    Certainty,
    Decision,
    Diagnosis,
    Examine,
    JobState,
    Phase,
    Recovery,
    Relaunch,
    Repair,
    Slot,
    Stop,
    Try,
)
from relaunch.spec.policy import Rung, Strategy
from relaunch.text import count_noun, join_names

ANSWERS = "`answer` approve (a new launch), deny (the job ends), snooze or take-over"
NAMED = 4
"""Maximum number of nodes that a reason names: a gang may have thousands."""


def climb(job: JobState, recovering: Recovery, now: datetime, without: tuple[str, ...]) -> Decision:
    """Return the decision of the first rung of the ladder that applies and has a try left."""
    fault = _refine_fault(recovering)
    if fault.code == SLOW_NODE:
        return _settle_slow_node(job, fault, recovering, now, without)
    repeated = find_bad_checkpoint(job)
    if repeated is None or not ends_resumes(repeated, fault):
        return _climb(job, fault, recovering, now, without)
    is_unhealthy = recovering.verdict is Verdict.UNHEALTHY
    if may_be_node(job, repeated, fault) or is_unhealthy:
        decision = _climb(job, fault, recovering, now, without)
        if not isinstance(decision, Stop):
            return decision
    elif recovering.verdict is None and _may_be_corrupted(job, fault):
        return _examine(job, recovering.fault, now)
    if is_unhealthy:
        without = tuple(dict.fromkeys((*without, *fault.nodes)))
    return ask_about_checkpoint(job, repeated, fault, ANSWERS, without)


def _may_be_corrupted(job: JobState, fault: Diagnosis) -> bool:
    """Return whether a broken GPU may have computed a NaN, and no node of this incident was
    examined for that.

    An examination takes minutes and no person, and a question hours.
    """
    return (
        fault.cause is Cause.NUMERICS
        and any(Verdict.UNHEALTHY in rung.when for rung in job.policy.ladder(fault.cause))
        and not (
            job.incident is not None
            and any(one.decision == "Examine" for one in job.incident.decisions)
        )
    )


def _climb(
    job: JobState,
    fault: Diagnosis,
    recovering: Recovery,
    now: datetime,
    without: tuple[str, ...],
) -> Decision:
    if _must_check_foreign(job, fault, recovering):
        return _check_foreign(job, recovering.fault, now)
    if recovering.foreign:
        return _leave_used_gpus(job, fault, recovering, now, without)
    if fault.cause in OWN_CAUSES and (why := _explain_standstill(job)):
        return _fail(fault, why)
    if _must_check_links(job, fault, recovering):
        return _check_links(job, recovering.fault, now)
    if elsewhere := _find_same_elsewhere(job, fault):
        return _settle_same_elsewhere(job, fault, recovering, now, without, elsewhere)
    vain = launches_without_progress(job)
    has_too_many = job.policy.no_progress_ask != "off" and vain >= job.policy.no_progress_ask
    named = tuple(dict.fromkeys((*without, *fault.nodes)))
    asked = False
    for rung in job.policy.ladder(fault.cause):
        needs_proof = _needs_proof(rung, fault)
        asked = asked or needs_proof or bool(rung.when)
        if recovering.examined is not None and not asked:
            # Already skipped before the examination, whose new suspects may have other tries.
            continue
        if not _applies(job, rung, fault, recovering, without):
            continue
        used = tries_used(job, rung, fault, now)
        if rung.tries is not None and used >= rung.tries:
            continue
        if rung.when:
            if recovering.verdict is None:
                return _examine(job, recovering.fault, now)
            if recovering.verdict not in rung.when:
                continue
        is_unproven = needs_proof and recovering.verdict is None
        if has_too_many and not (is_unproven or _replaces_broken_node(rung, fault, recovering)):
            return _ask_for_progress(job, fault, vain, named)
        if rung.strategy is Strategy.FAIL:
            return _end(job, recovering, now, without, "has nothing left but to stop")
        if rung.strategy is Strategy.ASK:
            return Ask(
                f"{fault.reason}; the ladder of {fault.cause} ends with a person",
                question=f"{ANSWERS}, or on other terms: `retry --avoid NODE`?",
                without=named,
                ladder=fault.cause,
            )
        if rung.spends and job.restarts_spent >= job.policy.max_restarts:
            return _fail(fault, _describe_spent(job.policy.max_restarts))
        if is_unproven:
            return _examine(job, recovering.fault, now)
        if needs_proof and recovering.verdict is not Verdict.UNHEALTHY:
            return _relaunch(job, fault, rung, used, now, without, spares_nodes=True)
        if rung.strategy.repairs:
            return _repair(job, fault, rung, used, now)
        return _relaunch(job, fault, rung, used, now, without)
    if has_too_many:
        return _ask_for_progress(job, fault, vain, named)
    return _end(job, recovering, now, without, "is used up")


def _settle_slow_node(
    job: JobState, fault: Diagnosis, recovering: Recovery, now: datetime, without: tuple[str, ...]
) -> Decision:
    """Examine a slow node; replace it if that finds it unhealthy, or the policy says so.

    Only an unhealthy one is isolated. No ladder ends for a slow node.
    """
    if recovering.verdict is None:
        return _examine(job, fault, now)
    strategy, is_broken = Strategy.RESTART_IN_PLACE, recovering.verdict is Verdict.UNHEALTHY
    if is_broken or job.policy.stragglers.action == "replace":
        strategy = Strategy.REPLACE_NODE
    rung = Rung(strategy=strategy, isolate=is_broken, spends=False)
    decision = _relaunch(job, fault, rung, 0, now, without)
    # Under its own name, so that it is no try of a ladder.
    return replace(decision, take=replace(_take(fault, rung, now), rung=SLOW_NODE))


def _explain_standstill(job: JobState) -> str:
    """Return why launching again after a fault of the job is useless; empty: it may help."""
    flat, same = job.flat_generations, job.startup_failures
    # It may be one node, on which a file system is not mounted, or that came later, with another
    # image, to a job that has advanced: the ladder tries one without it first. That all faults name
    # the only node of a job says nothing.
    may_be_node = job.progressed_at is not None or (bool(job.startup_nodes) and len(job.slots) > 1)
    if (limit := job.policy.startup_stop) != "off" and same >= limit + may_be_node:
        return (
            f"{count_noun(same, 'launch', 'launches')} in a row ended at once with the same error"
        )
    if (limit := job.policy.no_progress_stop) != "off" and flat >= limit:
        generations = f"{count_noun(flat, 'generation')} in a row"
        if job.furthest_step is None:
            return f"{generations} ended like the one before, and no step was ever reported"
        if job.counter_restarts:
            healthy = duration(job.policy.healthy_for)
            return f"{generations} ended like the one before, none after {healthy} without a fault"
        return f"{generations} ended without passing step {job.furthest_step}"
    return ""


def _must_check_links(job: JobState, fault: Diagnosis, recovering: Recovery) -> bool:
    """Return whether a link between two nodes may be the cause, and is looked for first.

    Not before the first restart of an incident: most such faults are over by then, and it is to be
    fast. But a hang in which a connection is silent has lasted for minutes, and an examination of
    the node that its ranks' connections name would not see the network between nodes.
    """
    is_cut_off = False
    match fault.cause:
        case Cause.HANG:
            is_cut_off = fault.code == CUT_OFF
            is_named = bool(fault.nodes) and not is_cut_off
        case Cause.NETWORK:
            # A lost connection is seen by ranks on healthy nodes, too, so their words name no node.
            is_named = not fault.by_program
        case _:
            return False
    return (
        job.policy.check_links
        and not is_named
        and not recovering.links
        and not job.lost
        and len(job.slots) > 1
        and job.incident is not None
        and (is_cut_off or any(one.decision == "Relaunch" for one in job.incident.decisions))
    )


LINKS_TIMEOUT = timedelta(minutes=5)
"""How long the nodes may take to stop their ranks and to call each other."""


def _check_links(job: JobState, fault: Diagnosis, now: datetime) -> Examine:
    nodes = tuple(slot.node for slot in job.slots)
    names = join_names(nodes, NAMED)
    return Examine(
        nodes=nodes,
        fault=fault,
        reason=f"{fault.reason}; before another restart {names} call each other",
        next=f"{names} call each other over the job's network; without an answer after "
        f"{duration(LINKS_TIMEOUT)} the ladder of {fault.cause} goes on",
        until=now + LINKS_TIMEOUT,
        links=True,
    )


GPU_MEMORY_CODES = ("log cuda_oom", "log nccl_oom")
"""Codes of OUT_OF_MEMORY that are about a GPU, and not about the host."""
FOREIGN_TIMEOUT = timedelta(minutes=2)
"""How long a node may take to stop its ranks and to read its GPUs: a driver that hangs is abandoned
after ten seconds."""
FOREIGN_DELAY = timedelta(seconds=10)
"""How long a launch that leaves used GPUs waits. The fleet's last reading of them may be older than
the foreign process; after this time it counts no more (`PROBE_LIFETIME`)."""
MAX_FOREIGN_DELAY = timedelta(minutes=5)
"""Most of that delay, which doubles: a fleet that reads no GPUs (`gpus: 0`) grants them again."""
FOREIGN_PROCESS = "foreign process"
"""Recorded in place of a rung's label, so that it is no try of a ladder."""


def _must_check_foreign(job: JobState, fault: Diagnosis, recovering: Recovery) -> bool:
    """Return whether a GPU's memory ran out, and it is not known yet whether others hold it."""
    return (
        job.policy.check_foreign_processes
        and fault.cause is Cause.OUT_OF_MEMORY
        and fault.code in GPU_MEMORY_CODES
        and not recovering.foreign_check
        and bool(_select_slots(job, fault))
    )


def _select_slots(job: JobState, fault: Diagnosis) -> tuple[Slot, ...]:
    """Return the places of a fault's nodes that are not lost."""
    lost = job.lost_names
    return tuple(one for one in job.slots if one.node in fault.nodes and one.node not in lost)


def _check_foreign(job: JobState, fault: Diagnosis, now: datetime) -> Examine:
    nodes = tuple(slot.node for slot in _select_slots(job, fault))
    names = join_names(nodes, NAMED)
    return Examine(
        nodes=nodes,
        fault=fault,
        reason=f"{fault.reason}; before a restart {names} says who uses its GPUs",
        next=f"{names} is asked for foreign processes on the job's GPUs; without an answer after "
        f"{duration(FOREIGN_TIMEOUT)} the ladder of {fault.cause} goes on",
        until=now + FOREIGN_TIMEOUT,
        foreign_processes=True,
    )


def _leave_used_gpus(
    job: JobState, fault: Diagnosis, recovering: Recovery, now: datetime, without: tuple[str, ...]
) -> Decision:
    """Launch without the GPUs that foreign processes use, as soon as the fleet has others.

    That spends nothing, but counts as a launch without progress: a person is asked in the end.
    """
    nodes = tuple(one.node for one in recovering.foreign)
    without = tuple(dict.fromkeys((*without, *nodes)))
    vain = launches_without_progress(job)
    if job.policy.no_progress_ask != "off" and vain >= job.policy.no_progress_ask:
        return _ask_for_progress(job, fault, vain, without)
    rung = Rung(strategy=Strategy.REPLACE_NODE, spends=False)
    names = join_names(nodes, NAMED)
    return Relaunch(
        job.generation + 1,
        f"{fault.reason}; {rung.strategy}: the job is launched on other nodes than {names}, or "
        "once those GPUs are free",
        strategy=rung.strategy,
        take=replace(_take(fault, rung, now), rung=FOREIGN_PROCESS),
        left=_describe_restarts(job, spends=False),
        without=without,
        delay=min(FOREIGN_DELAY * 2 ** min(_count_left_gpus(job), 10), MAX_FOREIGN_DELAY),
    )


def _count_left_gpus(job: JobState) -> int:
    """Return how often in a row the job has left used GPUs since training last advanced."""
    since, count = job.progressed_at, 0
    for one in reversed(job.tries):
        if one.rung != FOREIGN_PROCESS or (since is not None and one.at < since):
            break
        count += 1
    return count


def _needs_proof(rung: Rung, fault: Diagnosis) -> bool:
    """Return whether a rung would cost a node that nothing but the program accuses."""
    costs_node = rung.isolate or rung.strategy.repairs
    return costs_node and not rung.when and fault.by_program and bool(fault.nodes)


def _find_same_elsewhere(job: JobState, fault: Diagnosis) -> tuple[str, ...]:
    """Return nodes that the job left because of this same fault, and that were not found unhealthy.

    Only for faults of nodes of which nothing but the program tells. A container or an environment
    that hides the GPUs says on every node what a broken driver says on one.
    """
    if not (fault.by_program and fault.nodes and fault.cause in HARDWARE_CAUSES):
        return ()
    begins = (job.progressed_at, job.renewed_at, job.approved_at)
    since = max((at for at in begins if at is not None), default=None)
    isolated = {one.node for one in job.avoided}
    left = (
        one.nodes
        for one in job.tries
        if one.strategy is Strategy.REPLACE_NODE
        and (one.cause, one.code) == (fault.cause, fault.code)
        and (since is None or one.at >= since)
        and not isolated & {*one.nodes}
    )
    return next((nodes for nodes in left if nodes and not {*nodes} & {*fault.nodes}), ())


def _settle_same_elsewhere(
    job: JobState,
    fault: Diagnosis,
    recovering: Recovery,
    now: datetime,
    without: tuple[str, ...],
    elsewhere: tuple[str, ...],
) -> Decision:
    """Examine the second node with the same fault; ask, unless that finds it unhealthy."""
    if recovering.verdict is None:
        return _examine(job, recovering.fault, now)
    if recovering.verdict is Verdict.UNHEALTHY:
        rung = Rung(strategy=Strategy.REPLACE_NODE, isolate=True)
        return _relaunch(job, fault, rung, 0, now, without)
    return Ask(
        f"{fault.reason}; the same as on {join_names(elsewhere, NAMED)}, which was not found "
        "unhealthy either: it probably comes with the job, as from its environment, its container "
        "or its libraries",
        question=f"{ANSWERS}, or with another command: `cancel`, then `submit`?",
        without=without,
        ladder=fault.cause,
    )


def _end(
    job: JobState, recovering: Recovery, now: datetime, without: tuple[str, ...], why: str
) -> Decision:
    """End the job, unless a person gave it restarts that are to be spent first.

    They are not spent on a node that the examination found unhealthy.
    """
    fault = _refine_fault(recovering)
    why = f"the ladder of {fault.cause} {why}"
    limit, spent = job.policy.max_restarts, job.restarts_spent
    if not job.policy.exhaust_restarts or fault.cause not in RESTARTABLE:
        return _fail(fault, why)
    if spent >= limit:
        return _fail(fault, f"{why}, and {_describe_spent(limit)}")
    rung = Rung(strategy=Strategy.RESTART_IN_PLACE, tries=None)
    if recovering.verdict is Verdict.UNHEALTHY:
        rung = Rung(strategy=Strategy.REPLACE_NODE, tries=None, isolate=True)
    broken = fault.nodes if rung.isolate else ()
    return Relaunch(
        job.generation + 1,
        f"{fault.reason}; {why}; {rung.strategy}, {spent + 1} of {count_noun(limit, 'restart')}",
        strategy=rung.strategy,
        take=replace(_take(fault, rung, now), rung=STATED),
        left=f"{limit - spent - 1} of {count_noun(limit, 'restart')}",
        without=tuple(dict.fromkeys((*without, *broken))),
        avoid=broken,
    )


RESTARTABLE = tuple(cause for cause in OWN_CAUSES if cause is not Cause.USER_INPUT)
"""Causes for which restarts that a person gave are spent: wrong input stays wrong."""
STATED = "max_restarts"
"""Recorded in place of a rung's label for a restart that a person gave, after the ladder."""


def _describe_spent(limit: int) -> str:
    return "the only restart is spent" if limit == 1 else f"all {limit} restarts are spent"


def _replaces_broken_node(rung: Rung, fault: Diagnosis, recovering: Recovery) -> bool:
    """Return whether the rung treats a node that is proven broken: that needs no person, however
    often the job was launched. The rung's own tries and the fleet's breaker limit it."""
    if not (rung.strategy.repairs or rung.strategy in (Strategy.REPLACE_NODE, Strategy.SHRINK)):
        return False
    return recovering.verdict is Verdict.UNHEALTHY or (
        fault.certainty is Certainty.CERTAIN and fault.cause in (*HARDWARE_CAUSES, Cause.NODE_LOST)
    )


def _ask_for_progress(job: JobState, fault: Diagnosis, vain: int, named: tuple[str, ...]) -> Ask:
    return Ask(
        f"{fault.reason}; {count_noun(vain, 'launch', 'launches')} in a row, and training has "
        f"not got past {_describe_furthest(job)}",
        question=f"{ANSWERS}, or on other terms: `retry --renew-budgets`, `retry --avoid NODE`?",
        without=named,
    )


def launches_without_progress(job: JobState) -> int:
    """Return the number of tries since training last made progress, the budgets were renewed, or a
    person approved a launch.

    Restarts that a person gave are not counted: they are to be spent.
    """
    begins = (job.progressed_at, job.renewed_at, job.approved_at)
    since = max((at for at in begins if at is not None), default=None)
    return sum(
        1
        for one in job.tries
        if (since is None or one.at >= since) and not (one.spent and job.policy.exhaust_restarts)
    )


def _describe_furthest(job: JobState) -> str:
    return "its start" if job.furthest_step is None else f"step {job.furthest_step}"


def tries_used(job: JobState, rung: Rung, fault: Diagnosis, now: datetime) -> int:
    """Return how many earlier tries count against this rung for this fault.

    Where progress renews budgets, time alone does not: a try leaves its window only once training
    has advanced since. Else three tries an hour would never be used up by a job that needs half an
    hour to fail.
    """
    tries = _row(job, rung, fault) if rung.consecutive else job.tries
    if (renewed := job.ladders_renewed.get(fault.cause)) is not None:
        tries = tuple(one for one in tries if one.at >= renewed)
    if rung.window is not None:
        tries = tuple(
            one for one in tries if one.at > now - rung.window or _is_without_progress(job, one)
        )
    elif job.renewed_at is not None:
        # Progress and the next fault often come in one report, and so have the same time: a try at
        # that time comes after the renewal.
        tries = tuple(one for one in tries if one.at >= job.renewed_at)
    return sum(1 for one in tries if one.rung == rung.label and _same(one, fault, rung))


def _is_without_progress(job: JobState, one: Try) -> bool:
    """Return whether training has not advanced since a try, and that is what renews budgets."""
    return job.policy.renewal == "progress" and (job.renewed_at is None or one.at >= job.renewed_at)


def _row(job: JobState, rung: Rung, fault: Diagnosis) -> tuple[Try, ...]:
    """Return the newest consecutive tries, back to the last reset."""
    begins = 0
    for index, one in enumerate(job.tries):
        if one.cause in rung.reset_by if rung.reset_by else one.cause is not fault.cause:
            begins = index + 1
    progress = not rung.reset_by or "PROGRESS" in rung.reset_by
    since = job.progressed_at if progress else None
    return tuple(one for one in job.tries[begins:] if since is None or one.at >= since)


def _same(one: Try, fault: Diagnosis, rung: Rung) -> bool:
    for key in rung.key:
        match key:
            case "job":
                continue
            case "cause":
                agrees = one.cause is fault.cause
            case "node":
                agrees = _overlap(one.nodes, fault.nodes)
            case "gpu":
                agrees = _overlap(one.gpus, fault.gpus)
            case "code":
                agrees = one.code == fault.code
            case _:
                assert_never(key)
        if not agrees:
            return False
    return True


def _overlap(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Return whether two lists of suspects share one, or are equal (for example both empty).

    Faults that cannot be told apart are counted together.
    """
    return bool(set(one) & set(other)) or one == other


def remaining_slots(job: JobState, without: tuple[str, ...]) -> tuple[Slot, ...]:
    """Return the slots with which the job could continue if it did not use these nodes."""
    excluded = {
        *without,
        *(one.node for one in job.drains if not one.denied),
        *(one.node for one in job.avoided),
    }
    return tuple(slot for slot in job.slots if slot.node not in excluded)


def explain_shrink(job: JobState, left: tuple[Slot, ...]) -> str:
    names = {slot.node for slot in left}
    dropped = tuple(slot.node for slot in job.slots if slot.node not in names)
    named = join_names(dropped, NAMED)
    wanted = count_noun(job.spec.node_count, "node")
    return f"{len(left)} of {wanted}: {Strategy.SHRINK} left {named}"


def _applies(
    job: JobState, rung: Rung, fault: Diagnosis, recovering: Recovery, without: tuple[str, ...]
) -> bool:
    if rung.label in recovering.failed:
        return False
    if rung.strategy is Strategy.SHRINK and len(job.slots) <= job.spec.fewest_nodes:
        return False
    if rung.codes and not {fault.code, f"exit {fault.exit_code}"} & set(rung.codes):
        return False
    if rung.when and recovering.examined is None:
        return True  # without a suspect, an examination may find one
    if rung.strategy.repairs:
        return bool(fault.nodes)
    if rung.strategy is Strategy.SHRINK:
        suspects = (*without, *fault.nodes)
        named = any(slot.node in suspects for slot in job.slots)
        return named and len(remaining_slots(job, suspects)) >= job.spec.fewest_nodes
    return rung.strategy is not Strategy.REPLACE_NODE or bool(fault.nodes or without)


def _refine_fault(recovering: Recovery) -> Diagnosis:
    """Return the fault after the examination: its suspects are the unhealthy nodes, if any."""
    fault, examined = recovering.fault, recovering.examined
    if examined is None:
        return fault
    unhealthy = tuple(one for one in examined if one.verdict is Verdict.UNHEALTHY)
    shown = next(
        iter(
            unhealthy
            or tuple(one for one in examined if one.verdict is Verdict.UNKNOWN)
            or examined
        ),
        None,
    )
    if shown is None:
        return fault
    clause = f"{shown.node} examined: {shown.verdict}, {shown.reason}"
    reason = fault.reason if clause in fault.reason else f"{fault.reason}; {clause}"
    if not unhealthy:
        return replace(fault, reason=reason)
    nodes = tuple(one.node for one in unhealthy)
    # The GPUs of the fault are on its first suspect, and not valid for another node.
    return replace(
        fault, reason=reason, nodes=nodes, gpus=fault.gpus if fault.nodes[:1] == nodes[:1] else ()
    )


def _examine(job: JobState, fault: Diagnosis, now: datetime) -> Examine:
    nodes = fault.nodes or tuple(slot.node for slot in job.slots)
    limit = job.policy.timeouts.examination
    return Examine(
        nodes=nodes,
        fault=fault,
        reason=f"{fault.reason}; what next depends on {join_names(nodes, NAMED)}",
        next=f"{join_names(nodes, NAMED)} examined; "
        f"without a verdict after {duration(limit)} it counts as UNKNOWN",
        until=now + limit,
    )


def _repair(job: JobState, fault: Diagnosis, rung: Rung, used: int, now: datetime) -> Repair:
    limit = job.policy.timeouts.reboot
    return Repair(
        strategy=rung.strategy,
        nodes=fault.nodes,
        gpus=fault.gpus if rung.strategy is Strategy.RESET_GPU else (),
        fault=fault,
        reason=_reason(fault, rung, used),
        take=_take(fault, rung, now),
        left=_describe_budgets(job, fault, rung, used),
        until=now + limit,
    )


def _relaunch(
    job: JobState,
    fault: Diagnosis,
    rung: Rung,
    used: int,
    now: datetime,
    without: tuple[str, ...],
    *,
    spares_nodes: bool = False,
) -> Relaunch:
    take = _take(fault, rung, now)
    left = _describe_budgets(job, fault, rung, used)
    if spares_nodes:
        spared = f"not {'isolated' if rung.isolate else 'touched'}, only the program accuses it"
        kind = Strategy.RESTART_IN_PLACE if rung.strategy.repairs else rung.strategy
        rung = rung.model_copy(update={"strategy": kind, "isolate": False})
        take = replace(take, strategy=kind)
    reason = _reason(fault, rung, used)
    if spares_nodes:
        reason += f"; {join_names(fault.nodes, NAMED)} is {spared}"
    if rung.isolate or rung.strategy in (Strategy.REPLACE_NODE, Strategy.SHRINK):
        without = tuple(dict.fromkeys((*without, *fault.nodes)))
    if rung.strategy is Strategy.SHRINK:
        wanted = count_noun(job.spec.node_count, "node")
        reason += f", to {len(remaining_slots(job, without))} of {wanted}"
    return Relaunch(
        job.generation + 1,
        reason,
        strategy=rung.strategy,
        take=take,
        left=left,
        without=without,
        avoid=fault.nodes if rung.isolate else (),
        keep_nodes=rung.strategy is not Strategy.RESCHEDULE_JOB,
        delay=max(rung.delay_of(used), _delay_unprepared(fault, used)),
    )


UNPREPARED_DELAY = timedelta(seconds=10)
"""How long a launch waits after a node has refused what it may not have yet, such as a mount. It is
tripled with each try of a rung."""
MAX_UNPREPARED_DELAY = timedelta(minutes=5)


def _delay_unprepared(fault: Diagnosis, used: int) -> timedelta:
    if fault.cause is not Cause.NODE_FAULT or fault.code not in UNPREPARED:
        return timedelta(0)
    delay: timedelta = UNPREPARED_DELAY * 3 ** min(used, 10)
    return min(delay, MAX_UNPREPARED_DELAY)


def _take(fault: Diagnosis, rung: Rung, now: datetime) -> Try:
    nodes, gpus = fault.nodes[:SUSPECTS_KEPT], fault.gpus[:SUSPECTS_KEPT]
    return Try(now, fault.cause, rung.strategy, rung.label, rung.spends, nodes, gpus, fault.code)


SUSPECTS_KEPT = 4
"""Maximum number of suspects kept in a try.

A job keeps up to 200 tries, and the failure of a whole rack is one fault, not a budget for each of
its nodes.
"""


def _reason(fault: Diagnosis, rung: Rung, used: int) -> str:
    of = f" of {rung.tries}" if rung.tries is not None else ""
    return f"{fault.reason}; {rung.strategy} {used + 1}{of} for {fault.cause}"


def _describe_budgets(job: JobState, fault: Diagnosis, rung: Rung, used: int) -> str:
    """Return what remains of the rung's tries and the job's restarts after this try."""
    parts = []
    if rung.tries is not None:
        window = f" within {duration(rung.window)}" if rung.window is not None else ""
        parts.append(f"{rung.tries - used - 1} {rung.label} for {fault.cause}{window}")
    parts.append(_describe_restarts(job, spends=rung.spends))
    return ", ".join(parts)


def _describe_restarts(job: JobState, *, spends: bool) -> str:
    most = job.policy.max_restarts
    return f"{most - job.restarts_spent - spends} of {count_noun(most, 'restart')}"


@dataclass(frozen=True, slots=True)
class UsedBudget:
    """How many tries of a rung were used, for one value of the rung's key."""

    cause: Cause
    rung: Rung
    used: int
    where: str
    """The node, GPU and code that it counts for, as far as the rung's key has them; else empty."""


def list_used_budgets(job: JobState, now: datetime) -> tuple[UsedBudget, ...]:
    """Return every rung with used tries, in the order of causes and rungs."""
    found: dict[tuple[object, ...], UsedBudget] = {}
    rungs = [
        (cause, rung)
        for cause, ladder in sorted(job.policy.causes.items())
        for rung in ladder
        if not rung.strategy.ends
    ]
    for cause, rung in rungs:
        for one in job.tries:
            if one.rung != rung.label or job.policy.ladder(one.cause) is not job.policy.ladder(
                cause
            ):
                continue
            fault = Diagnosis(one.cause, "", nodes=one.nodes, gpus=one.gpus, code=one.code)
            parts = {"node": ", ".join(one.nodes), "gpu": ", ".join(one.gpus), "code": one.code}
            where = " ".join(
                parts[key] for key in ("node", "gpu", "code") if key in rung.key and parts[key]
            )
            used = tries_used(job, rung, fault, now)
            if used:
                found[one.cause, rung.label, where] = UsedBudget(one.cause, rung, used, where)
    return tuple(found.values())


def _fail(fault: Diagnosis, why: str) -> Stop:
    return Stop(Phase.FAILED, f"{fault.reason}; {why}", exit_code=fault.exit_code or 1)
