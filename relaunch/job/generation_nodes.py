"""Which nodes each generation of a job was ordered to run on, so that its logs can be found.

Nothing is decided by this record: where ranks may be alive is in `launches` and `places`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_RECORDS = 64
"""Nodes keep the files of a job's newest 10 generations, and most launches change no node."""
MAX_NODES = 2048
"""Names in all records but the newest: a state with 2,048 nodes stays below 512 KiB."""


@dataclass(frozen=True, slots=True)
class GenerationNodes:
    """The nodes of generation `first` and of those after it, up to the next record."""

    first: int
    size: int
    """Number of nodes."""
    nodes: dict[int, str]
    """Nodes by group rank; in all records but the newest only those that differ from the next
    record."""


def record_nodes(
    records: tuple[GenerationNodes, ...], generation: int, nodes: tuple[str, ...]
) -> tuple[GenerationNodes, ...]:
    """Add the nodes of a generation that is ordered now; drop the oldest records beyond the limits.

    Args:
        records: Those of earlier generations, oldest first.
        generation: Its number.
        nodes: Its nodes by group rank.
    """
    newest = GenerationNodes(generation, len(nodes), dict(enumerate(nodes)))
    earlier = [one for one in records if one.first < generation]
    if not earlier:
        return (newest,)
    last = earlier.pop()
    before = find_nodes(records, last.first) or ()
    if before == nodes:
        return (*earlier, replace(last, nodes=newest.nodes))
    changed = {rank: name for rank, name in enumerate(before) if newest.nodes.get(rank) != name}
    kept = [newest]
    room = MAX_NODES
    for one in reversed((*earlier, replace(last, nodes=changed))):
        room -= len(one.nodes)
        if room < 0 or len(kept) == MAX_RECORDS:
            break
        kept.append(one)
    return tuple(reversed(kept))


def find_nodes(records: tuple[GenerationNodes, ...], generation: int) -> tuple[str, ...] | None:
    """Return the nodes of a generation by group rank; None: it is before the oldest record."""
    nodes: dict[int, str] = {}
    for one in reversed(records):
        nodes |= one.nodes
        if one.first <= generation:
            return tuple(nodes[rank] for rank in range(one.size))
    return None
