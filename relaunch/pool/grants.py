"""Decide which claims get nodes.

A claim gets all the nodes that it needs or none. Replacements come first, then priority, then
submission time. Nodes that a large claim could use are reserved, so that later claims do not starve
it.

Also decides which nodes have to be probed before a claim can be granted, and which job yields when
two running jobs block each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from relaunch.pool.events import GrantMessage, OfferMessage
from relaunch.pool.explain import Explainer, why_closed
from relaunch.pool.messages import Grant
from relaunch.pool.nodes import PROBE_LIFETIME, is_probe_due
from relaunch.pool.placement import Choice, Placement, Shape, fits, holds
from relaunch.pool.state import ClaimRecord, FleetState, NodeStatus, OfferRecord

MAX_PROBES = 512
"""Nodes probed for waiting claims at a time: two rounds of the probes that a worker runs in
parallel."""
REASON_INTERVAL = timedelta(seconds=5)
"""Time between two messages to a job that it still waits. Also the delay before the first one if
the job may get its nodes in a moment."""
MAX_REASONS_PER_S = 20
"""Messages per second to all waiting jobs together. Each costs both sides a workflow task and only
informs people."""
PROBE_WAIT = PROBE_LIFETIME
"""How long a job that could already run waits for probes of further nodes that it would also take.
A probe takes a second."""


@dataclass(slots=True)
class Allocation:
    claims: dict[str, ClaimRecord]
    moved_at: datetime | None
    tells: list[GrantMessage] = field(default_factory=list)
    looks: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Waiting:
    record: ClaimRecord
    shape: Shape
    chosen: Choice
    ahead: str
    """The job for which the nodes that this claim could use are reserved."""


def claim_order(record: ClaimRecord) -> tuple[bool, int, float, str]:
    """Return the sort key of a claim: replacements first, then priority, then submission time."""
    claim = record.claim
    since = claim.since or record.waiting_since
    return not claim.running, -claim.priority, since.timestamp() if since else 0.0, claim.job


def allocate(
    state: FleetState, board: Placement, now: datetime, busy: frozenset[str]
) -> Allocation:
    done = Allocation({record.claim.job: record for record in state.claims}, state.progress_at)
    for record in state.claims:
        if not record.is_answer_sent and not record.is_closed and record.answer is not None:
            done.tells.append(GrantMessage(record.claim.job, record.answer))
            done.claims[record.claim.job] = replace(record, is_answer_sent=True)
    waiting = sorted(
        (record for record in done.claims.values() if record.is_waiting), key=claim_order
    )
    gap = max(REASON_INTERVAL, timedelta(seconds=len(waiting) / MAX_REASONS_PER_S))
    closed, words = why_closed(state, now), Explainer(board)
    left = []
    fewer: list[tuple[Waiting, Grant]] = []
    for record in waiting:
        claim, shape = record.claim, board.shape(record.claim)
        kept = board.kept(record)
        if len(kept) == claim.max_nodes and not board.holding(record):
            done.claims[claim.job] = _goes_on(board, record, kept)
        elif state.is_file_read and (hopeless := words.why_hopeless(record, shape)):
            _answered(
                done, record, Grant(claim.submission, claim.seq, "hopeless", reason=hopeless), now
            )
        elif closed and len(kept) >= claim.nodes and not board.holding(record):
            # The job can run with the nodes that it keeps, so it does not wait for the fleet to
            # grant again.
            grant = _grant(board, record, Choice(kept, [], 0))
            _answered(
                done,
                record,
                replace(grant, fewer=f"{len(kept)} of {claim.max_nodes} nodes: {closed}"),
                now,
            )
        elif closed:
            _wait(
                done,
                record,
                closed,
                now,
                gap,
                soon=not (state.awaited_jobs or (state.is_probed and state.is_restored)),
            )
        elif f"reclaim/{claim.job}/{claim.submission}" in busy:
            # The order that stops its old ranks would also stop the ranks launched with this grant.
            _wait(
                done,
                record,
                f"ranks of job {claim.job} itself, which nobody answered for, are being stopped",
                now,
                gap,
            )
        elif unknown := board.where_unknown(record):
            # There is no bound on how long ranks run on if all nodes of their gang are silent, or
            # if the job has a single node.
            _wait(done, record, words.why_unknown(record, unknown), now, gap)
            done.looks += [node for node in unknown if is_probe_due(board.nodes[node], now)][
                : MAX_PROBES - len(done.looks)
            ]
        else:
            chosen = board.choose(record, shape, alone=len(waiting) == 1)
            if not chosen.missing and not (
                chosen.hopeful and now - (record.waiting_since or now) < PROBE_WAIT
            ):
                grant = _grant(board, record, chosen)
                if len(grant.places) < claim.max_nodes:
                    fewer.append((Waiting(record, shape, chosen, board.ahead(shape)), grant))
                else:
                    _answered(done, record, grant, now)
                continue
            left.append(Waiting(record, shape, chosen, board.ahead(shape)))
            done.looks += chosen.looks[: MAX_PROBES - len(done.looks)]
            if board.could_have(record, shape, chosen):
                board.reserve(claim.job, shape)
    for (
        one,
        grant,
    ) in fewer:  # after all grants, so that the reason names the jobs granted in this pass
        _answered(
            done,
            one.record,
            replace(grant, fewer=words.why_fewer(one.record, one.shape, one.chosen, one.ahead)),
            now,
        )
    for one in left:
        reason = words.why_waiting(one.record, one.shape, one.chosen, one.ahead)
        _wait(done, one.record, reason, now, gap, soon=one.chosen.hopeful)
    _yield(done, board, left, now)
    return done


def yield_time(state: FleetState) -> datetime | None:
    """Return when a running job may have to yield; None if no two of them wait."""
    stuck = [record for record in state.claims if _may_be_stuck(record)]
    since = [record.waiting_since for record in stuck if record.waiting_since is not None]
    if len(since) < 2:
        return None
    return max(sorted(since)[1], state.progress_at or since[0]) + state.limits.replacement_wait


def _goes_on(board: Placement, record: ClaimRecord, kept: list[int]) -> ClaimRecord:
    """Grant a claim that already keeps every node it wants.

    The job waits for nothing, so the answer is sent only if the job repeats the claim.
    """
    claim = record.claim
    places = board.grant(record, Choice(kept, [], 0))
    grant = Grant(claim.submission, claim.seq, places=places, reason="it goes on with what it has")
    return replace(
        record,
        granted=places,
        answer=grant,
        wait_reason="",
        reason_sent_at=None,
        reason_due_at=None,
    )


def _grant(board: Placement, record: ClaimRecord, chosen: Choice) -> Grant:
    claim = record.claim
    holding = board.holding(record)
    places = board.grant(record, chosen)
    named = [board.nodes[node].name for node in chosen.new]
    reason = f"{_named(named)} joined" if named else "it goes on with what it has"
    if holding:
        reason += f"; ranks of an earlier submission may live on {_named(holding)}"
    return Grant(
        claim.submission,
        claim.seq,
        places=places,
        reason=reason,
        holding=holding,
        launched=record.inherited_launched if holding else (),
        moved=tuple(node for node in holding if node in record.old_logins),
    )


def _answered(done: Allocation, record: ClaimRecord, grant: Grant, now: datetime) -> None:
    done.claims[record.claim.job] = replace(
        record,
        granted=grant.places,
        answer=grant,
        wait_reason="",
        reason_sent_at=None,
        reason_due_at=None,
    )
    done.tells.append(GrantMessage(record.claim.job, grant))
    if grant.kind == "granted" and record.claim.running:
        done.moved_at = now


def _wait(
    done: Allocation,
    record: ClaimRecord,
    reason: str,
    now: datetime,
    gap: timedelta,
    *,
    soon: bool = False,
) -> None:
    """Record why a claim waits, and notify the job if the reason is new.

    `soon`: the wait will probably end in a moment, so the first message is delayed.
    """
    claim = record.claim
    say_at = None
    if reason != record.wait_reason:
        if record.reason_sent_at is not None:
            say_at = record.reason_sent_at + gap
        elif soon:
            say_at = (record.waiting_since or now) + REASON_INTERVAL
        if say_at is None or now >= say_at:
            done.tells.append(
                GrantMessage(
                    claim.job, Grant(claim.submission, claim.seq, "waiting", reason=reason)
                )
            )
            record = replace(record, wait_reason=reason, reason_sent_at=now)
            say_at = None
    if say_at != record.reason_due_at:
        record = replace(record, reason_due_at=say_at)
    done.claims[claim.job] = record


def _may_be_stuck(record: ClaimRecord) -> bool:
    return record.is_waiting and record.claim.running and bool(record.places)


def _lacks(one: Waiting, now: datetime, wait: timedelta) -> bool:
    since = one.record.waiting_since
    return (
        _may_be_stuck(one.record)
        and bool(one.chosen.missing)
        and since is not None
        and now - since >= wait
    )


def _yield(done: Allocation, board: Placement, left: Iterable[Waiting], now: datetime) -> None:
    """Have the last of the running jobs that hold nodes which the others need yield."""
    wait = board.state.limits.replacement_wait
    stuck = [one for one in left if _lacks(one, now, wait)]
    if done.moved_at is not None and now - done.moved_at < wait:
        return
    for last in range(len(stuck) - 1, 0, -1):
        record = done.claims[stuck[last].record.claim.job]
        if record.answer is None and (other := _helped(board, stuck, last)):
            claim = record.claim
            reason = f"job {other} comes first and waits for nodes that this job holds; both have waited longer than replacement_wait"
            grant = Grant(claim.submission, claim.seq, "yield", reason=reason)
            done.claims[claim.job] = replace(record, answer=grant)
            done.tells.append(GrantMessage(claim.job, grant))
            done.moved_at = now
            return


def _helped(board: Placement, stuck: list[Waiting], last: int) -> str:
    """Return the first job ahead of this one that could go on with what this one and later ones
    hold."""
    for first, one in enumerate(stuck[:last]):
        gains = [_gain(board, other.record, one.shape) for other in stuck[first + 1 :]]
        if gains[last - first - 1] and sum(gains) >= one.chosen.missing:
            return one.record.claim.job
    return ""


def _gain(board: Placement, record: ClaimRecord, shape: Shape) -> int:
    nodes = [
        board.nodes[node]
        for place in record.places
        if (node := board.index.get(place.node)) is not None
    ]
    return sum(one.status is NodeStatus.IN_SERVICE and fits(one, shape) for one in nodes)


def _named(names: Iterable[str]) -> str:
    from_all = list(names)
    more = f" and {len(from_all) - 4} more" if len(from_all) > 4 else ""
    return ", ".join(from_all[:4]) + more


OFFER_TIMEOUT = timedelta(minutes=2)
"""How long the offered nodes are reserved: a job answers within seconds, or when its worker is
back."""
OFFER_INTERVAL = timedelta(minutes=5)
"""From the end of an offer to the next one: a job that does not take offers keeps nodes from others
for two minutes in seven."""


def end_offers(state: FleetState, now: datetime) -> FleetState:
    """End the offers that expired, were taken, or were superseded by a claim; forget those after
    which the next one may be made."""
    if not state.offers:
        return state
    records = {record.claim.job: record for record in state.claims}
    offers = []
    for one in state.offers:
        record = records.get(one.job)
        is_over = bool(one.places) and not holds(one, record, now)
        known = replace(one, places=(), until=min(one.until, now)) if is_over else one
        if not (is_over and _took(record, one)) and now < known.until + OFFER_INTERVAL:
            offers.append(known)
    return state if tuple(offers) == state.offers else replace(state, offers=tuple(offers))


def _took(record: ClaimRecord | None, offer: OfferRecord) -> bool:
    """Return whether the job was granted some of the offered nodes; its `more_at` then sets the
    time of the next offer."""
    granted = record.granted if record is not None else None
    return bool({place.node for place in granted or ()} & {place.node for place in offer.places})


def make_offers(
    state: FleetState, board: Placement, now: datetime
) -> tuple[FleetState, list[OfferMessage], list[int]]:
    """Make the offers that are possible; also return the nodes to probe before more can be made."""
    wishes = [record for record in state.claims if _wishes(state, record, now)]
    if not wishes or any(record.is_waiting for record in state.claims) or why_closed(state, now):
        return state, [], []
    made: list[OfferRecord] = []
    looks: list[int] = []
    for record in sorted(wishes, key=claim_order):
        claim = record.claim
        ready, stale = board.offerable(record, claim.most - len(claim.keep))
        looks += [node for node in stale if is_probe_due(state.nodes[node], now)]
        if ready and not stale:  # one offer of all nodes instead of two restarts
            made.append(
                OfferRecord(
                    claim.job,
                    claim.submission,
                    claim.seq,
                    board.offer(record, ready),
                    now + OFFER_TIMEOUT,
                )
            )
    state = replace(state, offers=(*state.offers, *made)) if made else state
    return state, [OfferMessage(one.job, one.offer) for one in made], looks


def offer_times(state: FleetState) -> list[datetime]:
    """Return when there may be something to offer, or an offer ends."""
    times = [record.claim.more_at for record in state.claims if record.claim.more_at is not None]
    times += [one.until for one in state.offers if one.places]
    return times + [one.until + OFFER_INTERVAL for one in state.offers]


def _wishes(state: FleetState, record: ClaimRecord, now: datetime) -> bool:
    claim = record.claim
    if (
        claim.more_at is None
        or now < claim.more_at
        or claim.most <= len(claim.keep)
        or record.is_closed
        or record.is_waiting
    ):
        return False
    wanted = {
        node.name for node in state.nodes if node.drain is not None or node.repair_drain is not None
    }
    return all(one.job != claim.job for one in state.offers) and not any(
        place.node in wanted for place in record.places
    )
