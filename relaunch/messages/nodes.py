"""Examining nodes: for a job, and as a standalone activity that the command line, which never reaches a node, runs through a worker.

`examine_nodes(ExamineNodesInput) -> tuple[ExaminedNode, ...]` and `check_nodes(ExamineNodesInput) -> tuple[NodeHealth, ...]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from relaunch.evidence.catalog.overrides import NO_OVERRIDES, CatalogOverrides
from relaunch.evidence.health import Health


@dataclass(frozen=True, slots=True)
class ExamineNodesInput:
    fleet: str
    nodes: tuple[str, ...]
    id: str
    """Who asks; the node names it to whoever wants it meanwhile."""
    level: int
    """Of `dcgmi diag`; 0: without."""
    within: timedelta
    kernel_since: timedelta | None = None
    """How far back the kernel log counts; None: all that is kept."""
    catalog: CatalogOverrides = NO_OVERRIDES


@dataclass(frozen=True, slots=True)
class NodeHealth:
    node: str
    gpus: int
    """As the fleet file says."""
    health: Health
