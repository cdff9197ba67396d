"""Where a generation was started, and what an agent's answer proves about its ranks.

Only an agent on the machine that runs the processes, under the user who started them and with the
state from which they were started, can report that they are gone. Any other agent has never seen
them: its answer proves nothing, and counts as silence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from relaunch.generation import Token

MAX_LETTERS = 256
"""Maximum number of characters of one part of a place, as an agent reports it.

Nodes that share a machine append their own boot id to the kernel's.
"""
MAX_UID = 2**32
BOOT_DIGITS = 12
SHOWN_DIGITS = 8


@dataclass(frozen=True, slots=True)
class AgentPlace:
    """Where an agent carries out the orders for one job."""

    machine: str
    boot_id: str
    uid: int
    state: str
    """The id of this user's state of the job there; empty: there is none."""

    @property
    def text(self) -> str:
        """The place as a short text: the state of a job has one for each of up to 2,048 nodes."""
        return f"{self.machine} {self.boot_id} {self.uid} {self.state}"

    @classmethod
    def from_text(cls, text: str) -> AgentPlace:
        machine, boot_id, uid, state = text.split(" ")
        return cls(machine, boot_id, int(uid), state)


MOVED = ""
"""A place of an earlier submission, whose address or user the fleet file has changed since."""


@dataclass(frozen=True, slots=True)
class StartedPlaces:
    """The places of one generation's nodes."""

    submission: int
    generation: int
    by_node: dict[str, str]
    """`AgentPlace.text` by node, or MOVED."""


def parse_place(value: object) -> AgentPlace | None:
    """Return the place that an agent reports; None: it reports none, or an invalid one."""
    if not isinstance(value, Mapping):
        return None
    texts = [value.get(name) for name in ("machine", "boot_id", "state")]
    uid = value.get("uid")
    if isinstance(uid, bool) or not isinstance(uid, int) or not 0 <= uid < MAX_UID:
        return None
    words = [text for text in texts if isinstance(text, str) and len(text) <= MAX_LETTERS]
    if len(words) < len(texts) or any(not word.isprintable() or " " in word for word in words):
        return None
    machine, boot_id, state = words
    if not machine or not boot_id:
        return None
    return AgentPlace(
        machine, hashlib.sha256(boot_id.encode()).hexdigest()[:BOOT_DIGITS], uid, state
    )


def explain_doubt(
    node: str, generation: int, started: AgentPlace, answering: AgentPlace | None
) -> str | None:
    """Return why an answer proves nothing about ranks started at `started`; None: it does.

    Another boot of the same place is proof as well: the ranks ended with the boot before it.
    """
    if answering is None:
        return (
            f"{node} answers without saying where it runs, "
            f"so whether generation {generation} was started there is not known"
        )
    if answering.machine != started.machine:
        was, now = started.machine[:SHOWN_DIGITS], answering.machine[:SHOWN_DIGITS]
        return (
            f"{node} answers, but from another machine than the one "
            f"generation {generation} was started on (machine {now}, was {was})"
        )
    if answering.uid != started.uid:
        return (
            f"{node} answers, but as another user than the one generation {generation} "
            f"was started as (uid {answering.uid}, was {started.uid})"
        )
    if not started.state or answering.state != started.state:
        return (
            f"{node} answers, but its agent does not have the state that generation {generation} "
            "was started from: it was deleted or moved, or this is another host or another server"
        )
    return None


def find_doubt(
    places: Iterable[StartedPlaces], node: str, answering: AgentPlace | None
) -> str | None:
    """Return why an answer for `node` proves nothing about a generation that may be alive there.

    None: it is proof, or it is not known where the generations of that node were started.
    """
    for one in places:
        if (text := one.by_node.get(node)) is not None:
            if text == MOVED:
                return (
                    f"{node} answers, but the fleet file had another address or user for it "
                    "when ranks of an earlier submission were started there"
                )
            doubt = explain_doubt(node, one.generation, AgentPlace.from_text(text), answering)
            if doubt is not None:
                return doubt
    return None


def explain_forgotten(
    places: Iterable[StartedPlaces], node: str, generation: int, answering: AgentPlace | None
) -> str | None:
    """Return why the answer "never prepared here" proves nothing about `generation`; None: it does.

    The place that started the generation would know it, unless its files have been removed. After
    a reboot that does not matter.
    """
    doubt = find_doubt(places, node, answering)
    if doubt is not None or answering is None:
        return doubt
    for one in places:
        text = one.by_node.get(node) if one.generation == generation else None
        if text is not None and answering.boot_id == AgentPlace.from_text(text).boot_id:
            return (
                f"{node} does not know generation {generation} any more, "
                "which was started there: its files were removed"
            )
    return None


def has_rebooted(
    places: Iterable[StartedPlaces], token: Token, node: str, answering: AgentPlace | None
) -> bool:
    """Return whether a node answers from a later boot than the one a generation was started in."""
    own = token.submission, token.generation
    return answering is not None and any(
        text != MOVED and AgentPlace.from_text(text).boot_id != answering.boot_id
        for one in places
        if (one.submission, one.generation) == own and (text := one.by_node.get(node)) is not None
    )


def limit_places(
    places: Iterable[StartedPlaces], nodes: Iterable[str]
) -> tuple[StartedPlaces, ...]:
    """Return the places, limited to these nodes."""
    wanted = set(nodes)
    kept = []
    for one in places:
        by_node = {node: text for node, text in one.by_node.items() if node in wanted}
        if by_node:
            kept.append(replace(one, by_node=by_node))
    return tuple(kept)


def record_places(
    places: tuple[StartedPlaces, ...], started: StartedPlaces, maybe_alive: Iterable[str]
) -> tuple[StartedPlaces, ...]:
    """Add where a generation may have been started, and keep only nodes where ranks may be alive.

    A proof that the newer generation is gone from a place also covers all older ones at that place.
    """
    others, own = [], dict(started.by_node)
    for one in places:
        if (one.submission, one.generation) == (started.submission, started.generation):
            own = {**one.by_node, **own}
    for one in places:
        if (one.submission, one.generation) != (started.submission, started.generation):
            left = {node: text for node, text in one.by_node.items() if own.get(node) != text}
            others.append(replace(one, by_node=left))
    return limit_places((*others, replace(started, by_node=own)), maybe_alive)
