"""What a fleet orders: each order once for each state that was settled. Who carries it out is the workflow."""

from __future__ import annotations

from dataclasses import dataclass, field

from relaunch.pool.messages import Grant, Offer, Permit, Withdraw
from relaunch.pool.state import FleetState
from relaunch.spec.policy import Strategy


@dataclass(frozen=True, slots=True)
class Look:
    """Look at these nodes now: somebody waits for them, or it is time. Not ordered again while one is under way."""

    nodes: tuple[str, ...]
    read: tuple[str, ...] = ()
    """Of these also the GPUs: what they are, and who computes there."""


@dataclass(frozen=True, slots=True)
class TellJob:
    job: str
    grant: Grant


@dataclass(frozen=True, slots=True)
class TellOffer:
    job: str
    offer: Offer


@dataclass(frozen=True, slots=True)
class AskToLeave:
    job: str
    withdraw: Withdraw


@dataclass(frozen=True, slots=True)
class AskToClaim:
    """This fleet does not know what the job holds."""

    job: str


@dataclass(frozen=True, slots=True)
class Reclaim:
    """Stop whatever ranks of this submission, and of earlier ones, live on these nodes."""

    job: str
    submission: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StartRepair:
    node: str
    reason: str
    gpus: tuple[str, ...] = ()
    strategy: Strategy | None = None
    """None: what an examination calls for."""
    after_reboot: bool = False
    """It has been silent since a reboot."""


@dataclass(frozen=True, slots=True)
class TellRepair:
    workflow: str
    permit: Permit


Order = Look | TellJob | TellOffer | AskToLeave | AskToClaim | Reclaim | StartRepair | TellRepair


@dataclass(frozen=True, slots=True)
class Settled:
    state: FleetState
    orders: tuple[Order, ...] = field(default_factory=tuple)
