"""What must hold in every record of a simulated fleet whose nodes were examined and repaired.

Looks only at records, never at nodes.

Each violation is one sentence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.fakes.nodes import Life, SimulatedBackend, Upkeep
from tests.fakes.nodes.machine import ORDERED_LATELY


def assert_upkeep(backend: SimulatedBackend) -> None:
    """Fail with every violation."""
    found = upkeep_violations(backend.upkeep, backend.lives)
    assert not found, "\n".join(found)


def upkeep_violations(upkeep: Sequence[Upkeep], lives: Sequence[Life]) -> tuple[str, ...]:
    return (
        *held_where_ranks_lived(upkeep, lives),
        *held_twice(upkeep),
        *told_to_end_twice(upkeep),
        *rebooted_unordered(upkeep),
    )


def held_where_ranks_lived(upkeep: Iterable[Upkeep], lives: Iterable[Life]) -> tuple[str, ...]:
    """Nothing is examined, reset or rebooted while a rank lives on the node.

    And none starts during that.
    """
    found: list[str] = []
    living: dict[str, dict[tuple[object, int], None]] = {}
    held: dict[str, Upkeep] = {}
    entries: list[Upkeep | Life] = sorted([*upkeep, *lives], key=lambda entry: entry.number)
    for entry in entries:
        here = living.setdefault(entry.node, {})
        if isinstance(entry, Life):
            if entry.kind == "ended":
                here.pop((entry.token, entry.rank), None)
                continue
            here[entry.token, entry.rank] = None
            if (holder := held.get(entry.node)) is not None:
                found.append(
                    f"rank {entry.rank} of {entry.token} started on {entry.node} during "
                    f"{holder.command} {holder.id}"
                )
        elif entry.kind == "began":
            held[entry.node] = entry
        elif entry.kind == "ended":
            held.pop(entry.node, None)
        if isinstance(entry, Upkeep) and entry.id and entry.kind in ("began", "rebooted") and here:
            token, rank = next(iter(here))
            found.append(
                f"{entry.command} {entry.id} {entry.kind} on {entry.node} while rank {rank} of "
                f"{token} lived there"
            )
    return tuple(found)


def held_twice(upkeep: Iterable[Upkeep]) -> tuple[str, ...]:
    """A node has one holder at a time."""
    found: list[str] = []
    held: dict[str, Upkeep] = {}
    for entry in upkeep:
        if entry.kind == "began":
            if (holder := held.get(entry.node)) is not None:
                found.append(
                    f"{entry.command} {entry.id} began on {entry.node} during {holder.command} "
                    f"{holder.id}"
                )
            held[entry.node] = entry
        elif entry.kind == "ended":
            held.pop(entry.node, None)
    return tuple(found)


def told_to_end_twice(upkeep: Iterable[Upkeep]) -> tuple[str, ...]:
    """One boot gets the order to end once; again only long after, if it has not ended."""
    found: list[str] = []
    told: dict[tuple[str, str], Upkeep] = {}
    for entry in upkeep:
        if entry.command != "reboot" or entry.kind != "ended" or entry.reason != "done":
            continue
        before = told.get((entry.node, entry.boot_id))
        if before is not None and entry.at - before.at < ORDERED_LATELY:
            found.append(
                f"{entry.boot_id} was ordered to end for {before.id}, "
                f"and {entry.at - before.at:g} s later for {entry.id}"
            )
        told[entry.node, entry.boot_id] = entry
    return tuple(found)


def rebooted_unordered(upkeep: Iterable[Upkeep]) -> tuple[str, ...]:
    """No repair is named for a reboot that it did not order.

    And none reboots a node twice by one order.
    """
    found: list[str] = []
    ordered: dict[tuple[str, str], None] = {}
    for entry in upkeep:
        if entry.command == "reboot" and entry.kind == "ended" and entry.reason == "done":
            ordered[entry.node, entry.id] = None
        elif entry.kind == "rebooted" and entry.id:
            if (entry.node, entry.id) not in ordered:
                found.append(
                    f"{entry.node} rebooted into {entry.boot_id} for {entry.id}, which had not "
                    "ordered it"
                )
            ordered.pop((entry.node, entry.id), None)
    return tuple(found)
