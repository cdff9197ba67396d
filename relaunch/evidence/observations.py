"""What agents observed of ranks: the evidence for a diagnosis.

A job does not act on observations, but on the events that carry them.
"""

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
    """Unix seconds by the clock of the rank's node.

    The error with the smallest one is the root cause (torchelastic's rule).
    """


@dataclass(frozen=True, slots=True)
class EcsStop:
    """Why Amazon ECS stopped the task of a rank, in the words of ECS."""

    stop_code: str | None
    reason: str
    """The reason of the task and those of its containers."""


@dataclass(frozen=True, slots=True)
class RankExited:
    node: str
    rank: int
    local_rank: int
    exit_code: int | None
    """0 to 255; None when a signal ended the rank, or it is not known how it ended."""
    signal: int | None
    at: datetime
    """Receiver's clock."""
    stopped: bool = False
    """Whether the agent had already begun to stop this rank."""
    error: RankError | None = None
    error_unreadable: str | None = None
    """Why an existing error file could not be read."""
    log_tail: tuple[str, ...] = ()
    kernel: tuple[str, ...] = ()
    """Lines of the node's kernel log since the generation began that are evidence, oldest first.

    Empty for a rank that was stopped.
    """
    kernel_unreadable: str | None = None
    """Why that log, or a part of it, was not read: lines missing in `kernel` may be in the log."""
    pid: int | None = None
    """The rank's pid, as it appears in the kernel log."""
    launcher: bool = False
    """Whether it was not a rank but the launcher of the node's ranks, none of which is known to
    have failed before it."""
    ecs: EcsStop | None = None
    """Why ECS stopped it, for a rank that was an ECS task."""
    echo: bool = False
    """Whether its last lines blamed a peer's failure, and were left out for that."""
    unfinished: Literal["", "alive", "dumping", "stopped"] = ""
    """What it was doing, if it had failed by what it wrote and its exit does not say so: it has not
    ended yet, is writing a core dump, or was stopped by its node before it had ended. Then how it
    ended is not known, and `at` is when it wrote its last words."""
    kind: Literal["RankExited"] = "RankExited"

    @property
    def failed(self) -> bool:
        return self.exit_code != 0


@dataclass(frozen=True, slots=True)
class RanksFenced:
    """The node stopped its own ranks.

    It could reach no peer or controller to confirm that its generation is current, or one of them
    answered that it is not.
    """

    node: str
    at: datetime
    why: str
    reason: str
    kind: Literal["RanksFenced"] = "RanksFenced"


@dataclass(frozen=True, slots=True)
class RanksVanished:
    """The ranks are gone and no process saw how they ended: the node rebooted, or the shim died."""

    node: str
    at: datetime
    reason: str
    rebooted: bool = False
    kernel: tuple[str, ...] = ()
    kernel_unreadable: str | None = None
    """As in RankExited, as is `kernel`."""
    kind: Literal["RanksVanished"] = "RanksVanished"


Observation = Annotated[RankExited | RanksFenced | RanksVanished, Field(discriminator="kind")]
