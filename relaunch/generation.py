"""One launch of all ranks of a job (a generation): its token and its fencing times.

Nodes use the token to refuse orders of older generations; by the fencing times the ranks stop
themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True, slots=True, order=True)
class Token:
    """The token of one launch of all ranks of a job; a node obeys only the highest it has seen."""

    namespace: str
    job: str
    submission: int
    """Start of the submission by the server's clock, in milliseconds since 1970: later submissions
    are higher."""
    generation: int

    def __str__(self) -> str:
        return f"{self.namespace}/{self.job}/{self.submission}/{self.generation}"


@dataclass(frozen=True, slots=True)
class LaunchedGeneration:
    """A generation whose ranks may be alive, and the times by which they stop themselves.

    These are the values that the launch ordered. A policy that changes later affects only the next
    launch.
    """

    submission: int
    generation: int
    nodes: tuple[str, ...]
    """Every node that it was launched on, except those that a person has declared dead."""
    size: int
    """Number of nodes launched; their supervisors query each other."""
    fences: bool
    """Whether the ranks stop themselves when they are cut off. If false, only a proven stop ends
    them."""
    lease: timedelta
    fence_after: timedelta
    stop_grace: timedelta
    valid_for: timedelta
    """How long a prepared node may still accept the order to start."""
    complete: bool = False
    """Every node has answered that its ranks run: no order to start is in flight any more."""
    stopped: tuple[str, ...] = ()
    """Those of `nodes` on which this generation is proven stopped."""
