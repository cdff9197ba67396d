"""What the activity that watches a fleet knows of its nodes, and what of a probe is news.

The fleet has its nodes probed every minute for as long as it exists. Results that change nothing
are not reported to it: each would be some ten events in a history that people read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from relaunch.pool.inventory import Inventory
from relaunch.pool.nodes import INVENTORY_INTERVAL, can_read_inventory
from relaunch.pool.placement import NodeUse
from relaunch.pool.state import NodeProbe, NodeRecord

DIGEST_BYTES = 6
"""A change stays unseen with a probability of 2^-48. The input of a watch may have ten thousand
nodes with two digests each."""


@dataclass(frozen=True, slots=True)
class KnownNode:
    """What the fleet knew of a node when its watch began."""

    node: str
    probe: str = ""
    """Digest of its answer; empty: whatever it answers is news."""
    inventory: str = ""
    """Digest of its GPUs as last read; empty: whatever they are is news."""
    read_in: int | None = None
    """Seconds until its GPUs are to be read; None: not at all."""


class Digests:
    """Keeps digests while what they are of stays the same object: of ten thousand nodes they take a
    quarter of a second."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[NodeProbe | None, Inventory | None, str, str]] = {}

    def of(self, record: NodeRecord) -> tuple[str, str]:
        """Return the digests of a node's last probe and of its inventory."""
        known = self._known.get(record.name)
        if known is None or known[0] is not record.probe or known[1] is not record.inventory:
            probe = "" if record.probe is None else digest_probe(record.probe)
            known = (record.probe, record.inventory, probe, digest_inventory(record.inventory))
            self._known[record.name] = known
        return known[2], known[3]


def list_known(uses: Iterable[NodeUse], now: datetime, digests: Digests) -> tuple[KnownNode, ...]:
    """Return what the fleet knows of nodes."""
    return tuple(_know(use, now, digests) for use in uses)


def _know(use: NodeUse, now: datetime, digests: Digests) -> KnownNode:
    record = use.record
    probe, inventory = digests.of(record)
    # Whether ranks that belong to no job are still there counts, and not only that it changes: a
    # probe that was under way when their job ended proves nothing against it.
    is_open = use.has_unheld_ranks()
    read_in = None
    if can_read_inventory(record, now, timedelta(0)) and not use.is_full():
        due = record.inventory_at + INVENTORY_INTERVAL if record.inventory_at else now
        read_in = max(0, int((due - now).total_seconds()))
    return KnownNode(
        record.name,
        "" if is_open else probe,
        "" if record.inventory_at is None or record.is_fault_unconfirmed else inventory,
        read_in,
    )


def digest_probe(probe: NodeProbe) -> str:
    """Return the digest of all of a probe but its inventory, which is not read with each."""
    return _digest(replace(probe, inventory=None, inventory_age=timedelta(0)))


def digest_inventory(inventory: Inventory | None) -> str:
    return _digest(inventory)


def is_news(known: KnownNode, probe: NodeProbe, *, was_pending: bool) -> bool:
    """Return whether the fleet has to learn of a probe.

    Args:
        known: What it knows of the node.
        probe: What the node answered now.
        was_pending: The reading of its GPUs had not ended at the last probe either. One that takes
            some seconds is normal, and is reported with the next probe.
    """
    if probe.inventory is not None and digest_inventory(probe.inventory) != known.inventory:
        return True
    if probe.inventory_pending and not was_pending:
        probe = replace(probe, inventory_pending=False)
    return digest_probe(probe) != known.probe


def _digest(value: Any) -> str:
    # Another build may print a type differently. Its first probes are then news, once.
    return hashlib.blake2b(repr(value).encode(), digest_size=DIGEST_BYTES).hexdigest()
