"""What a watch is asked for, what it reports, and what it shows while it goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from relaunch.generation import Token
from relaunch.job.events import Event
from relaunch.job.hang import Pace
from relaunch.job.places import StartedPlaces
from relaunch.spec.policy import HangLimits, Timeouts


@dataclass(frozen=True, slots=True)
class WatchRanksInput:
    token: Token
    fleet: str
    nodes: tuple[str, ...]
    """Of this shard."""
    ranks_per_node: int
    """Whose exits a node tells: where the ranks have a launcher, that is the one process."""
    launched_at: datetime
    timeouts: Timeouts
    hang: HangLimits
    after_seq: dict[str, int] = field(default_factory=dict)
    exited: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Ranks by node that are known to have exited with 0: their observations are behind `after_seq` and come no more."""
    lost: tuple[str, ...] = ()
    """Nodes already reported unreachable: reported again only when they return."""
    elsewhere: tuple[str, ...] = ()
    """Those of `lost` of which it was reported that they answer from elsewhere."""
    hang_known: bool = False
    """A hang would be no news: the job waits for a lost node."""
    report_at_step: int | None = None
    progress_expected: bool = False
    report_checkpoint: bool = False
    """Somebody waits for a checkpoint: the next one that is finished is reported."""
    first_rank: int | None = None
    """Number of the first process of the first node; each node has the next `ranks_per_node`. None: not known."""
    world_size: int = 0
    """Ranks of the whole job: a launcher is numbered behind them."""
    places: tuple[StartedPlaces, ...] = ()
    """Where ranks may live on these nodes, as far as that is known: an answer from elsewhere is silence."""


@dataclass(frozen=True, slots=True)
class WatchReport:
    events: tuple[Event, ...]
    """In the order in which a job should take them."""
    after_seq: dict[str, int]
    exited: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Ranks by node that have exited with 0."""
    all_succeeded: bool = False
    """Every rank of the shard exited with 0."""


@dataclass(frozen=True, slots=True)
class WatchHeartbeat:
    """What a running watch shows to people, and leaves to its successor."""

    generation: int
    step: int | None
    at: datetime
    rate: float | None
    """Steps a second, over the newest advances."""
    values: dict[str, float]
    """What the lowest reporting rank said beside its step, such as the loss."""
    reachable: int
    unreachable: tuple[str, ...]
    pace: Pace
    checkpoint: int | None = None
    """The step of the newest one that is finished by all ranks that tell of theirs."""
    based: bool = False
    """It is known which checkpoint there was when this watch began: `baseline`, or none."""
    baseline: int | None = None
    stalled: tuple[str, ...] = ()
    """Nodes whose disk hangs, or where the process that reaps ranks was stopped: exits there may not be told."""
