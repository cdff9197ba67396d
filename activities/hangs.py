"""Looks at what the ranks of a gang do while its step stays the same, and judges whether they hang.

Nothing is looked at while progress is on time (`relaunch.job.hang.is_late`). From then on a look is
taken every 1.5 heartbeats: first a cheap one (state, CPU, I/O of each process, connections), with
Python's stacks once a rank does next to nothing, a connection between ranks is silent, or the limit
has passed. All nodes are asked in parallel.

Nothing of this is stored: a watch that takes over starts to look again, which delays a decision and
changes none. With several shards, the watch of the first one looks at all ranks of the job and
decides; the others act only on what needs no look: a limit that a person chose, and `at_most`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from relaunch.activities.reports import WatchRanksInput
from relaunch.backends.base import Backend, BackendError, Refusal
from relaunch.evidence.flight import FlightKind, compare_flights, parse_flight
from relaunch.evidence.hung_ranks import (
    MissingRanks,
    RankStreak,
    find_hung_ranks,
    follow_ranks,
    is_any_cut_off,
    is_any_idle,
    is_standstill,
    list_groups,
    name_suspects,
)
from relaunch.evidence.stacks import HungRank, RankLook, read_rank_looks
from relaunch.generation import Token
from relaunch.job.hang import Overdue, Pace, describe_standstill, is_late

LOOK_BEATS = 1.5
"""Heartbeats between two looks: what ranks report is as new as the last one."""
LOOK_TIMEOUT_S = 20.0
"""Seconds that a node may take for one look."""
ANSWER_MARGIN_S = 5.0
"""Seconds more until its answer must be here. A limit that a person chose is delayed by no more
than both."""
UNPROVEN = "whether a rank still works is not known"


@dataclass(frozen=True, slots=True)
class HangVerdict:
    """Training hangs."""

    rule: str
    reason: str
    suspects: tuple[HungRank, ...]
    groups: tuple[str, ...]
    is_cut_off: bool = False
    """Whether nothing is acknowledged on a connection between two ranks."""


@dataclass(slots=True)
class HangLooks:
    """The looks at the ranks since their last step."""

    input: WatchRanksInput
    streaks: dict[int, RankStreak] = field(default_factory=dict)
    looked_at: float | None = None
    """When the newest look with stacks began, by CLOCK_MONOTONIC; None: there is none."""
    is_new: bool = False
    """Whether the newest look was not judged yet: there may be thousands of ranks."""
    wanted_at: float | None = None
    """Since when a limit that a person chose waits for a look."""

    @property
    def interval(self) -> float:
        return LOOK_BEATS * self.input.timeouts.heartbeat.total_seconds()

    def clear(self) -> None:
        """Forget all looks: training has advanced."""
        self.streaks, self.looked_at, self.wanted_at = {}, None, None

    def add(self, looks: Iterable[RankLook], at: float, *, framed: bool) -> None:
        """Add one look at the ranks, begun at a moment of CLOCK_MONOTONIC."""
        self.streaks = follow_ranks(self.streaks, looks, at, framed=framed)
        self.is_new = True
        if framed:
            self.looked_at = at

    def are_wanted(self, pace: Pace, overdue: Overdue | None, now: datetime) -> bool:
        if overdue is not None:
            return True
        limits, heartbeat = self.input.hang, self.input.timeouts.heartbeat
        return self.input.judges and is_late(pace, limits, heartbeat, now)

    def needs_frames(self, overdue: Overdue | None) -> bool:
        return overdue is not None or is_any_idle(self.streaks) or is_any_cut_off(self.streaks)

    def judge(
        self,
        pace: Pace,
        overdue: Overdue | None,
        expected: Collection[int],
        lost: Collection[int],
        positions: Mapping[int, int],
        now: datetime,
    ) -> HangVerdict | None:
        """Return why training hangs, and which ranks hold it up, or None.

        Args:
            pace: How training advances.
            overdue: The limit that has passed, if one has.
            expected: The ranks of the job that have not ended, on nodes that are not lost.
            lost: Those on lost nodes: a gang that does not work waits for these.
            positions: How far ranks have come, of those that report it.
            now: The watcher's time.
        """
        limits = self.input.hang
        if self.input.judges and limits.after != "off" and self.is_new:
            self.is_new = False
            rules = limits.rules.model_dump()
            ranks = (*expected, *lost)
            finding = find_hung_ranks(self.streaks, ranks, rules, self._find_missing())
            if finding is not None:
                reason = f"{finding.reason}; {describe_standstill(pace, now)}"
                return self._make_verdict(finding.rule, reason, finding.suspects)
        if overdue is None:
            return None
        rule, note = "limit", ""
        if overdue.is_stated:
            if not self._has_looked():
                return None
        elif overdue.past > limits.at_most:
            rule, note = "at_most", self._describe_doubt(expected)
        elif not (self.input.judges and is_standstill(self.streaks, expected)):
            return None
        elif any(not one.look.frames for one in self.streaks.values()):
            note = "CPU and I/O show that no rank works, not all stacks could be read"
        suspects, who = name_suspects(self.streaks, self._find_missing(), positions)
        reason = "; ".join(part for part in (who, overdue.reason, note) if part)
        return self._make_verdict(rule, reason, suspects)

    def _make_verdict(self, rule: str, reason: str, suspects: tuple[HungRank, ...]) -> HangVerdict:
        groups = list_groups(one.look for one in self.streaks.values())
        return HangVerdict(rule, reason, suspects, groups, is_any_cut_off(self.streaks))

    def _has_looked(self) -> bool:
        """Return whether the ranks were looked at lately, or have been waited for long enough."""
        now = time.monotonic()
        self.wanted_at = now if self.wanted_at is None else self.wanted_at
        if self.looked_at is not None and now - self.looked_at <= LOOK_TIMEOUT_S + self.interval:
            return True
        return now - self.wanted_at > LOOK_TIMEOUT_S + ANSWER_MARGIN_S

    def _describe_doubt(self, expected: Collection[int]) -> str:
        """Return why no proof was found within `at_most`."""
        if any(rank not in self.streaks or self.streaks[rank].look.unreadable for rank in expected):
            return UNPROVEN
        working = [rank for rank in expected if self.streaks[rank].still == 1]
        return f"rank {working[0]} still works" if working else UNPROVEN

    def _find_missing(self) -> MissingRanks | None:
        """Return who did not enter a collective, by torch's own records of the newest looks."""
        flights = {
            rank: parse_flight(one.look.flight)
            for rank, one in self.streaks.items()
            if one.look.flight is not None
        }
        found = compare_flights(flights) if flights else None
        if found is None or not found.suspects:
            return None
        is_certain = found.kind is not FlightKind.MISSING and not found.unrecorded
        return MissingRanks(found.suspects, found.reason, is_certain)


async def read_looks(
    reach: Callable[[str], Backend],
    token: Token,
    nodes: Mapping[str, Collection[int]],
    *,
    framed: bool,
) -> list[RankLook]:
    """Look at all ranks of some nodes at once. A node that does not answer is left out.

    Args:
        reach: Returns the backend of a node.
        token: The generation.
        nodes: The ranks of each node. What a node says of others is left out.
        framed: Whether Python stacks are read.
    """
    found = await asyncio.gather(*(_read_node(reach, token, node, framed) for node in nodes))
    return [
        look
        for ranks, looks in zip(nodes.values(), found, strict=True)
        for look in looks
        if look.rank in ranks
    ]


async def _read_node(
    reach: Callable[[str], Backend], token: Token, node: str, framed: bool
) -> tuple[RankLook, ...]:
    backend = reach(node)
    try:
        backend.node(node)
    except KeyError:
        return ()  # it is no longer in the fleet file
    try:
        async with asyncio.timeout(LOOK_TIMEOUT_S + ANSWER_MARGIN_S):
            answer = await backend.stacks(node, token, None, framed, LOOK_TIMEOUT_S)
    except (BackendError, TimeoutError):
        return ()  # what its ranks do is not known
    if isinstance(answer, Refusal):
        return ()
    return read_rank_looks(node, answer["stacks"])
