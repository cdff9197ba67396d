"""Say which jobs have each node of a fleet, and in which one of `STATES` the node is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from relaunch.pool.messages import Place
from relaunch.pool.state import FleetState, NodeRecord, NodeStatus

STATES = ("free", "busy", "suspect", "repairing", "quarantined", "draining", "silent", "held")


@dataclass(frozen=True, slots=True)
class Tenant:
    """A job that has a node or a part of it, or is offered it."""

    job: str
    submission: int
    place: Place | None
    """None: its ranks run there without a claim on the node."""
    offered: datetime | None = None
    """Set if the job is only offered the node in order to grow: the node is reserved for it until
    then."""


Tenants = Mapping[str, tuple[Tenant, ...]]


def tenants(state: FleetState) -> Tenants:
    """Return the tenants of each node: by their claims, else as the node's agent reports."""
    found: dict[str, list[Tenant]] = {}
    for record in state.claims:
        for place in record.places:
            found.setdefault(place.node, []).append(
                Tenant(record.claim.job, record.claim.submission, place)
            )
    for node in state.nodes:
        here = found.setdefault(node.name, [])
        here += [
            Tenant(offer.job, offer.submission, place, offer.until)
            for offer in state.offers
            for place in offer.places
            if place.node == node.name
        ]
        for living in node.probe.generations if node.probe else ():
            if all(tenant.job != living.job for tenant in here):
                here.append(Tenant(living.job, living.submission, None))
    return {node: tuple(here) for node, here in found.items()}


def jobs_on(here: Sequence[Tenant]) -> list[str]:
    return list(dict.fromkeys(tenant.job for tenant in here if tenant.offered is None))


def is_claimed(here: Sequence[Tenant]) -> bool:
    """Return whether a job claims the node. Ranks that only its last probe has may be gone."""
    return any(tenant.place is not None and tenant.offered is None for tenant in here)


def node_state(record: NodeRecord, here: Sequence[Tenant]) -> str:
    """Return one of STATES; what keeps the node from jobs takes precedence."""
    if record.drain is not None and jobs_on(here):
        return "draining"
    if record.status is not NodeStatus.IN_SERVICE:
        return str(record.status)
    if record.repair:
        return "repairing"
    if record.probe is None or record.probe.silent:
        return "silent"
    if record.probe.busy:
        return "held"
    # One with a fault that is not confirmed yet, or beside a foreign process: it is not granted.
    return "busy" if jobs_on(here) else "suspect" if record.fault else "free"
