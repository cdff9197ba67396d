"""Fence of a job on a node: a custom attribute of the container instance.

It says which generation of the job ECS may place there, and which may never run there again. ECS
itself compares it when it places a task, so a RunTask that was in flight when its generation was
stopped is refused. The attribute is therefore also the node's record of the highest generation that
it was prepared for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Self

from relaunch.generation import Token

MOST_JOBS = 7
"""Maximum number of job attributes on one instance. ECS allows 10 custom ones: the others are for
relaunch's repairs and for users.
"""
_JOB = re.compile(r"relaunch\.[0-9a-f]{16}")
_VALUE = re.compile(r"(?:(prepared|stopped)|(orphaned))\.(\d+)\.(\d+)(?(2)\.(\d+))")


@dataclass(frozen=True, slots=True)
class Fence:
    state: Literal["prepared", "stopped", "orphaned"]
    """Orphaned: stopped, but a task of this generation, or of one before it, may run on the machine
    and ECS does not see it."""
    submission: int
    generation: int
    since: int = 0
    """Of an orphaned one, Unix seconds: what started later than this has ended it."""

    @classmethod
    def from_token(cls, token: Token, state: Literal["prepared", "stopped"]) -> Self:
        return cls(state, token.submission, token.generation)

    @classmethod
    def read(cls, value: str | None) -> Self | None:
        """Parse an attribute; None if it is missing or was not written by relaunch."""
        match = _VALUE.fullmatch(value or "")
        if match is None:
            return None
        numbers = int(match[3]), int(match[4])
        if match[2]:
            return cls("orphaned", *numbers, int(match[5]))
        return cls("prepared" if match[1] == "prepared" else "stopped", *numbers)

    def __str__(self) -> str:
        # Starts with a letter, so that the cluster query language cannot parse it as a number.
        text = f"{self.state}.{self.submission}.{self.generation}"
        return f"{text}.{self.since}" if self.state == "orphaned" else text

    @property
    def highest(self) -> tuple[int, int]:
        return self.submission, self.generation


def key(token: Token) -> tuple[int, int]:
    """Return the key by which generations of one job are ordered."""
    return token.submission, token.generation


def only_for(attribute: str, token: Token) -> str:
    """Return the placement constraint for a rank, in the cluster query language."""
    return f"attribute:{attribute} == {Fence.from_token(token, 'prepared')}"


def find_removable(
    attributes: Mapping[str, str], attribute: str, living: Iterable[str]
) -> tuple[str, ...]:
    """Return the attributes of other jobs to remove before `attribute` can be set, oldest first.

    Only jobs without tasks on the instance are considered, as far as is known.

    Args:
        attributes: Attributes of the container instance.
        attribute: Name of the attribute to set.
        living: Names of the attributes of jobs that have tasks there.
    """
    jobs = [name for name in attributes if _JOB.fullmatch(name) and name != attribute]
    excess = len(jobs) + 1 - MOST_JOBS
    kept = {*living, *(name for name in jobs if _is_orphaned(attributes[name]))}
    # Stopped generations go first: ranks of a generation that is only prepared may still be
    # started.
    oldest = sorted(
        (name for name in jobs if name not in kept), key=lambda name: _age(attributes[name])
    )
    return tuple(oldest[: max(0, excess)])


def _is_orphaned(value: str) -> bool:
    fence = Fence.read(value)
    return fence is not None and fence.state == "orphaned"


def _age(value: str) -> tuple[bool, tuple[int, int]]:
    fence = Fence.read(value)
    return (False, (0, 0)) if fence is None else (fence.state == "prepared", fence.highest)
