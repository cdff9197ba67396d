"""Find nodes whose steps take longer than those of the others, for long.

In lockstep all ranks wait for the slowest one, so the time of a whole step is the same everywhere:
only what a rank reports about its work differs (`busy_s`). Ranks that do not wait for each other
differ in the time of a whole step. Both are compared alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

WINDOWS = 10
"""Windows in a row in each of which a node must be slower."""
MADS = 5
"""Median absolute deviations of the others by which a node must be slower than their median.

About 3.4 standard deviations where times are distributed normally. Nodes that differ anyway, such
as the stages of a pipeline, deviate much, so none of them is named for that.
"""
SLOWER_OF_TWO = 1.5
"""How many times slower one of two nodes must be: no third one shows what is usual.

nvidia-resiliency-ext names a rank below 0.75 of the best one (1.33 times slower), DLRover a node
above 2 times the median.
"""
MAX_SHARE = 4
"""No more than one of so many nodes is named.

Where more are slower, the job has two kinds of nodes or of work, and no straggler.
"""
Measure = Literal["busy", "step"]
"""What is compared: a rank's own work in a step, or the time of whole steps."""


@dataclass(frozen=True, slots=True)
class SlowNode:
    """A node that was slower than the others in each of the newest windows."""

    node: str
    seconds: float
    """Median time of a step of its ranks."""
    others: float
    """Median of those of the other nodes."""
    nodes: int
    """Number of compared nodes, with this one."""
    ranks: int = 0
    """Number of compared ranks on all of them."""
    span_s: float = 0.0
    """How long it was slower, at least."""
    measure: Measure = "busy"

    @property
    def ratio(self) -> float:
        return self.seconds / self.others


def find_slow_nodes(windows: Sequence[Mapping[str, float]], slower_by: float) -> list[SlowNode]:
    """Return the nodes that were slower in each of the newest windows, the slowest first.

    Args:
        windows: The seconds of a step by node in each window, the newest last. A node that is
            missing in one of the newest is not compared.
        slower_by: How many times slower than the median of the others a node must be.
    """
    newest = windows[-WINDOWS:]
    if len(newest) < WINDOWS:
        return []
    nodes = [node for node in newest[0] if all(node in window for window in newest)]
    if len(nodes) < 2:
        return []
    if len(nodes) == 2:
        slower_by = max(slower_by, SLOWER_OF_TWO)
    usual = {node: median(window[node] for window in newest) for node in nodes}
    found = []
    for node in nodes:
        others = [seconds for other, seconds in usual.items() if other != node]
        middle = median(others)
        spread = median(abs(seconds - middle) for seconds in others)
        if usual[node] <= max(slower_by * middle, middle + MADS * spread):
            continue
        if all(_is_slower(window, node, nodes, slower_by) for window in newest):
            found.append(SlowNode(node, usual[node], middle, len(nodes)))
    if len(found) > max(1, len(nodes) // MAX_SHARE):
        return []
    return sorted(found, key=lambda one: (-one.ratio, one.node))


def _is_slower(
    window: Mapping[str, float], node: str, nodes: Sequence[str], slower_by: float
) -> bool:
    return window[node] > slower_by * median(window[other] for other in nodes if other != node)


def describe_slow_node(slow: SlowNode) -> str:
    """Return a clause with the numbers, for people."""
    what = "of work a step" if slow.measure == "busy" else "a step"
    return (
        f"node {slow.node} is {slow.ratio:.1f} times slower than the others: "
        f"{_format(slow.seconds)} {what}, median {_format(slow.others)} "
        f"(of {slow.ranks} ranks on {slow.nodes} nodes, over the last {_span(slow.span_s)})"
    )


def _format(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
