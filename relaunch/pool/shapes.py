"""What a claim can use of a node, and what a node offers once jobs and repairs have ended."""

from __future__ import annotations

from relaunch.pool.state import NodeRecord

Shape = tuple[int, bool, frozenset[str]]
"""What a claim can use: GPUs on each node, whether spares too, and the nodes to avoid."""
Kind = tuple[bool, int, bool]
"""Whether the node is a spare, its GPUs without those that foreign processes use (the fleet does
not control these), and whether there are no such GPUs."""


def serves(kind: Kind, shape: Shape) -> bool:
    spare, gpus, whole = kind
    need, spares, _ = shape
    return gpus >= need and (whole or need > 0) and (spares or not spare)


def fits(record: NodeRecord, shape: Shape, *, with_avoided: bool = False) -> bool:
    need, spares, avoid = shape
    if record.spec.gpus < need or (record.spec.spare and not spares):
        return False
    return with_avoided or record.name not in avoid
