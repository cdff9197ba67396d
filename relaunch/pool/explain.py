"""Explain why a claim waits or cannot be granted, for the person who looks at the job.

Says how many nodes there are, which jobs have the others, and what is broken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from heapq import nsmallest

from relaunch.evidence.fields import text
from relaunch.pool.inventory import describe_uses
from relaunch.pool.nodes import is_awaiting
from relaunch.pool.placement import Choice, NodeUse, Placement, Shape
from relaunch.pool.restore import is_restoring
from relaunch.pool.state import ClaimRecord, FleetState, NodeRecord, NodeStatus
from relaunch.text import count_noun, join_names

MAX_NAMED = 3
"""Items of each kind that are named; the rest is counted."""


def why_closed(state: FleetState, now: datetime) -> str:
    """Return why the fleet grants nothing; empty if it grants."""
    if not state.is_file_read:
        return f"the file of fleet {state.name} has not been read yet"
    if state.breaker.is_open:
        since = f"{state.breaker.since:%H:%M} UTC" if state.breaker.since else "some time"
        return (
            f"the breaker of fleet {state.name} is open since {since}: {state.breaker.reason}; "
            "relaunch nodes resume closes it"
        )
    started = f"fleet {state.name} has just started and "
    if state.awaited_jobs is None:
        return started + "checks which jobs run"
    if is_awaiting(state, now):
        return started + f"asks the jobs what they hold: {join_names(state.awaited_jobs)}"
    if is_restoring(state, now):
        return started + "asks the run before it which nodes are out of service"
    if not state.is_probed:
        return started + f"probes its {count_noun(len(state.nodes), 'node')}"
    return ""


@dataclass(frozen=True, slots=True)
class Survey:
    """Facts about all nodes of one kind, the same for every claim."""

    holders: tuple[tuple[str, int], ...]
    """The jobs that hold most of the nodes, and how many, the largest number first."""
    jobs: frozenset[str]
    """All jobs that hold some of the nodes."""
    out: tuple[str, ...]
    silent: tuple[str, ...]
    blocked: tuple[str, ...]
    spares: int
    """Free spares, which only jobs that have run may use."""


class Explainer:
    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._surveys: dict[Shape, Survey] = {}

    def why_hopeless(self, record: ClaimRecord, shape: Shape) -> str:
        claim, placement = record.claim, self._placement
        removed = [node for node in placement.keep_nodes(record) if node.record.is_removed]
        most = placement.count_in_file(shape) + len(removed)
        if most >= claim.nodes:
            return ""
        fleet = placement.state.name
        if not placement.nodes:
            return f"the file of fleet {fleet} names no node, and {claim.nodes} are wanted"
        gpus = f" with {claim.gpus} GPUs or more" if claim.gpus else ""
        has = f"{count_noun(most, 'node')}{gpus}"
        return f"fleet {fleet} has {has}, and {claim.nodes} are wanted"

    def why_unknown(self, record: ClaimRecord, nodes: Sequence[NodeUse]) -> str:
        """Return why a claim waits for nodes that have not answered since the fleet began."""
        placement = self._placement
        names = join_names([node.name for node in nodes])
        error = placement.state.restore_error
        return text(
            f"{names} ha{'ve' if len(nodes) > 1 else 's'} not answered "
            f"since fleet {placement.state.name} began, and ranks of an earlier submission "
            f"of job {record.claim.job} may live there: what the fleet knew before is lost"
            f"{f' ({text(error, 160)})' if error else ''}. "
            "The job is launched when all have answered; "
            "take a node that is off for good out of the fleet file",
            600,
        )

    def why_fewer(self, record: ClaimRecord, shape: Shape, choice: Choice, ahead: str) -> str:
        """Return why a job that runs, or can start, has fewer nodes than it would take."""
        have = len(choice)
        parts = [part for part in self._parts(record, shape, choice, ahead) if part] or [
            "no other node is available"
        ]
        most = count_noun(record.claim.max_nodes, "node")
        return text(f"{have} of {most}: " + "; ".join(parts), 600)

    def why_waiting(self, record: ClaimRecord, shape: Shape, choice: Choice, ahead: str) -> str:
        # A stale answer is not news: the job would get a message every ten seconds and record each
        # of them.
        have = len(choice) + (0 if choice.is_hopeful else choice.stale)
        wanted = record.claim.nodes if choice.missing else record.claim.max_nodes
        return text(
            f"{have} of {count_noun(wanted, 'node')}: "
            + "; ".join(part for part in self._parts(record, shape, choice, ahead) if part),
            600,
        )

    def _parts(self, record: ClaimRecord, shape: Shape, choice: Choice, ahead: str) -> list[str]:
        claim, placement = record.claim, self._placement
        survey = self._survey(shape)
        parts = []
        if choice.is_hopeful:
            parts.append("it is looked whether the others answer")
        elif ahead:
            parts.append(f"job {ahead} comes first")
        holders = [
            (job, count) for job, count in survey.holders[: MAX_NAMED + 1] if job != claim.job
        ][:MAX_NAMED]
        if holders:
            rest = len(survey.jobs) - len(holders) - (claim.job in survey.jobs)
            more = (
                f", {rest} more job{'s' * (rest > 1)} hold{'s' * (rest == 1)} the rest"
                if rest
                else ""
            )
            parts.append(", ".join(f"job {job} holds {count}" for job, count in holders) + more)
        parts += [
            self._some(survey.out, "out of service"),
            self._some(survey.silent, "silent"),
            self._some(survey.blocked, "in use"),
        ]
        known = [
            placement.by_name[name].record for name in claim.avoid if name in placement.by_name
        ]
        avoided = [
            node.name
            for node in known
            if shape.fits(node, with_avoided=True) and node.status is NodeStatus.IN_SERVICE
        ]
        parts.append(f"it avoids {join_names(avoided)}" if avoided else "")
        idle = survey.spares
        parts.append(
            f"{idle} spare{'s are' if idle > 1 else ' is'} for jobs that have run" if idle else ""
        )
        return parts

    @staticmethod
    def _some(clauses: tuple[str, ...], what: str) -> str:
        more = (
            f" and {len(clauses) - MAX_NAMED} more are {what}" if len(clauses) > MAX_NAMED else ""
        )
        return ", ".join(clauses[:MAX_NAMED]) + more

    def _survey(self, shape: Shape) -> Survey:
        key = Shape(shape.gpus, shape.with_spares)
        if key not in self._surveys:
            self._surveys[key] = self._make_survey(key)
        return self._surveys[key]

    def _make_survey(self, shape: Shape) -> Survey:
        placement = self._placement
        fit_all = placement.fits_all(shape)
        holders = {
            job: len(nodes) if fit_all else sum(shape.fits(use.record) for use in nodes)
            for job, nodes in placement.nodes_of.items()
        }
        holders = {job: count for job, count in holders.items() if count}
        out, silent, blocked = [], [], []
        for use in placement.list_notable():
            node = use.record
            if not shape.fits(node):
                continue
            if node.status is not NodeStatus.IN_SERVICE:
                out.append(f"{node.name} is {node.status} ({text(node.reason, 80)})")
            elif node.probe is not None and node.probe.silent:
                silent.append(f"{node.name} does not answer ({text(node.probe.silent, 80)})")
            elif node.fault:
                blocked.append(f"{node.name}: {node.fault}")
            elif processes := use.blocking_processes(shape.gpus):
                blocked.append(f"{node.name}: {text(describe_uses(processes), 160)}")
            elif not use.holders and (why := _why_blocked(node)):
                blocked.append(f"{node.name}: {why}")
            elif use.offers and node.spec.gpus:
                blocked.append(f"{node.name} is offered to job {', '.join(use.offers)}")
        idle = (
            0
            if shape.with_spares
            else sum(
                one.record.spec.gpus >= shape.gpus and not one.holders and one.is_usable()
                for one in placement.spares
            )
        )
        return Survey(
            tuple(nsmallest(MAX_NAMED + 1, holders.items(), key=lambda each: (-each[1], each[0]))),
            frozenset(holders),
            tuple(out),
            tuple(silent),
            tuple(blocked),
            idle,
        )


def _why_blocked(node: NodeRecord) -> str:
    if node.repair:
        return f"it is under repair ({node.repair})"
    if node.probe is None:
        return ""
    if node.probe.busy:
        return text(node.probe.busy, 80)
    if node.probe.generations and node.spec.gpus:
        return f"ranks of job {node.probe.generations[0].job} live there"
    return ""
