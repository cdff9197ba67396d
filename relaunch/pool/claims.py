"""Update the fleet's state from claims: records, freed nodes, evidence against nodes. Grants
nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from relaunch.access.orders import PersonOrder, check_order
from relaunch.evidence.causes import Cause
from relaunch.evidence.fields import text
from relaunch.generation import LaunchedGeneration
from relaunch.pool.events import ReclaimResult
from relaunch.pool.messages import Claim, FaultReport, Place, Suspect
from relaunch.pool.state import (
    BehindClaim,
    ClaimRecord,
    FleetState,
    LastClaim,
    LiveGeneration,
    Mark,
    NodeProbe,
    NodeRecord,
    NodeStatus,
)
from relaunch.pool.status import set_status

RELAUNCH = "relaunch"
"""The `by` of what no job and no person has said alone."""
MAX_MARKS = 20
"""Per node. Jobs repeat their newest suspects with each claim; more marks than these change
nothing."""
MAX_LAST_CLAIMS = 256
"""Jobs remembered after they gave back everything. Late messages are late by seconds, not by
hundreds of jobs."""
SUSPECT_JOBS, SUSPECT_WINDOW = 3, timedelta(hours=24)
"""How many jobs must fail on a node, within which time, before it becomes a suspect. One failed job
proves nothing against a node, and two may be two mistakes of one person."""
BEFORE_CLEARING = "it is from before the node was found healthy or released"
"""Why a mark that a job repeats counts no more."""
FOLLOWING_CAUSES = (
    Cause.APPLICATION,
    Cause.NUMERICS,
    Cause.OUT_OF_MEMORY,
    Cause.UNKNOWN,
    Cause.HANG,
)
"""Causes for which a mark is retracted when the same fault recurs with the same job on another
node: it was not the first node's."""


def record_claim(state: FleetState, claim: Claim, now: datetime) -> FleetState:
    known = next((record for record in state.claims if record.claim.job == claim.job), None)
    if known is None:
        newest = next(
            ((one.submission, one.seq) for one in state.last_claims if one.job == claim.job), None
        )
    else:
        newest = known.claim.submission, known.claim.seq
    if newest is not None and (claim.submission, claim.seq) <= newest:
        is_closed = known is None or known.is_closed
        if (claim.submission, claim.seq) == newest and (claim.nodes <= 0 or not is_closed):
            # Sent twice.
            if known is None or known.answer is None:
                return state
            return _put_claim(state, replace(known, is_answer_sent=False))
        # Either a late message: who sent it has sent another one since, or has ended, and ignores
        # the answer. Or the server's clock was set back between two submissions, which are numbered
        # by it. Or the job's workflow was reset, and does not know what it did since. The last two
        # have to take a higher submission: nodes obey only that.
        behind = BehindClaim(claim.job, claim.submission, claim.seq, newest[0])
        others = tuple(one for one in state.behind if one.job != claim.job)
        return replace(state, behind=(*others, behind))
    state = record_faults(state, FaultReport(claim.job, claim.submission, claim.suspects), now)
    state = _repeat_drains(state, claim) if claim.is_current else state
    if state.awaited_jobs is not None:
        state = replace(
            state, awaited_jobs=tuple(job for job in state.awaited_jobs if job != claim.job)
        )
    record = _check_submitter(state, _make_record(claim, known, now), known)
    if known is not None and known.old_logins:
        older = {place.node for place in (*record.inherited, *claim.holds)}
        record = replace(
            record,
            old_logins={node: login for node, login in known.old_logins.items() if node in older},
        )
    if known is not None and (
        left := {place.node for place in _list_known_places(claim, known)}
        - {place.node for place in record.places}
    ):
        # The job has stopped the ranks of earlier submissions there. The next probe shows its own
        # ranks.
        state = _forget_ranks(
            state, ReclaimResult(claim.job, claim.submission - 1, tuple(sorted(left)))
        )
    if claim.nodes <= 0 and not record.places:
        return remove_claim(state, record, now)
    return _put_claim(state, record)


def _repeat_drains(state: FleetState, claim: Claim) -> FleetState:
    """Have the job asked again to leave a node that it goes on with and does not know is wanted.

    The request came to it before it had the node.
    """
    unknown = frozenset(claim.keep) - frozenset(claim.stays)
    nodes = tuple(
        replace(node, asked_jobs=tuple(job for job in node.asked_jobs if job != claim.job))
        if node.name in unknown and claim.job in node.asked_jobs
        else node
        for node in state.nodes
    )
    return replace(state, nodes=nodes) if nodes != state.nodes else state


def _check_submitter(
    state: FleetState, record: ClaimRecord, known: ClaimRecord | None
) -> ClaimRecord:
    """Note whether the submitter of a job may submit to this fleet.

    A job that has been launched is not checked again: rules that have changed since must not end
    it with its next fault. That it has been is noted, because a job that had to yield its nodes
    queues like a new one, and one of release 0.1.0 does not say so itself.
    """
    claim = record.claim
    before = known if known is not None and known.key == record.key else None
    has_run = _says_it_has_run(claim) or (before is not None and _says_it_has_run(before.claim))
    record = replace(record, claim=replace(claim, submitted_by="", signed=None, has_run=has_run))
    if state.access is None or claim.nodes <= 0 or has_run:
        return record
    if before is not None and before.submitter and not before.refusal:
        return replace(record, submitter=before.submitter)
    # A submission is numbered by the milliseconds at which the server has started its workflow.
    # The same one may be claimed for hours, so its signature is not noted as used.
    started = datetime.fromtimestamp(claim.submission / 1000, UTC)
    order = PersonOrder(
        "submit", f"submit job {claim.job} to fleet {state.name}", claim.submitted_by, claim.signed
    )
    verdict = check_order(state.access, state.name, order, started)
    return replace(record, submitter=verdict.by, refusal=verdict.refusal)


def _says_it_has_run(claim: Claim) -> bool:
    return claim.has_run or claim.running or bool(claim.keep)


def record_faults(state: FleetState, report: FaultReport, now: datetime) -> FleetState:
    """Add marks to the nodes that a job's fault report names."""
    return replace(state, nodes=_mark_nodes(state.nodes, report, now))


def close_claims(state: FleetState, jobs: tuple[tuple[str, int], ...], now: datetime) -> FleetState:
    for record in [record for record in state.claims if record.key in jobs]:
        # Its granted and held nodes stay reserved until no rank lives there. Which nodes were
        # launched together must still be known when some of them are free again.
        claim = replace(record.claim, launched=record.launched)
        after = replace(
            record, claim=claim, inherited_launched=(), is_closed=True, is_answer_sent=True
        )
        state = _put_claim(state, after) if after.places else remove_claim(state, after, now)
    return state


def free_stopped_nodes(state: FleetState, fact: ReclaimResult, now: datetime) -> FleetState:
    state = _forget_ranks(state, fact)
    for record in [record for record in state.claims if record.claim.job == fact.job]:
        # The host that answers for a moved node never saw the ranks.
        nodes = [node for node in fact.nodes if node not in record.old_logins]
        after = (
            replace(record, inherited=_drop_places(record.inherited, nodes))
            if record.claim.submission >= fact.submission
            else record
        )
        if record.is_closed and record.claim.submission <= fact.submission:
            after = _drop_nodes(after, nodes)
        state = (
            remove_claim(state, after, now)
            if after.is_closed and not after.places
            else _put_claim(state, after)
        )
    return state


def _drop_nodes(record: ClaimRecord, nodes: Iterable[str]) -> ClaimRecord:
    claim = replace(record.claim, holds=_drop_places(record.claim.holds, nodes))
    return replace(record, claim=claim, granted=_drop_places(record.granted or (), nodes))


def record_moves(state: FleetState, was: Mapping[str, str]) -> FleetState:
    """Record the earlier login of nodes that moved in the fleet file while ranks may live there.

    Args:
        state: The state with the nodes as the fleet file has them now.
        was: The login of each node before that.
    """
    now = {node.name: node.spec.login for node in state.nodes}
    return replace(state, claims=tuple(_add_moves(record, was, now) for record in state.claims))


def _add_moves(record: ClaimRecord, was: Mapping[str, str], now: Mapping[str, str]) -> ClaimRecord:
    held = {place.node for place in record.places}
    then = {node: login for node, login in {**was, **record.old_logins}.items() if node in held}
    moved = {node: login for node, login in then.items() if now.get(node, login) != login}
    return replace(record, old_logins=moved) if moved != record.old_logins else record


def declare_ranks_dead(state: FleetState, node: str, now: datetime) -> FleetState:
    """Record a person's declaration that no ranks of ended jobs or earlier submissions live on a
    node."""
    for record in state.claims:
        after = replace(record, inherited=_drop_places(record.inherited, [node]))
        after = _drop_nodes(after, [node]) if record.is_closed else after
        if after != record:
            moved = {name: login for name, login in record.old_logins.items() if name != node}
            after = replace(after, old_logins=moved)
            state = (
                remove_claim(state, after, now)
                if after.is_closed and not after.places
                else _put_claim(state, after)
            )
    return state


def remove_claim(state: FleetState, record: ClaimRecord, now: datetime) -> FleetState:
    """Remove a claim that has no nodes left, and remember its last submission and sequence
    number."""
    claims = tuple(one for one in state.claims if one.claim.job != record.claim.job)
    others = tuple(one for one in state.last_claims if one.job != record.claim.job)
    last = LastClaim(record.claim.job, record.claim.submission, record.claim.seq, now)
    return replace(state, claims=claims, last_claims=(*others, last)[-MAX_LAST_CLAIMS:])


def explain_marks(record: NodeRecord) -> tuple[str, str]:
    """Return why the marks that are not retracted make the node a suspect, and who says so.

    Both are empty if they do not.
    """
    valid = [mark for mark in record.marks if not mark.retracted]
    if isolated := [mark for mark in valid if mark.isolated]:
        return isolated[-1].reason, f"job {isolated[-1].job}"
    jobs = {mark.job: mark for mark in valid if valid[-1].at - mark.at < SUSPECT_WINDOW}
    if len(jobs) < SUSPECT_JOBS:
        return "", ""
    hours = int(SUSPECT_WINDOW / timedelta(hours=1))
    named = ", ".join(
        f"{job} ({mark.code or mark.cause})" for job, mark in list(jobs.items())[-SUSPECT_JOBS:]
    )
    return f"{len(jobs)} jobs failed on it within {hours}h: {named}", RELAUNCH


def retract_marks(record: NodeRecord, reason: str) -> NodeRecord:
    return replace(
        record,
        marks=tuple(
            mark if mark.retracted else replace(mark, retracted=reason) for mark in record.marks
        ),
    )


# --- restoring after a restart of the fleet


def export_claims(records: tuple[ClaimRecord, ...]) -> tuple[ClaimRecord, ...]:
    """Return the claims of jobs that hold nodes, as the next run of the fleet restores them.

    They are not waiting, so that run grants nothing to them.
    """
    return tuple(
        replace(
            record,
            claim=replace(record.claim, suspects=(), avoid=()),
            granted=record.granted or (),
            wait_reason="",
            waiting_since=None,
            answer=None,
            is_answer_sent=True,
            reason_sent_at=None,
            reason_due_at=None,
            is_restored=True,
        )
        for record in records
        if record.places
    )


def restore_claims(state: FleetState, records: tuple[ClaimRecord, ...]) -> FleetState:
    """Restore which jobs held which nodes. Newer claims of a job take precedence where they say
    more."""
    given_back = {one.job: one for one in state.last_claims}
    known = {record.claim.job: record for record in state.claims}
    for old in records:
        job = old.claim.job
        if (record := known.get(job)) is not None:
            launched = tuple(dict.fromkeys((*record.inherited_launched, *old.launched)))
            moved = {**old.old_logins, **record.old_logins}
            state = _put_claim(
                state,
                replace(
                    record,
                    inherited=_find_inherited(record, old),
                    inherited_launched=launched,
                    old_logins=moved,
                ),
            )
        elif (last := given_back.get(job)) is None:
            state = _put_claim(state, old)
        elif inherited := old.inherited if last.submission == old.claim.submission else old.places:
            # The job has ended and never knew of ranks that may live there.
            claim = replace(
                old.claim,
                submission=last.submission,
                seq=last.seq,
                nodes=0,
                keep=(),
                holds=(),
                launched=old.launched,
            )
            ended = replace(
                old,
                claim=claim,
                granted=(),
                inherited=inherited,
                inherited_launched=(),
                is_closed=True,
            )
            state = _put_claim(state, ended)
    return state


def _find_inherited(record: ClaimRecord, old: ClaimRecord) -> tuple[Place, ...]:
    """Return where ranks of earlier submissions may live that this submission may not know of."""
    claim = record.claim
    if claim.submission == old.claim.submission and claim.seq >= old.claim.seq:
        before = () if _has_received_grant(claim, old) else old.inherited
    else:
        before = old.places
    named = {place.node for place in record.inherited}
    more = tuple(place for place in before if place.node not in named)
    return (*record.inherited, *_drop_places(more, [place.node for place in claim.holds]))


# --- records


def _make_record(claim: Claim, known: ClaimRecord | None, now: datetime) -> ClaimRecord:
    inherited: tuple[Place, ...] = ()
    launched: tuple[LaunchedGeneration, ...] = ()
    since = now
    if known is not None:
        shares = {place.node: place.gpus for place in known.places}
        # A submission that holds a node of an earlier one does not know which GPUs of the node that
        # was.
        claim = replace(
            claim,
            holds=tuple(
                place if place.gpus else replace(place, gpus=shares.get(place.node, ()))
                for place in claim.holds
            ),
        )
        if claim.submission > known.claim.submission:
            inherited, launched = known.places, known.launched
        else:
            since = known.waiting_since or now if known.is_waiting else now
            if not _has_received_grant(claim, known):
                inherited, launched = known.inherited, known.inherited_launched
        inherited = _drop_places(inherited, [place.node for place in claim.holds])
    if claim.nodes > 0:
        return ClaimRecord(
            claim,
            claimed_at=now,
            waiting_since=since,
            inherited=inherited,
            inherited_launched=launched if inherited else (),
        )
    # The job has ended without reporting on the ranks before it, so the fleet stops them.
    return ClaimRecord(
        claim,
        granted=(),
        claimed_at=now,
        inherited=inherited,
        inherited_launched=launched if inherited else (),
        is_closed=bool(inherited) and not claim.holds,
    )


def _list_known_places(claim: Claim, known: ClaimRecord) -> tuple[Place, ...]:
    """Return the places that the job knew of when it sent the claim, without a grant that it had
    not yet received."""
    return known.places if _has_received_grant(claim, known) else known.claim.holds


def _has_received_grant(claim: Claim, known: ClaimRecord) -> bool:
    """Return whether the job has received its grant: it holds nodes that it was granted.

    It then also knows where an earlier submission lived.
    """
    granted = {place.node for place in known.granted or ()}
    return any(place.node in granted for place in claim.holds)


def _put_claim(state: FleetState, record: ClaimRecord) -> FleetState:
    job = record.claim.job
    if any(one.claim.job == job for one in state.claims):
        return replace(
            state, claims=tuple(record if one.claim.job == job else one for one in state.claims)
        )
    return replace(state, claims=(*state.claims, record))


def _drop_places(places: tuple[Place, ...], nodes: Iterable[str]) -> tuple[Place, ...]:
    freed = frozenset(nodes)
    return tuple(place for place in places if place.node not in freed)


def _forget_ranks(state: FleetState, fact: ReclaimResult) -> FleetState:
    nodes = tuple(
        _forget_ranks_on(node, node.probe, fact) if node.probe and node.name in fact.nodes else node
        for node in state.nodes
    )
    return replace(state, nodes=nodes)


def _forget_ranks_on(node: NodeRecord, probe: NodeProbe, fact: ReclaimResult) -> NodeRecord:
    def others(living: tuple[LiveGeneration, ...]) -> tuple[LiveGeneration, ...]:
        return tuple(
            one for one in living if one.job != fact.job or one.submission > fact.submission
        )

    return replace(
        node,
        probe=replace(probe, generations=others(probe.generations)),
        last_generations=others(node.last_generations),
    )


# --- marks


def _mark_nodes(
    nodes: tuple[NodeRecord, ...], report: FaultReport, now: datetime
) -> tuple[NodeRecord, ...]:
    records = {node.name: node for node in nodes} if report.suspects else {}
    for suspect in report.suspects:
        if (record := records.get(suspect.node)) is None or (
            marked := _add_mark(record, report, suspect)
        ) is None:
            continue
        records[suspect.node] = marked
        for name, other in list(records.items()):
            if name != suspect.node and other.marks:
                records[name] = _retract_followed(other, report, suspect, now)
        if marked.status is NodeStatus.IN_SERVICE and (found := explain_marks(marked))[0]:
            records[suspect.node] = set_status(
                marked, NodeStatus.SUSPECT, now, reason=found[0], by=found[1], end=""
            )
    return tuple(records.values()) or nodes


def _add_mark(record: NodeRecord, report: FaultReport, suspect: Suspect) -> NodeRecord | None:
    """Return the node with the mark added; None if the suspect adds nothing new."""
    said = (report.job, report.submission, suspect.generation)
    # A later submission of the job repeats the faults of earlier ones: they are no news.
    known = next(
        (
            mark
            for mark in record.marks
            if (mark.job, mark.submission, mark.generation) == said
            or (mark.job, mark.generation, mark.at) == (report.job, suspect.generation, suspect.at)
        ),
        None,
    )
    if known is not None and (known.isolated or known.retracted or not suspect.isolate):
        return None
    is_old = record.cleared_at is not None and suspect.at <= record.cleared_at
    mark = Mark(
        suspect.at,
        *said,
        suspect.cause,
        text(suspect.reason) or suspect.cause,
        suspect.code,
        suspect.gpus,
        BEFORE_CLEARING if is_old else "",
        isolated=suspect.isolate,
    )
    marks = sorted(
        (*(one for one in record.marks if one is not known), mark), key=lambda one: one.at
    )[-MAX_MARKS:]
    return replace(record, marks=tuple(marks)) if mark in marks else None


def _retract_followed(
    record: NodeRecord, report: FaultReport, suspect: Suspect, now: datetime
) -> NodeRecord:
    if suspect.cause not in FOLLOWING_CAUSES:
        return record
    reason = f"the fault followed job {report.job} to {suspect.node}"
    marks = tuple(
        replace(mark, retracted=reason)
        if not mark.retracted
        and (mark.job, mark.submission, mark.cause, mark.code)
        == (report.job, report.submission, suspect.cause, suspect.code)
        and mark.generation < suspect.generation
        else mark
        for mark in record.marks
    )
    if marks == record.marks:
        return record
    ended = [(mark.reason, f"job {mark.job}") for mark in marks if mark.retracted == reason]
    record = replace(record, marks=marks)
    if record.status is not NodeStatus.SUSPECT:
        return record
    left, by = explain_marks(record)
    if not left:
        return set_status(record, NodeStatus.IN_SERVICE, now, reason="", by="", end=reason)
    if (record.reason, record.by) in ended:
        return set_status(record, NodeStatus.SUSPECT, now, reason=left, by=by, end=reason)
    return record
