"""What agents saw of ranks: observations, the evidence that a diagnosis is made of. What a job acts on are events."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field


@dataclass(frozen=True, slots=True)
class RankError:
    """An uncaught exception as the rank wrote it into TORCHELASTIC_ERROR_FILE."""

    message: str
    traceback: str = ""
    timestamp: float | None = None
    """Unix seconds by the clock of the rank's node; the smallest one is the root cause (torchelastic's rule)."""


@dataclass(frozen=True, slots=True)
class EcsStop:
    """Why Amazon ECS stopped the task that was a rank, in its own words."""

    stop_code: str | None
    reason: str
    """The task's, and those of its containers."""


@dataclass(frozen=True, slots=True)
class RankExited:
    node: str
    rank: int
    local_rank: int
    exit_code: int | None
    """0 to 255; None when a signal ended the rank, or nobody knows how it ended."""
    signal: int | None
    at: datetime
    """Receiver's clock."""
    stopped: bool = False
    """The agent had already begun to stop this rank."""
    error: RankError | None = None
    error_unreadable: str | None = None
    """Why an error file that exists could not be read."""
    log_tail: tuple[str, ...] = ()
    kernel: tuple[str, ...] = ()
    """Lines of the node's kernel log since the generation began that are evidence, the oldest first; none for a rank that was stopped."""
    kernel_unreadable: str | None = None
    """Why that log, or a part of it, was not read: what is not in `kernel` may be in the log."""
    pid: int | None = None
    """By which the kernel names it."""
    launcher: bool = False
    """It was not a rank: the launcher of the node's ranks ended, and none of them is known to have failed before it."""
    ecs: EcsStop | None = None
    """Its container was a task of ECS."""
    kind: Literal["RankExited"] = "RankExited"

    @property
    def failed(self) -> bool:
        return self.exit_code != 0


@dataclass(frozen=True, slots=True)
class RanksFenced:
    """The node stopped its own ranks, because nobody who might know better could be asked, or somebody did know better."""

    node: str
    at: datetime
    why: str
    reason: str
    kind: Literal["RanksFenced"] = "RanksFenced"


@dataclass(frozen=True, slots=True)
class RanksVanished:
    """The ranks are gone and nobody saw how: the node rebooted, or their keeper died."""

    node: str
    at: datetime
    reason: str
    rebooted: bool = False
    kernel: tuple[str, ...] = ()
    kernel_unreadable: str | None = None
    """Both as in RankExited."""
    kind: Literal["RanksVanished"] = "RanksVanished"


Observation = Annotated[RankExited | RanksFenced | RanksVanished, Field(discriminator="kind")]
