"""One launch of all ranks of a job: the token by which nodes refuse whatever is older, and the times by which its ranks stop themselves."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True, slots=True, order=True)
class Token:
    """Names one launch of all ranks of a job; a node obeys only the highest it has seen."""

    namespace: str
    job: str
    submission: int
    """Start of the submission by the server's clock, milliseconds since 1970: later submissions are higher."""
    generation: int

    def __str__(self) -> str:
        return f"{self.namespace}/{self.job}/{self.submission}/{self.generation}"


@dataclass(frozen=True, slots=True)
class LaunchedGeneration:
    """Ranks that may be alive, and the times by which they stop themselves.

    These are what the launch ordered. A policy that changes later changes the next launch only.
    """

    submission: int
    generation: int
    nodes: tuple[str, ...]
    """Every node that it was launched on, but those that a person has declared dead."""
    size: int
    """How many nodes were launched: their supervisors ask each other."""
    fences: bool
    """The ranks stop themselves when they are cut off. False: only a proven stop ends them."""
    lease: timedelta
    fence_after: timedelta
    stop_grace: timedelta
    valid_for: timedelta
    """How long a node that was prepared may still take the order to start."""
    complete: bool = False
    """Every node has answered that its ranks run: no order to start is on its way any more."""
    stopped: tuple[str, ...] = ()
    """Those of `nodes` on which this generation is proven stopped."""
