"""Grant nodes to waiting claims, and offer more nodes to running jobs that would take more.

A claim gets all the nodes that it needs or none. Replacements come first, then priority, then
submission time. Nodes that a large claim could use are reserved, so that later claims do not starve
it. Which nodes a claim can have is chosen by `placement`; which have to be probed before it can be
granted comes with the choice.

Offers come after all claims: nothing is offered while one waits. An offer reserves its nodes for a
limited time. Whether a job takes it is its own decision.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from relaunch.pool.events import GrantMessage, OfferMessage
from relaunch.pool.explain import Explainer, why_closed
from relaunch.pool.messages import Grant
from relaunch.pool.nodes import PROBE_LIFETIME, is_probe_due
from relaunch.pool.placement import Choice, NodeUse, Placement, Shape, is_reserved
from relaunch.pool.state import ClaimRecord, FleetState, NodeStatus, OfferRecord
from relaunch.text import count_noun, join_names

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
OFFER_TIMEOUT = timedelta(minutes=2)
"""How long the offered nodes are reserved: a job answers within seconds, or when its worker is
back."""
OFFER_INTERVAL = timedelta(minutes=5)
"""From the end of an offer to the next one: a job that does not take offers keeps nodes from others
for two minutes in seven."""


def claim_order(record: ClaimRecord) -> tuple[bool, int, float, str]:
    """Return the sort key of a claim: replacements first, then priority, then submission time."""
    claim = record.claim
    since = claim.since or record.waiting_since
    return not claim.running, -claim.priority, since.timestamp() if since else 0.0, claim.job


# --- waiting claims


@dataclass(frozen=True, slots=True)
class GrantResult:
    """What one scheduling run grants, and what it needs to know to grant more."""

    state: FleetState
    messages: list[GrantMessage]
    probes: list[NodeUse]
    """Nodes to be probed for the claims that still wait."""


def grant_nodes(
    state: FleetState, now: datetime, under_way: frozenset[str], placement: Placement
) -> GrantResult:
    """Answer the waiting claims.

    A grant may end an offer, and a claim may wait for just the nodes of that offer: the claims are
    then served again. Each round ends at least one offer, so there are few.
    """
    messages: list[GrantMessage] = []
    while True:
        state = end_offers(state, now)
        offers = state.offers
        placement.update(state, now)
        allocation = Allocation(placement, under_way)
        allocation.run()
        messages += allocation.messages
        claims = tuple(allocation.claims[record.claim.job] for record in state.claims)
        if claims != state.claims:
            state = replace(state, claims=claims, progress_at=allocation.progress_at)
        state = end_offers(state, now)
        if state.offers == offers:
            return GrantResult(state, messages, allocation.probes)


@dataclass(frozen=True, slots=True)
class PendingClaim:
    """A claim with what it can have now, which is less than it would take."""

    record: ClaimRecord
    shape: Shape
    choice: Choice
    job_ahead: str
    """The job for which the nodes that this claim could use are reserved."""


class Allocation:
    """One round over all waiting claims, in their order."""

    def __init__(self, placement: Placement, under_way: frozenset[str]) -> None:
        state, now = placement.state, placement.now
        self.placement = placement
        self.claims = {record.claim.job: record for record in state.claims}
        self.messages: list[GrantMessage] = []
        self.probes: list[NodeUse] = []
        self.progress_at = state.progress_at
        self._state = state
        self._now = now
        self._under_way = under_way
        self._explainer = Explainer(self.placement)
        self._closed = why_closed(state, now)
        self._pending: list[PendingClaim] = []
        self._smaller: list[tuple[PendingClaim, Grant]] = []
        self._reason_interval = REASON_INTERVAL

    def run(self) -> None:
        self._resend_answers()
        waiting = sorted(
            (record for record in self.claims.values() if record.is_waiting), key=claim_order
        )
        self._reason_interval = max(
            REASON_INTERVAL, timedelta(seconds=len(waiting) / MAX_REASONS_PER_S)
        )
        for record in waiting:
            self._serve(record, is_alone=len(waiting) == 1)
        # After all grants, so that reasons name the jobs that were granted in this round.
        for one, grant in self._smaller:
            fewer = self._explainer.why_fewer(one.record, one.shape, one.choice, one.job_ahead)
            self._answer(one.record, replace(grant, fewer=fewer))
        for one in self._pending:
            reason = self._explainer.why_waiting(one.record, one.shape, one.choice, one.job_ahead)
            self._wait(one.record, reason, is_short=one.choice.is_hopeful)
        self._make_one_job_yield()

    def _resend_answers(self) -> None:
        """Send the answers again that jobs asked for again."""
        for record in self._state.claims:
            if not record.is_answer_sent and not record.is_closed and record.answer is not None:
                answer = replace(record.answer, places=record.granted or ())
                self.messages.append(GrantMessage(record.claim.job, answer))
                self.claims[record.claim.job] = replace(record, is_answer_sent=True)

    def _serve(self, record: ClaimRecord, *, is_alone: bool) -> None:
        """Answer one claim, or record why it waits."""
        claim, placement = record.claim, self.placement
        if record.refusal:
            answer = Grant(claim.submission, claim.seq, "hopeless", reason=record.refusal)
            self._answer(record, answer)
            return
        shape = placement.shape_of(claim)
        kept = placement.keep_nodes(record)
        has_earlier_ranks = bool(placement.find_earlier_ranks(record))
        if len(kept) == claim.max_nodes and not has_earlier_ranks:
            self._continue(record, kept)
        elif self._state.is_file_read and (hopeless := self._explainer.why_hopeless(record, shape)):
            self._answer(record, Grant(claim.submission, claim.seq, "hopeless", reason=hopeless))
        elif self._closed and len(kept) >= claim.nodes and not has_earlier_ranks:
            # The job can run with the nodes that it keeps, so it does not wait for the fleet to
            # grant again.
            grant = self._make_grant(record, Choice(kept, [], 0))
            fewer = f"{len(kept)} of {count_noun(claim.max_nodes, 'node')}: {self._closed}"
            self._answer(record, replace(grant, fewer=fewer))
        elif self._closed:
            state = self._state
            is_starting = not (state.awaited_jobs or (state.is_probed and state.is_restored))
            self._wait(record, self._closed, is_short=is_starting)
        elif f"reclaim/{claim.job}/{claim.submission}" in self._under_way:
            # The order that stops its old ranks would also stop the ranks launched with this grant.
            self._wait(
                record,
                f"ranks of job {claim.job} itself, which did not answer, are being stopped",
            )
        elif unknown := placement.find_unknown_nodes(record):
            # There is no bound on how long ranks run on if all nodes of their gang are silent, or
            # if the job has a single node.
            self._wait(record, self._explainer.why_unknown(record, unknown))
            self._probe([node for node in unknown if is_probe_due(node.record, self._now)])
        else:
            self._choose(record, shape, is_alone)

    def _choose(self, record: ClaimRecord, shape: Shape, is_alone: bool) -> None:
        """Grant what the claim can have, or reserve what it may get later."""
        claim, placement = record.claim, self.placement
        choice = placement.choose(record, shape, is_alone=is_alone)
        waits_for_probes = (
            choice.is_hopeful and self._now - (record.waiting_since or self._now) < PROBE_WAIT
        )
        if not choice.missing and not waits_for_probes:
            grant = self._make_grant(record, choice)
            if len(grant.places) < claim.max_nodes:
                job_ahead = placement.find_job_ahead(shape)
                self._smaller.append((PendingClaim(record, shape, choice, job_ahead), grant))
            else:
                self._answer(record, grant)
            return
        job_ahead = placement.find_job_ahead(shape)
        self._pending.append(PendingClaim(record, shape, choice, job_ahead))
        self._probe(choice.probes)
        if placement.could_have(record, shape, choice):
            placement.reserve(claim.job, shape)

    def _probe(self, nodes: list[NodeUse]) -> None:
        self.probes += nodes[: MAX_PROBES - len(self.probes)]

    def _continue(self, record: ClaimRecord, kept: list[NodeUse]) -> None:
        """Grant a claim that already keeps every node it wants.

        The job waits for nothing, so the answer is sent only if the job repeats the claim.
        """
        claim = record.claim
        places = self.placement.grant(record, Choice(kept, [], 0))
        grant = Grant(
            claim.submission, claim.seq, places=places, reason="it goes on with what it has"
        )
        self._record_answer(record, grant)

    def _make_grant(self, record: ClaimRecord, choice: Choice) -> Grant:
        claim = record.claim
        holding = self.placement.find_earlier_ranks(record)
        places = self.placement.grant(record, choice)
        names = [node.name for node in choice.new]
        reason = f"{join_names(names)} joined" if names else "it goes on with what it has"
        if holding:
            reason += f"; ranks of an earlier submission may live on {join_names(holding)}"
        return Grant(
            claim.submission,
            claim.seq,
            places=places,
            reason=reason,
            holding=holding,
            launched=record.inherited_launched if holding else (),
            moved=tuple(node for node in holding if node in record.old_logins),
        )

    def _answer(self, record: ClaimRecord, grant: Grant) -> None:
        grant = replace(grant, submitter=record.submitter)
        self._record_answer(record, grant)
        self.messages.append(GrantMessage(record.claim.job, grant))
        if grant.kind == "granted" and record.claim.running:
            self.progress_at = self._now

    def _record_answer(self, record: ClaimRecord, grant: Grant) -> None:
        self.claims[record.claim.job] = replace(
            record,
            granted=grant.places,
            answer=replace(grant, places=()),
            wait_reason="",
            reason_sent_at=None,
            reason_due_at=None,
        )

    def _wait(self, record: ClaimRecord, reason: str, *, is_short: bool = False) -> None:
        """Record why a claim waits, and notify the job if the reason is new.

        `is_short`: the wait will probably end in a moment, so the first message is delayed.
        """
        claim, now = record.claim, self._now
        due_at = None
        if reason != record.wait_reason:
            if record.reason_sent_at is not None:
                due_at = record.reason_sent_at + self._reason_interval
            elif is_short:
                due_at = (record.waiting_since or now) + REASON_INTERVAL
            if due_at is None or now >= due_at:
                grant = Grant(claim.submission, claim.seq, "waiting", reason=reason)
                self.messages.append(GrantMessage(claim.job, grant))
                record = replace(record, wait_reason=reason, reason_sent_at=now)
                due_at = None
        if due_at != record.reason_due_at:
            record = replace(record, reason_due_at=due_at)
        self.claims[claim.job] = record

    def _make_one_job_yield(self) -> None:
        """Have the last of the running jobs that hold nodes which the others need yield.

        Only after all of them have waited `replacement_wait` without any of them getting nodes.
        """
        limit = self._state.limits.replacement_wait
        stuck = [one for one in self._pending if self._is_stuck(one, limit)]
        if self.progress_at is not None and self._now - self.progress_at < limit:
            return
        for last in range(len(stuck) - 1, 0, -1):
            record = self.claims[stuck[last].record.claim.job]
            if record.answer is None and (other := self._find_beneficiary(stuck, last)):
                claim = record.claim
                reason = (
                    f"job {other} comes first and waits for nodes that this job holds; "
                    "both have waited longer than replacement_wait"
                )
                grant = Grant(claim.submission, claim.seq, "yield", reason=reason)
                self.claims[claim.job] = replace(record, answer=grant)
                self.messages.append(GrantMessage(claim.job, grant))
                self.progress_at = self._now
                return

    def _is_stuck(self, one: PendingClaim, limit: timedelta) -> bool:
        since = one.record.waiting_since
        return (
            _may_block_others(one.record)
            and bool(one.choice.missing)
            and since is not None
            and self._now - since >= limit
        )

    def _find_beneficiary(self, stuck: list[PendingClaim], last: int) -> str:
        """Return the first job ahead of this one that could go on with what this one and later ones
        hold."""
        for first, one in enumerate(stuck[:last]):
            gains = [self._count_gain(other.record, one.shape) for other in stuck[first + 1 :]]
            if gains[last - first - 1] and sum(gains) >= one.choice.missing:
                return one.record.claim.job
        return ""

    def _count_gain(self, record: ClaimRecord, shape: Shape) -> int:
        """Return how many nodes a claim of this shape could use if the job gave back its own."""
        by_name = self.placement.by_name
        nodes = [by_name[place.node].record for place in record.places if place.node in by_name]
        return sum(node.status is NodeStatus.IN_SERVICE and shape.fits(node) for node in nodes)


def _may_block_others(record: ClaimRecord) -> bool:
    return record.is_waiting and record.claim.running and bool(record.places)


def yield_time(state: FleetState) -> datetime | None:
    """Return when a running job may have to yield; None if no two of them wait."""
    stuck = [record for record in state.claims if _may_block_others(record)]
    since = [record.waiting_since for record in stuck if record.waiting_since is not None]
    if len(since) < 2:
        return None
    return max(sorted(since)[1], state.progress_at or since[0]) + state.limits.replacement_wait


# --- offers


def end_offers(state: FleetState, now: datetime) -> FleetState:
    """End the offers that expired, were taken, or were superseded by a claim; forget those after
    which the next one may be made."""
    if not state.offers:
        return state
    records = {record.claim.job: record for record in state.claims}
    offers = []
    for one in state.offers:
        record = records.get(one.job)
        is_over = bool(one.places) and not is_reserved(one, record, now)
        after = replace(one, places=(), until=min(one.until, now)) if is_over else one
        if not (is_over and _is_taken(record, one)) and now < after.until + OFFER_INTERVAL:
            offers.append(after)
    return state if tuple(offers) == state.offers else replace(state, offers=tuple(offers))


def _is_taken(record: ClaimRecord | None, offer: OfferRecord) -> bool:
    """Return whether the job was granted some of the offered nodes; its `more_at` then sets the
    time of the next offer."""
    granted = record.granted if record is not None else None
    return bool({place.node for place in granted or ()} & {place.node for place in offer.places})


@dataclass(frozen=True, slots=True)
class OfferResult:
    """The offers that one scheduling run makes, and what it needs to know to make more."""

    state: FleetState
    messages: tuple[OfferMessage, ...] = ()
    probes: tuple[NodeUse, ...] = ()
    """Nodes to be probed before more can be offered."""


def offer_nodes(state: FleetState, placement: Placement, now: datetime) -> OfferResult:
    """Offer what no claim waits for to running jobs that would take more."""
    offered = {one.job for one in state.offers}
    growing = [
        record
        for record in state.claims
        if record.claim.job not in offered
        and _takes_more(record, now)
        and not any(_is_drained(placement, place.node) for place in record.places)
    ]
    if not growing or any(record.is_waiting for record in state.claims) or why_closed(state, now):
        return OfferResult(state)
    made: list[OfferRecord] = []
    probes: list[NodeUse] = []
    for record in sorted(growing, key=claim_order):
        claim = record.claim
        choice = placement.choose_offer(record, claim.most - len(claim.keep))
        probes += choice.probes
        if choice.new and not choice.stale:  # one offer of all nodes instead of two restarts
            places = placement.offer(record, choice.new)
            until = now + OFFER_TIMEOUT
            made.append(OfferRecord(claim.job, claim.submission, claim.seq, places, until))
    if made:
        state = replace(state, offers=(*state.offers, *made))
    messages = tuple(OfferMessage(one.job, one.offer) for one in made)
    return OfferResult(state, messages, tuple(probes))


def offer_times(state: FleetState) -> list[datetime]:
    """Return when there may be something to offer, or an offer ends."""
    times = [record.claim.more_at for record in state.claims if record.claim.more_at is not None]
    times += [one.until for one in state.offers if one.places]
    return times + [one.until + OFFER_INTERVAL for one in state.offers]


def _takes_more(record: ClaimRecord, now: datetime) -> bool:
    claim = record.claim
    return (
        claim.more_at is not None
        and now >= claim.more_at
        and claim.most > len(claim.keep)
        and not record.is_closed
        and not record.is_waiting
    )


def _is_drained(placement: Placement, name: str) -> bool:
    node = placement.by_name.get(name)
    return node is not None and bool(node.record.drain or node.record.repair_drain)
