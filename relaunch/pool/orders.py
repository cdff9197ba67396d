"""Orders of a fleet. Settling a state gives each order once; the workflow carries them out."""

from __future__ import annotations

from dataclasses import dataclass, field

from relaunch.pool.messages import Grant, Offer, Permit, Withdraw
from relaunch.pool.state import FleetState
from relaunch.spec.policy import Strategy


@dataclass(frozen=True, slots=True)
class Look:
    """Probe these nodes now: a claim waits for them, or a probe is due. Not ordered again while one
    is under way."""

    nodes: tuple[str, ...]
    read: tuple[str, ...] = ()
    """Those of the nodes whose GPUs are also read: their inventory and the processes on them."""


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
    """Ask a job to claim again, because this fleet does not know what the job holds."""

    job: str


@dataclass(frozen=True, slots=True)
class Reclaim:
    """Stop all ranks of this submission and of earlier ones that live on these nodes."""

    job: str
    submission: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StartRepair:
    node: str
    reason: str
    gpus: tuple[str, ...] = ()
    strategy: Strategy | None = None
    """None: the strategy that an examination calls for."""
    after_reboot: bool = False
    """The node has been silent since a reboot."""


@dataclass(frozen=True, slots=True)
class TellRepair:
    workflow: str
    permit: Permit


Order = Look | TellJob | TellOffer | AskToLeave | AskToClaim | Reclaim | StartRepair | TellRepair


@dataclass(frozen=True, slots=True)
class Settled:
    state: FleetState
    orders: tuple[Order, ...] = field(default_factory=tuple)
