"""Inputs and outputs of the activities that examine nodes.

Jobs use them; the command line, which never reaches a node, runs them through a worker as
standalone activities. `examine_nodes(ExamineNodesInput) -> tuple[ExaminedNode, ...]` and
`check_nodes(ExamineNodesInput) -> tuple[NodeHealth, ...]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from relaunch.evidence.catalog.overrides import NO_OVERRIDES, CatalogOverrides
from relaunch.evidence.health import Health
from relaunch.job.state import Slot


@dataclass(frozen=True, slots=True)
class ExamineNodesInput:
    fleet: str
    nodes: tuple[str, ...]
    id: str
    """Identifies the caller; while it holds the node, the node reports this id to others."""
    level: int
    """Level of `dcgmi diag`; 0: do not run it."""
    within: timedelta
    kernel_since: timedelta | None = None
    """How far back kernel log lines count; None: all that are kept."""
    catalog: CatalogOverrides = NO_OVERRIDES


@dataclass(frozen=True, slots=True)
class FindForeignInput:
    fleet: str
    slots: tuple[Slot, ...]
    """Places of a job: nodes that are asked, with its GPUs there."""


@dataclass(frozen=True, slots=True)
class NodeHealth:
    node: str
    gpus: int
    """Number of GPUs according to the fleet file."""
    health: Health
