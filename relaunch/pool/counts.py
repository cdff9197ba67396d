"""Count a fleet: what metrics show of it, in a few hundred bytes however many nodes it has."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime

from relaunch.pool.state import FleetState
from relaunch.pool.tenants import STATES, node_state, tenants


@dataclass(frozen=True, slots=True)
class FleetCounts:
    nodes: dict[str, int] = field(default_factory=dict)
    """The number of nodes in each of `STATES`; empty: not known, because not every node has been
    probed since this run of the fleet began."""
    breaker_open: bool = False
    repairs_paused: bool = False
    waiting_jobs: int = 0
    """Jobs whose claim waits for nodes."""
    waiting_since: datetime | None = None
    """Since when the first of them has waited."""


def count_fleet(state: FleetState) -> FleetCounts:
    """Count the nodes by state, and the jobs that wait for nodes.

    Nodes that the fleet file no longer names are left out.
    """
    nodes: dict[str, int] = {}
    if state.is_probed:
        here = tenants(state)
        counted = Counter(
            node_state(node, here[node.name]) for node in state.nodes if not node.is_removed
        )
        nodes = {name: counted[name] for name in STATES}
    waiting = [record for record in state.claims if record.is_waiting]
    since = [record.waiting_since for record in waiting if record.waiting_since is not None]
    return FleetCounts(
        nodes,
        state.breaker.is_open,
        bool(state.breaker.paused),
        len(waiting),
        min(since, default=None),
    )
