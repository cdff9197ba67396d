"""Defines the input of a watch, its report, and the heartbeat that it sends while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from relaunch.generation import Token
from relaunch.job.accounts import RunFigures
from relaunch.job.events import Event
from relaunch.job.hang import Pace
from relaunch.job.places import StartedPlaces
from relaunch.spec.job import JobSpec
from relaunch.spec.policy import HangLimits, StragglerLimits, Timeouts


@dataclass(frozen=True, slots=True)
class WatchedCheckpoints:
    """A folder of the first node in which a watch looks for new checkpoints."""

    directory: str
    workdir: str | None
    pattern: str
    """The regular expression of a checkpoint's name, with a group `step`."""


@dataclass(frozen=True, slots=True)
class WarmSpares:
    """What spares need to know to import ahead for a job."""

    spec: JobSpec
    nodes: int
    """How many the job has."""
    max_restarts: int
    gpus: tuple[int, ...] = ()
    """Indices of the GPUs that it would be given on an unused node; empty: no particular ones."""


@dataclass(frozen=True, slots=True)
class WatchRanksInput:
    token: Token
    fleet: str
    nodes: tuple[str, ...]
    """The nodes of this shard."""
    ranks_per_node: int
    """Processes per node whose exits the node reports: if the ranks have a launcher, only that one
    process."""
    launched_at: datetime
    timeouts: Timeouts
    hang: HangLimits
    after_seq: dict[str, int] = field(default_factory=dict)
    exited: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Ranks by node that are known to have exited with 0. Their observations are before `after_seq`
    and are not sent again."""
    lost: tuple[str, ...] = ()
    """Nodes already reported unreachable; reported again only when they return."""
    launched: bool = True
    """Whether ranks were started on every node. If not, some node may never have had any."""
    elsewhere: tuple[str, ...] = ()
    """Those of `lost` already reported as answering from another place than where their ranks were
    started."""
    lost_in_others: bool = False
    """Whether nodes of the job in other shards are lost."""
    hang_known: bool = False
    """Whether to report no hang: the job already waits for a lost node."""
    report_at_step: int | None = None
    progress_expected: bool = False
    report_checkpoint: bool = False
    """Whether to report the next finished checkpoint, because the job waits for one."""
    first_rank: int | None = None
    """Number of the first process of the first node; each node has the next `ranks_per_node`. None:
    not known."""
    world_size: int = 0
    """Ranks of the whole job. Launchers are numbered after them."""
    places: tuple[StartedPlaces, ...] = ()
    """Where ranks may be alive on these nodes, as far as that is known. An answer from another
    place counts as silence."""
    training_ranks_per_node: int = 0
    """Ranks per node, also where a launcher starts them; 0: `ranks_per_node`."""
    others: tuple[str, ...] = ()
    """The job's nodes in other shards. The ranks there are looked at as well before training counts
    as hung."""
    judges: bool = True
    """Whether this watch may decide a hang by what ranks do. Of several shards one does, with the
    job's first node: it looks at all ranks, and a shard whose ranks all wait knows nothing."""
    in_lockstep: bool = True
    """Whether no rank can go on without the others."""
    stragglers: StragglerLimits = field(default_factory=lambda: StragglerLimits(action="off"))
    """When to report nodes that are slower than the others of the shard."""
    slow: tuple[str, ...] = ()
    """Nodes already reported as slow, of this generation."""
    checkpoints: WatchedCheckpoints | None = None
    """Where to look for checkpoints, for as long as no rank reports any. None: nowhere."""
    warm: WarmSpares | None = None
    """What the spares of the fleet are to import ahead; None: another shard sees to it, or the job
    never starts warm."""


@dataclass(frozen=True, slots=True)
class WatchReport:
    events: tuple[Event, ...]
    """In the order in which a job should handle them."""
    after_seq: dict[str, int]
    exited: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Ranks by node that have exited with 0."""
    all_succeeded: bool = False
    """Every rank of the shard exited with 0."""
    run: str = ""
    """The run of the workflow for which it watched; empty: not known."""


@dataclass(frozen=True, slots=True)
class MissingProgress:
    """Why no step is known: what a rank printed last, or why its progress cannot be read."""

    node: str
    rank: int
    lines: tuple[str, ...] = ()
    """Empty: no rank of the node has printed anything."""
    unreadable: str = ""


@dataclass(frozen=True, slots=True)
class WatchHeartbeat:
    """The state of a running watch, shown to people and left to its successor."""

    generation: int
    step: int | None
    at: datetime
    rate: float | None
    """Steps per second, over the newest advances."""
    values: dict[str, float]
    """Values that the lowest reporting rank reports beside its step, such as the loss."""
    reachable: int
    unreachable: tuple[str, ...]
    pace: Pace
    checkpoint: int | None = None
    """The step of the newest checkpoint that is finished by all ranks that report theirs."""
    based: bool = False
    """Whether it is known which checkpoint existed when this watch began: `baseline`, or none."""
    baseline: int | None = None
    stalled: tuple[str, ...] = ()
    """Nodes whose disk hangs, or where the process that reaps ranks was stopped: their exits may
    not be reported."""
    missing: MissingProgress | None = None
    """None: a step is known, or the nodes give no hint."""
    figures: RunFigures | None = None
    sent_at: datetime | None = None
    """By the clock of the worker that sent it."""
    boot: str = ""
    """The boot of that worker's machine; empty: unknown."""
    wall_offset: float = 0.0
    """`read_wall_offset` there, in seconds."""
