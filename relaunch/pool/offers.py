"""Offer more nodes to running jobs that would take more, and reserve them for a limited time.

Waiting claims come first: nothing is offered while there are any. Whether a job takes an offer is
its own decision.
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
"""How long the offered nodes are reserved: a job answers within seconds, or when its worker is
back."""
OFFER_AGAIN = timedelta(minutes=5)
"""From the end of an offer to the next one: a job that does not take offers keeps nodes from others
for two minutes in seven."""


def released(state: FleetState, now: datetime) -> FleetState:
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
        if not (is_over and _took(record, one)) and now < known.until + OFFER_AGAIN:
            offers.append(known)
    return state if tuple(offers) == state.offers else replace(state, offers=tuple(offers))


def _took(record: ClaimRecord | None, offer: Offered) -> bool:
    """Return whether the job was granted some of the offered nodes; its `more_at` then sets the
    time of the next offer."""
    granted = record.granted if record is not None else None
    return bool({place.node for place in granted or ()} & {place.node for place in offer.places})


def offered(
    state: FleetState, board: Board, now: datetime
) -> tuple[FleetState, list[TellOffer], list[int]]:
    """Make the offers that are possible; also return the nodes to probe before more can be made."""
    wishes = [record for record in state.claims if _wishes(state, record, now)]
    if not wishes or any(record.waits for record in state.claims) or why_closed(state, now):
        return state, [], []
    made: list[Offered] = []
    looks: list[int] = []
    for record in sorted(wishes, key=order_of):
        claim = record.claim
        ready, stale = board.offerable(record, claim.most - len(claim.keep))
        looks += [node for node in stale if is_due(state.nodes[node], now)]
        if ready and not stale:  # one offer of all nodes instead of two restarts
            made.append(
                Offered(
                    claim.job,
                    claim.submission,
                    claim.seq,
                    board.offer(record, ready),
                    now + OFFER_HOLDS,
                )
            )
    state = replace(state, offers=(*state.offers, *made)) if made else state
    return state, [TellOffer(one.job, one.offer) for one in made], looks


def offers_at(state: FleetState) -> list[datetime]:
    """Return when there may be something to offer, or an offer ends."""
    times = [record.claim.more_at for record in state.claims if record.claim.more_at is not None]
    times += [one.until for one in state.offers if one.places]
    return times + [one.until + OFFER_AGAIN for one in state.offers]


def _wishes(state: FleetState, record: ClaimRecord, now: datetime) -> bool:
    claim = record.claim
    if (
        claim.more_at is None
        or now < claim.more_at
        or claim.most <= len(claim.keep)
        or record.closed
        or record.waits
    ):
        return False
    wanted = {node.name for node in state.nodes if node.drain is not None or node.leave is not None}
    return all(one.job != claim.job for one in state.offers) and not any(
        place.node in wanted for place in record.places
    )
