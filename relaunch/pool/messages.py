"""Messages between a fleet, its jobs and its repairs.

A job does not send requests and withdrawals: each claim states all that it wants and all that it
holds, with a rising sequence number. The newest counts, so a claim that arrives twice, late or
after its own withdrawal changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from pydantic import AwareDatetime

from relaunch.access.orders import SignedText
from relaunch.evidence.causes import Cause
from relaunch.generation import LaunchedGeneration
from relaunch.spec.policy import Strategy

# --- between a job and its fleet


@dataclass(frozen=True, slots=True)
class Place:
    node: str
    address: str = ""
    gpus: tuple[int, ...] = ()
    """GPU indexes of the job's share, where other jobs may have the rest. Empty: no particular
    share (all GPUs, or the node has none)."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A job's evidence against a node. The job repeats it with each claim; job, submission,
    generation and node identify a mark."""

    node: str
    at: datetime
    generation: int
    cause: Cause
    reason: str
    code: str = ""
    gpus: tuple[str, ...] = ()
    """Bus ids."""
    isolate: bool = False
    """The evidence is against the hardware: the node is granted to no job until an examination
    finds it healthy."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Everything that a job wants from its fleet, and everything that it holds."""

    job: str
    """The job's name; its workflow id is `job/<name>`."""
    submission: int
    """A later submission of the same name replaces the earlier one and gets what that one held."""
    seq: int
    """Rises with each claim of a submission; a grant names the claim it answers."""
    nodes: int
    """Nodes wanted in total, kept ones included; the job does not run with fewer. 0: the job has
    ended and gives back everything."""
    gpus: int = 0
    """GPUs wanted on each node; 0 on a node that has GPUs: all of them."""
    priority: int = 0
    since: datetime | None = None
    """Time of submission, which orders claims of the same priority."""
    running: bool = False
    """Its ranks have run, so it wants a replacement, which comes before jobs that have not
    started."""
    keep: tuple[str, ...] = ()
    """Nodes that the job continues with; they count as granted."""
    holds: tuple[Place, ...] = ()
    """Nodes on which its ranks may live, including those of `keep`. No other job is granted
    these."""
    avoid: tuple[str, ...] = ()
    suspects: tuple[Suspect, ...] = ()
    most: int = 0
    """Nodes taken if they are available at once; the job waits only for `nodes`. Not above `nodes`:
    exactly `nodes`."""
    had: int = 0
    """Nodes of the previous generation. A spare may replace one of them, but never makes the job
    larger."""
    more_at: datetime | None = None
    """From when on the job, which runs on the nodes it keeps, may be offered more, up to `most`.
    None: `most` is wanted now."""
    stays: tuple[str, ...] = ()
    """Nodes of `keep` that the job was asked to leave and is still on; it has until the deadline of
    the request."""
    launched: tuple[LaunchedGeneration, ...] = ()
    """The launches whose ranks may live, with the timeouts after which they fence themselves. An
    entry without nodes: what the job will launch on the nodes granted to this claim. A later
    submission judges silent nodes by it."""
    submitted_by: str = ""
    """Who submitted the job, as they said. Only in claims of a job that was never launched."""
    signed: SignedText | None = None
    """The submission as its caller has signed it, if they have. The fleet does not keep it."""
    is_current: bool = False
    """It states what the job goes on with, after a change or because the fleet asks, and wants
    nothing new. Never set by release 0.1.0."""
    has_run: bool = False
    """Ranks of this submission have been launched, also if it has given its nodes back since and
    queues like a new job. Never set by release 0.1.0."""

    @property
    def max_nodes(self) -> int:
        """The most nodes that the claim can be granted."""
        return self.nodes if self.more_at is not None else max(self.nodes, self.most)


@dataclass(frozen=True, slots=True)
class FaultReport:
    """A job's evidence against nodes, sent as soon as it is known and without a claim. A repeated
    report changes nothing."""

    job: str
    submission: int
    suspects: tuple[Suspect, ...]


@dataclass(frozen=True, slots=True)
class Offer:
    """Nodes reserved for a running job that would take more. The job may claim them or ignore the
    offer."""

    submission: int
    seq: int
    """Of the claim that asked for more: an offer to an earlier claim is void."""
    nodes: tuple[str, ...]
    until: datetime


@dataclass(frozen=True, slots=True)
class Grant:
    """A fleet's answer to a claim."""

    submission: int
    seq: int
    kind: Literal["granted", "waiting", "hopeless", "yield", "behind"] = "granted"
    """hopeless: waiting cannot help. yield: give back all nodes and queue; a job that comes first
    needs them. behind: a later claim of this job is known, so the job takes a submission above
    `above`."""
    places: tuple[Place, ...] = ()
    """If granted: as many as were wanted, or more where the job would take more, kept nodes
    first."""
    reason: str = ""
    holding: tuple[str, ...] = ()
    """Nodes on which ranks of an earlier submission of this job may live; the job stops them
    first."""
    launched: tuple[LaunchedGeneration, ...] = ()
    """The launches of those ranks, as far as known. Of a node that is in none of them nothing is
    known."""
    moved: tuple[str, ...] = ()
    """Nodes of `holding` whose address or user has since changed in the fleet file. The host that
    answers for them now never saw those ranks and proves nothing about them."""
    fewer: str = ""
    """Why there are fewer nodes than the job would take, in words for people; empty if there are
    not."""
    above: int = 0
    """If behind: the highest submission of this job that the fleet knows; its own if the workflow
    was reset to before a later claim."""
    submitter: str = ""
    """Who submitted the job, as far as that is proven; empty where the fleet file has no
    `access`."""


@dataclass(frozen=True, slots=True)
class DrainRequest:
    """A request to a job to leave a node, for maintenance or because a node that jobs share has to
    be examined."""

    node: str
    reason: str
    by: str
    until: datetime
    """The deadline. The job leaves earlier at its next checkpoint or its next launch."""
    cancelled: bool = False
    """The request is withdrawn."""


# --- between a repair and its fleet


@dataclass(frozen=True, slots=True)
class PermitRequest:
    """A repair's request for permission, sent before each step that acts on its node."""

    workflow: str
    """The workflow id; `run` distinguishes successive repairs of a node."""
    run: str
    seq: int
    """Number of this request within the repair."""
    node: str
    step: Literal["reset", "reboot"]
    reason: str
    asked_at: datetime
    power: bool = False
    """The reboot is a power cycle: the node is not asked which ranks live there, and may be
    silent."""
    restarts: int = 0
    """Reboots of the node within three days by its own journal, as far as it was read."""
    job: str = ""
    """The job that ordered the repair, waits for it and counts its ranks there as gone; empty if
    none."""
    nonce: str = ""
    """Of the signature with which a person has ordered the repair; empty if there was none."""
    renews: AwareDatetime | None = None
    """`Permit.at` of the permit before this request, for an order that was not given: it no longer
    counts against the limits of the fleet. None: there was none."""


@dataclass(frozen=True, slots=True)
class Healing:
    """A reset or reboot after which an examination found the node healthy."""

    strategy: Strategy
    at: datetime
    """When it was proven carried out: faults of before say nothing about the node any more."""
    gpus: tuple[str, ...] = ()
    """Bus ids of the GPUs that were reset; empty: the whole node."""


@dataclass(frozen=True, slots=True)
class Permit:
    """The fleet's answer to a permit request."""

    run: str
    seq: int
    allowed: bool
    reason: str
    stale: bool = False
    """Refused only because the request was sent before a person ended a pause or closed the
    breaker: the node has to be examined again."""
    at: AwareDatetime | None = None
    """When it was given. None: by a fleet of 0.1.0."""
