"""Reads what ranks wrote that have failed and whose exits do not say so.

A rank that has failed may take long to end, and its peers, which lost their connections to it, end
at once. Which of them failed is then in what it wrote.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from relaunch.activities.observations import read_unfinished
from relaunch.backends.base import Backend, BackendError, Refusal
from relaunch.evidence.observations import RankExited
from relaunch.generation import Token

READ_TIMEOUT_S = 3.0
"""Seconds that a node has to answer: less than consequences of a fault are gathered anyway."""


@dataclass(frozen=True, slots=True)
class UnfinishedRank:
    """A rank that had not ended when its node was asked."""

    words: RankExited
    """What it had written, as if it had ended."""
    is_ending: bool
    """Whether its process has begun to end."""


async def read_last_words(
    reach: Callable[[str], Backend], token: Token, node: str
) -> tuple[UnfinishedRank, ...] | None:
    """Return the ranks of a node that have not ended; None: it does not say."""
    backend = reach(node)
    try:
        backend.node(node)
    except KeyError:
        return None  # it is no longer in the fleet file
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            answer = await backend.last_words(node, token)
    except (BackendError, TimeoutError):
        return None
    if isinstance(answer, Refusal):
        return None  # ranks are ECS tasks, or the agent in a container is older than the order
    now = datetime.now(UTC)
    return tuple(
        UnfinishedRank(
            read_unfinished(node, row, "dumping" if row["state"] == "dumping" else "alive", now),
            row["state"] in ("exiting", "ended"),
        )
        for row in answer["ranks"]
    )
