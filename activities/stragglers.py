"""Collects how long the steps of each rank take, in windows, and finds the nodes that are slow.

Nothing is asked for: heartbeats bring the step of each rank and what it reports beside it. Nothing
is stored: a watch that takes over begins to collect again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from statistics import median
from typing import Any

from relaunch.evidence.stragglers import WINDOWS, Measure, SlowNode, find_slow_nodes
from relaunch.spec.policy import StragglerLimits

BUSY = "busy_s"
"""The name under which a rank reports the seconds of its work in a step."""
WINDOW_BEATS = 3
"""Heartbeats in a window, at least: each brings one value of each rank."""
MEASURES: tuple[Measure, ...] = ("busy", "step")


@dataclass(slots=True)
class _RankTimes:
    """What one rank reported in the present window."""

    position: int
    at: datetime
    """When it reached `position`, the newest."""
    first: tuple[int, datetime]
    """The same, as of the begin of the window."""
    busy: list[float] = field(default_factory=list)
    is_clean: bool = True
    """Whether it did nothing but steps, as far as it says."""


class StepTimes:
    """The times of the ranks' steps, by node and window."""

    def __init__(self, limits: StragglerLimits, heartbeat_s: float, now: float) -> None:
        self._limits = limits
        self._length = max(limits.over.total_seconds() / WINDOWS, WINDOW_BEATS * heartbeat_s)
        self._begun = now
        self._ranks: dict[str, dict[int, _RankTimes]] = {}
        self._windows: dict[Measure, list[dict[str, float]]] = {one: [] for one in MEASURES}
        self._counts: dict[Measure, int] = dict.fromkeys(MEASURES, 0)
        """Compared ranks in the newest window."""

    @property
    def span_s(self) -> float:
        return WINDOWS * self._length

    def add(
        self, node: str, rank: int, position: int, at: datetime, value: Mapping[str, Any]
    ) -> None:
        """Add what one rank reports in a heartbeat.

        Args:
            node: Where it runs.
            rank: Its number.
            position: How far it has come (`Counter.position`).
            at: When it has reached that.
            value: Its progress, as the agent reports it.
        """
        if self._limits.action == "off":
            return
        ranks = self._ranks.setdefault(node, {})
        if (known := ranks.get(rank)) is None:
            known = ranks[rank] = _RankTimes(position, at, (position, at))
        if position != known.position:
            known.position, known.at = position, at
        if value.get("phase") is not None:
            known.is_clean = False
            return
        busy = (value.get("values") or {}).get(BUSY)
        if isinstance(busy, int | float) and math.isfinite(busy) and busy > 0:
            known.busy.append(float(busy))

    def close_window(self, now: float) -> bool:
        """Close the window if it is over; return whether it was.

        Args:
            now: A monotonic clock.
        """
        if self._limits.action == "off" or now - self._begun < self._length:
            return False
        self._begun = now
        for measure in MEASURES:
            by_node = {
                node: [
                    seconds for one in ranks.values() if (seconds := _measure(one, measure)) > 0.0
                ]
                for node, ranks in self._ranks.items()
            }
            figures = {node: median(seconds) for node, seconds in by_node.items() if seconds}
            self._counts[measure] = sum(map(len, by_node.values()))
            self._windows[measure] = [*self._windows[measure], figures][-WINDOWS:]
        for ranks in self._ranks.values():
            for rank, one in ranks.items():
                ranks[rank] = _RankTimes(one.position, one.at, (one.position, one.at))
        return True

    def find(self) -> list[SlowNode]:
        """Return the slow nodes, the slowest first."""
        found: dict[str, SlowNode] = {}
        for measure in MEASURES:
            for slow in find_slow_nodes(self._windows[measure], self._limits.slower_by):
                found.setdefault(
                    slow.node,
                    replace(
                        slow,
                        ranks=self._counts[measure],
                        span_s=self.span_s,
                        measure=measure,
                    ),
                )
        return list(found.values())


def _measure(one: _RankTimes, measure: Measure) -> float:
    """Return the seconds of a step in the window; 0.0: not known."""
    if measure == "busy":
        return median(one.busy) if one.busy else 0.0
    position, at = one.first
    if not one.is_clean or one.position <= position:
        return 0.0
    return (one.at - at).total_seconds() / (one.position - position)
