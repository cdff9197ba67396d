"""More nodes for jobs that run well with fewer than they would take: who is offered what, and until when it is kept for them.

Whoever waits for nodes comes first: nothing is offered then. What a job makes of an offer is its own decision.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from relaunch.pool.allocate import order_of
from relaunch.pool.explain import why_closed
from relaunch.pool.orders import TellOffer
from relaunch.pool.placement import Board, holds
from relaunch.pool.probing import is_due
from relaunch.pool.state import ClaimRecord, FleetState, Offered

OFFER_HOLDS = timedelta(minutes=2)
"""How long nobody else gets the nodes: a job answers within seconds, or when its worker is back."""
OFFER_AGAIN = timedelta(minutes=5)
"""From the end of an offer to the next one: a job that does not take it keeps nodes from others for two minutes in seven."""


def released(state: FleetState, now: datetime) -> FleetState:
    """End the offers that are over, were taken, or were overtaken by a claim; forget those after which there may be another."""
    if not state.offers:
        return state
    records = {record.claim.job: record for record in state.claims}
    offers = []
    for one in state.offers:
        record = records.get(one.job)
        is_over = bool(one.places) and not holds(one, record, now)
        known = replace(one, places=(), until=min(one.until, now)) if is_over else one
        if not (is_over and _took(record, one)) and now < known.until + OFFER_AGAIN:
            offers.append(known)
    return state if tuple(offers) == state.offers else replace(state, offers=tuple(offers))


def _took(record: ClaimRecord | None, offer: Offered) -> bool:
    """Whether it has some of them now: how soon it takes more after that is its own matter."""
    granted = record.granted if record is not None else None
    return bool({place.node for place in granted or ()} & {place.node for place in offer.places})


def offered(state: FleetState, board: Board, now: datetime) -> tuple[FleetState, list[TellOffer], list[int]]:
    """Make the offers that can be made; also the nodes to look at before more of them can."""
    wishes = [record for record in state.claims if _wishes(state, record, now)]
    if not wishes or any(record.waits for record in state.claims) or why_closed(state, now):
        return state, [], []
    made: list[Offered] = []
    looks: list[int] = []
    for record in sorted(wishes, key=order_of):
        claim = record.claim
        ready, stale = board.offerable(record, claim.most - len(claim.keep))
        looks += [node for node in stale if is_due(state.nodes[node], now)]
        if ready and not stale:  # one offer of all rather than two restarts
            made.append(Offered(claim.job, claim.submission, claim.seq, board.offer(record, ready), now + OFFER_HOLDS))
    state = replace(state, offers=(*state.offers, *made)) if made else state
    return state, [TellOffer(one.job, one.offer) for one in made], looks


def offers_at(state: FleetState) -> list[datetime]:
    """When there may be something to offer, or an offer ends."""
    times = [record.claim.more_at for record in state.claims if record.claim.more_at is not None]
    times += [one.until for one in state.offers if one.places]
    return times + [one.until + OFFER_AGAIN for one in state.offers]


def _wishes(state: FleetState, record: ClaimRecord, now: datetime) -> bool:
    claim = record.claim
    if claim.more_at is None or now < claim.more_at or claim.most <= len(claim.keep) or record.closed or record.waits:
        return False
    wanted = {node.name for node in state.nodes if node.drain is not None or node.leave is not None}
    return all(one.job != claim.job for one in state.offers) and not any(place.node in wanted for place in record.places)
