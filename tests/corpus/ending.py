"""Real endings of real jobs: what was printed, where that was published, and what is right.

Each file of `endings/` is one ending. It is labelled by what the field says is right, not by what
relaunch says today. A fifth of the files, chosen by the hash of their name, is held out: tables are
not written with them, and they have a score for themselves.
"""

from __future__ import annotations

import hashlib
import re
import signal
from pathlib import Path
from typing import Literal, Self

import yaml
from pydantic import Field, HttpUrl, field_validator, model_validator

from relaunch.evidence.causes import Cause
from relaunch.fields import StrictModel
from relaunch.spec.policy import Strategy

ENDINGS = Path(__file__).parent / "endings"
MAX_LOG_LINES = 200


class RankEnding(StrictModel):
    """How one rank ended."""

    rank: int = Field(ge=0)
    after: float = Field(default=0.0, ge=0)
    """Seconds after the first ending."""
    exit: int | str
    """The exit code, or the name of a signal."""
    log: str = ""
    """Its last lines, as published."""
    pid: int | None = Field(default=None, ge=1)
    """Its process, where the kernel log names it."""

    @field_validator("exit")
    @classmethod
    def _check_exit(cls, value: int | str) -> int | str:
        if isinstance(value, str) and value not in signal.Signals.__members__:
            raise ValueError(f"{value!r} is not a signal: expected one such as SIGABRT")
        return value

    @field_validator("log")
    @classmethod
    def _check_log(cls, value: str) -> str:
        if len(value.splitlines()) > MAX_LOG_LINES:
            raise ValueError(f"expected at most {MAX_LOG_LINES} lines")
        return value


class Ending(StrictModel):
    """One ending of a job."""

    source: HttpUrl
    """Where it was published."""
    seen: str = Field(min_length=3)
    """Programs, versions and machines, as far as they are known."""
    what: str = Field(min_length=10)
    """What happened, in a sentence."""
    ranks: tuple[RankEnding, ...] = ()
    """In order of time. Ranks that are not named run on until they are stopped."""
    kernel: str = ""
    """The kernel log of the node of the first rank, as published."""
    examination: Literal["HEALTHY", "UNHEALTHY", "UNKNOWN"] = "HEALTHY"
    """What a look at the node of the first rank finds."""
    cause: Cause
    action: Strategy
    """The right first action."""
    guilty: tuple[int, ...] = ()
    """The ranks where it began; empty: no single one did, or it is unknown."""
    reason: str = Field(min_length=20)
    """Why cause and action are right: what the thread, the documentation or the maintainers say."""
    or_causes: tuple[Cause, ...] = ()
    """Other causes that an expert would accept."""
    or_actions: tuple[Strategy, ...] = ()

    @model_validator(mode="after")
    def _check_meaning(self) -> Self:
        if not self.ranks and not self.kernel:
            raise ValueError("expected ranks, or a kernel log")
        if [one.after for one in self.ranks] != sorted(one.after for one in self.ranks):
            raise ValueError("ranks: expected the order of time")
        return self

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Return all causes that are right."""
        return (self.cause, *self.or_causes)

    @property
    def actions(self) -> tuple[Strategy, ...]:
        """Return all first actions that are right."""
        return (self.action, *self.or_actions)


def read_ending(path: Path) -> Ending:
    """Read one file.

    Raises:
        ValidationError: It is not an ending.
    """
    return Ending.model_validate(yaml.safe_load(path.read_text()))


def is_held_out(name: str) -> bool:
    """Return whether tables must not be written with the file of this name."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 5 == 0


def find_problem(path: Path) -> str | None:
    """Return what is wrong with the name of a file, or None."""
    return (
        None if re.fullmatch(r"[a-z0-9_]+\.yaml", path.name) else "expected a name of a-z, 0-9, _"
    )
