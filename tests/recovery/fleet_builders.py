"""A fleet in a table: its events, what it orders, and a clock that only the test moves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from relaunch.evidence.causes import Cause
from relaunch.evidence.findings import Verdict
from relaunch.pool.events import (
    ClaimEvent,
    FleetEvent,
    FleetFileContent,
    GrantMessage,
    Order,
    PermitRequestEvent,
    PreviousRun,
    ProbeOrder,
    ProbeResults,
    RepairResult,
    RepairStart,
    RunningJobs,
)
from relaunch.pool.inventory import GpuUse, Inventory
from relaunch.pool.messages import Claim, Grant, PermitRequest, Place, Suspect
from relaunch.pool.scheduler import Scheduler, apply_event, next_wake, schedule
from relaunch.pool.state import ClaimRecord, FleetState, LiveGeneration, NodeProbe, NodeRecord
from relaunch.spec.fleet import FleetLimits, FleetNode

T0 = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
OneOrder = TypeVar("OneOrder", bound=Order)


def nodes(*names: str, gpus: int = 8, spare: bool = False) -> tuple[FleetNode, ...]:
    return tuple(
        FleetNode(name=name, address=f"10.0.0.{name[1:]}", gpus=gpus, spare=spare) for name in names
    )


def gpus(
    count: int = 8, *used: tuple[int, str], lost: tuple[str, ...] = (), **more: Any
) -> Inventory:
    return Inventory(
        "H100",
        count,
        80 << 30,
        (1,) * count,
        "570",
        used=tuple(GpuUse((gpu,), who) for gpu, who in used),
        lost=lost,
        **more,
    )


def look(*names: str) -> ProbeOrder:
    """At nodes, and at their GPUs."""
    return ProbeOrder(names, names)


def suspect(node: str, generation: int = 1, cause: Cause = Cause.GPU_FATAL, **more: Any) -> Suspect:
    return Suspect(node, T0, generation, cause, **{"reason": f"failed on {node}", **more})


class Desk:
    """A fleet whose nodes answer what `living`, `silent` and `held` say."""

    def __init__(
        self, *specs: FleetNode, jobs: tuple[str, ...] = (), begun: bool = True, **limits: Any
    ) -> None:
        self.now = T0
        self.scheduler = Scheduler()
        self.busy: set[str] = set()
        self.orders: list[Order] = []
        self.living: dict[str, tuple[LiveGeneration, ...]] = {}
        self.silent: dict[str, str] = {}
        self.held: dict[str, str] = {}
        self.gpus: dict[str, Inventory] = {}
        """Where they are not as the fleet file says, and free."""
        self.unread: set[str] = set()
        """Whose readings do not come to an end."""
        self.specs = specs or nodes("n1", "n2", "n3", "n4")
        self.limits = FleetLimits(**{"nodes_out": "100%", **limits})
        self.state = FleetState("gpus")
        if begun:
            self.learn(
                FleetFileContent("act", self.specs, self.limits), RunningJobs(jobs), PreviousRun()
            )
            self.settle()
            self.look()
            self.settle()

    def learn(self, *facts: FleetEvent) -> None:
        for fact in facts:
            self.state = apply_event(self.state, fact, self.now)

    def settle(self) -> list[Order]:
        """Settle once; the newest orders."""
        settled = self.scheduler.schedule(self.state, self.now, frozenset(self.busy))
        # What the scheduler keeps from the time before makes no difference.
        assert settled == schedule(self.state, self.now, frozenset(self.busy))
        self.state = settled.state
        self.orders = list(settled.orders)
        return self.orders

    def look(self, names: Iterable[str] | None = None, read: Iterable[str] | None = None) -> None:
        """The nodes answer, all with what their GPUs are unless `read` names some."""
        asked = [node.name for node in self.state.nodes] if names is None else list(names)
        to_read = set(asked if read is None else read)
        self.learn(ProbeResults(tuple(self.probe_node(name, name in to_read) for name in asked)))

    def probe_node(self, name: str, read: bool) -> NodeProbe:
        look = NodeProbe(
            name,
            self.silent.get(name, ""),
            "boot",
            self.held.get(name, ""),
            self.living.get(name, ()),
        )
        count = next((node.spec.gpus for node in self.state.nodes if node.name == name), 0)
        if not (read and count) or look.silent or look.busy:
            return look
        if name in self.unread:
            return replace(look, inventory_pending=True)
        return replace(look, inventory=self.gpus.get(name, gpus(count)))

    def go(self, *facts: FleetEvent) -> list[Order]:
        """Learn, schedule and answer looks until nothing new is ordered. All orders but looks."""
        self.learn(*facts)
        orders: list[Order] = []
        while True:
            orders += [order for order in self.settle() if not isinstance(order, ProbeOrder)]
            looks = self.of(ProbeOrder)
            if not looks:
                self.orders = orders
                return orders
            self.look(looks[0].nodes, looks[0].inventories)

    def wait(self, **by: float) -> list[Order]:
        self.now += timedelta(**by)
        return self.go()

    def claim(
        self, job: str, count: int, seq: int = 1, submission: int = 1, **more: Any
    ) -> list[Order]:
        more["holds"] = tuple(
            one if isinstance(one, Place) else Place(one)
            for one in more.get("holds", more.get("keep", ()))
        )
        return self.go(ClaimEvent(Claim(job, submission, seq, count, **{"since": T0, **more})))

    def of(self, kind: type[OneOrder]) -> list[OneOrder]:
        return [order for order in self.orders if isinstance(order, kind)]

    def grants(self, kind: str = "granted") -> dict[str, Grant]:
        return {tell.job: tell.grant for tell in self.of(GrantMessage) if tell.grant.kind == kind}

    def granted(self) -> dict[str, list[str]]:
        return {job: [place.node for place in grant.places] for job, grant in self.grants().items()}

    def node(self, name: str) -> NodeRecord:
        return next(node for node in self.state.nodes if node.name == name)

    def record(self, job: str) -> ClaimRecord:
        return next(record for record in self.state.claims if record.claim.job == job)

    def wakes_in(self) -> float:
        wake = self.scheduler.next_wake(self.state, self.now)
        assert wake == next_wake(self.state, self.now)
        return (wake - self.now).total_seconds()


def began(node: str, run: str = "r1", by: str = "fleet gpus") -> RepairStart:
    return RepairStart(node, f"repair/gpus/{node}", run, by, "Xid 79")


def ended(
    node: str, outcome: Any = "done", run: str = "r1", job: str = "", **more: Any
) -> RepairResult:
    verdict = Verdict.HEALTHY if outcome == "done" else Verdict.UNKNOWN
    told = {"by": "fleet gpus", "reason": "is healthy", "verdict": verdict, **more}
    return RepairResult(
        node, f"repair/gpus/{node}", run, told["by"], job, outcome, told["verdict"], told["reason"]
    )


def permit(node: str, step: Any = "reset", seq: int = 1, run: str = "r1") -> PermitRequestEvent:
    return PermitRequestEvent(
        PermitRequest(f"repair/gpus/{node}", run, seq, node, step, "Xid 79", T0)
    )
