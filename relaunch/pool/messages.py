"""What a fleet and its jobs and repairs say to each other.

A job does not send requests and withdrawals: each message says all that it wants and all that it holds, with a number that rises. The
newest counts, so one that comes twice, late or after its own withdrawal changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from relaunch.evidence.causes import Cause
from relaunch.generation import LaunchedGeneration

# --- between a job and its fleet --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    node: str
    address: str = ""
    gpus: tuple[int, ...] = ()
    """The job's share, by index, where others may have the rest; empty: no part in particular (all of them, or the node has none)."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """What a job knows against a node. It says it again with each claim; a mark is one by job, submission, generation and node."""

    node: str
    at: datetime
    generation: int
    cause: Cause
    reason: str
    code: str = ""
    gpus: tuple[str, ...] = ()
    """By bus id."""
    isolate: bool = False
    """The evidence is against the hardware: nobody gets this node before it was examined and found healthy."""


@dataclass(frozen=True, slots=True)
class Claim:
    """All that a job wants of its fleet, and all that it has."""

    job: str
    """Its name; its workflow is `job/<name>`."""
    submission: int
    """Of one name the later one takes the place of the earlier one, and gets what that one held."""
    seq: int
    """Rises with each claim of a submission; a grant names the claim it answers."""
    nodes: int
    """Wanted in all, those that are kept included; with fewer it does not run. 0: the job has ended and gives everything back."""
    gpus: int = 0
    """Wanted on each node; 0 on a node that has GPUs: all of them."""
    priority: int = 0
    since: datetime | None = None
    """Submitted: first come, first served."""
    running: bool = False
    """Its ranks have run: it wants a replacement, which comes before whoever has not begun."""
    keep: tuple[str, ...] = ()
    """Nodes it goes on with; they count as granted."""
    holds: tuple[Place, ...] = ()
    """Nodes on which ranks of it may live, those of `keep` included. Nobody else gets what is here."""
    avoid: tuple[str, ...] = ()
    suspects: tuple[Suspect, ...] = ()
    most: int = 0
    """Taken, where they are there at once: nobody waits for more than `nodes`. Not above `nodes`: those and no more."""
    had: int = 0
    """Nodes of the generation before: a spare may take the place of one of those, and makes no job larger."""
    more_at: datetime | None = None
    """It runs on what it keeps, and may be offered more, up to `most`, from then on. None: `most` is wanted now."""
    stays: tuple[str, ...] = ()
    """Those of `keep` that it was asked to leave and is on still: it has a while for that."""
    launched: tuple[LaunchedGeneration, ...] = ()
    """By which times ranks of it stop themselves, where they may live. Without nodes: what it will
    launch on the nodes that this claim is granted. A later submission judges silent nodes by it."""

    @property
    def up_to(self) -> int:
        """What it can be granted."""
        return self.nodes if self.more_at is not None else max(self.nodes, self.most)


@dataclass(frozen=True, slots=True)
class FaultReport:
    """What a job knows against nodes, said as soon as it is known and without a claim. A report that comes twice changes nothing."""

    job: str
    submission: int
    suspects: tuple[Suspect, ...]


@dataclass(frozen=True, slots=True)
class Offer:
    """Nodes that are kept for a running job that would take more of them. It may claim them, or do nothing."""

    submission: int
    seq: int
    """Of the claim that said so: an offer to an earlier one means nothing any more."""
    nodes: tuple[str, ...]
    until: datetime


@dataclass(frozen=True, slots=True)
class Grant:
    """What a fleet answers a claim."""

    submission: int
    seq: int
    kind: Literal["granted", "waiting", "hopeless", "yield", "behind"] = "granted"
    """hopeless: no wait can help. yield: give back what you hold and queue; somebody who comes first needs it.
    behind: a later submission of this job is known, and this one takes a number above `above`."""
    places: tuple[Place, ...] = ()
    """When granted: as many as were wanted, or more where more would be taken, those that were kept first."""
    reason: str = ""
    holding: tuple[str, ...] = ()
    """Nodes on which ranks of an earlier submission of this job may live: it stops them first."""
    launched: tuple[LaunchedGeneration, ...] = ()
    """What is known of those ranks. Of a node that is in none of these nothing is known."""
    moved: tuple[str, ...] = ()
    """Of `holding`, nodes whose address or user has changed in the fleet file since: what answers
    for them now never saw those ranks, and proves nothing of them."""
    fewer: str = ""
    """Why there are fewer than the job would take, in words for people; empty: there are not."""
    above: int = 0
    """When behind: the highest submission of this job that the fleet knows."""


@dataclass(frozen=True, slots=True)
class Withdraw:
    """A job is asked to leave a node: for maintenance, or because it has to be examined and others were on it too."""

    node: str
    reason: str
    by: str
    until: datetime
    """When it has to have left; sooner at its next checkpoint, or when it launches anew anyway."""
    withdrawn: bool = False
    """Nobody asks that any more."""


# --- between a repair and its fleet


@dataclass(frozen=True, slots=True)
class PermitRequest:
    """A repair asks before each step that acts on its node."""

    workflow: str
    """Its id; `run` tells one repair of a node from the next."""
    run: str
    seq: int
    """Of this repair's requests."""
    node: str
    step: Literal["reset", "reboot"]
    reason: str
    asked_at: datetime
    power: bool = False
    """The reboot is a power cycle: the node is not asked who lives there, and may be silent."""
    restarts: int = 0
    """Of the node, within three days, by its own journal, as far as it was read."""
    job: str = ""
    """Which ordered the repair, waits for it and counts its ranks there as gone; empty: none did."""


@dataclass(frozen=True, slots=True)
class Permit:
    """The answer to it."""

    run: str
    seq: int
    allowed: bool
    reason: str
    stale: bool = False
    """Not allowed only because it was asked before a person ended a pause or closed the breaker: what is true by now is to be examined."""
