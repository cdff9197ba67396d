"""The custom attribute of a container instance that says which generation of a job ECS may place there, and which may never run again.

ECS itself compares it when it places a task: a RunTask that was on its way when its generation was stopped is refused. That also makes it
the node's memory of the highest generation it was prepared for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Self

from relaunch.generation import Token

MOST_JOBS = 7
"""Attributes of jobs on one instance. ECS takes 10 custom ones: the others are relaunch's own for repairs, and a user's."""
_JOB = re.compile(r"relaunch\.[0-9a-f]{16}")
_VALUE = re.compile(r"(prepared|stopped)\.(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Fence:
    state: Literal["prepared", "stopped"]
    submission: int
    generation: int

    @classmethod
    def of(cls, token: Token, state: Literal["prepared", "stopped"]) -> Self:
        return cls(state, token.submission, token.generation)

    @classmethod
    def read(cls, value: str | None) -> Self | None:
        """Read an attribute; None: there is none, or somebody else wrote it."""
        match = _VALUE.fullmatch(value or "")
        return None if match is None else cls("prepared" if match[1] == "prepared" else "stopped", int(match[2]), int(match[3]))

    def __str__(self) -> str:
        # A letter first, so that no reader of the cluster query language can take it for a number.
        return f"{self.state}.{self.submission}.{self.generation}"

    @property
    def highest(self) -> tuple[int, int]:
        return self.submission, self.generation


def key(token: Token) -> tuple[int, int]:
    """By which generations of one job are ordered."""
    return token.submission, token.generation


def only_for(attribute: str, token: Token) -> str:
    """Write the condition under which ECS may place a rank, in the cluster query language."""
    return f"attribute:{attribute} == {Fence.of(token, 'prepared')}"


def to_forget(attributes: Mapping[str, str], attribute: str, living: Iterable[str]) -> tuple[str, ...]:
    """Return the attributes of other jobs that have to go before `attribute` can be set: of jobs that do not live there, oldest first.

    Args:
        attributes: Of the container instance.
        attribute: That is to be set.
        living: Attributes of jobs that have tasks there.
    """
    jobs = [name for name in attributes if _JOB.fullmatch(name) and name != attribute]
    excess = len(jobs) + 1 - MOST_JOBS
    kept = set(living)
    # What was stopped is done with; of what was only prepared somebody may still want to start ranks.
    oldest = sorted((name for name in jobs if name not in kept), key=lambda name: _age(attributes[name]))
    return tuple(oldest[: max(0, excess)])


def _age(value: str) -> tuple[bool, tuple[int, int]]:
    fence = Fence.read(value)
    return (False, (0, 0)) if fence is None else (fence.state == "prepared", fence.highest)
