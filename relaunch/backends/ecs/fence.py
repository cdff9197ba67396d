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
_VALUE = re.compile(r"(prepared|stopped)\.(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Fence:
    state: Literal["prepared", "stopped"]
    submission: int
    generation: int

    @classmethod
    def from_token(cls, token: Token, state: Literal["prepared", "stopped"]) -> Self:
        return cls(state, token.submission, token.generation)

    @classmethod
    def read(cls, value: str | None) -> Self | None:
        """Parse an attribute; None if it is missing or was not written by relaunch."""
        match = _VALUE.fullmatch(value or "")
        return (
            None
            if match is None
            else cls(
                "prepared" if match[1] == "prepared" else "stopped", int(match[2]), int(match[3])
            )
        )

    def __str__(self) -> str:
        # Starts with a letter, so that the cluster query language cannot parse it as a number.
        return f"{self.state}.{self.submission}.{self.generation}"

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

    Only jobs without tasks on the instance are considered.

    Args:
        attributes: Attributes of the container instance.
        attribute: Name of the attribute to set.
        living: Names of the attributes of jobs that have tasks there.
    """
    jobs = [name for name in attributes if _JOB.fullmatch(name) and name != attribute]
    excess = len(jobs) + 1 - MOST_JOBS
    kept = set(living)
    # Stopped generations go first: ranks of a generation that is only prepared may still be
    # started.
    oldest = sorted(
        (name for name in jobs if name not in kept), key=lambda name: _age(attributes[name])
    )
    return tuple(oldest[: max(0, excess)])


def _age(value: str) -> tuple[bool, tuple[int, int]]:
    fence = Fence.read(value)
    return (False, (0, 0)) if fence is None else (fence.state == "prepared", fence.highest)
