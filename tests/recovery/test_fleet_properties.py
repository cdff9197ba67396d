"""What no fleet does, whatever jobs, nodes, repairs and people do, in whatever order.

And that each job that can be served is, in the end.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from relaunch.evidence.causes import Cause
from relaunch.evidence.findings import Verdict
from relaunch.pool.events import (
    ClaimEvent,
    ClaimReminder,
    DrainMessage,
    EndedJobs,
    FleetEvent,
    FleetFileContent,
    GrantMessage,
    OfferMessage,
    Order,
    PauseCommand,
    PermitMessage,
    PermitRequestEvent,
    PreviousRun,
    ProbeOrder,
    ProbeResults,
    QuarantineCommand,
    ReclaimOrder,
    ReclaimResult,
    ReleaseCommand,
    RepairRequest,
    RepairResult,
    RepairStart,
    ResumeCommand,
    RunningJobs,
)
from relaunch.pool.grants import OFFER_TIMEOUT
from relaunch.pool.messages import Claim, Grant, Offer, PermitRequest, Place, Suspect
from relaunch.pool.restore import export_state
from relaunch.pool.scheduler import Scheduler, apply_event, next_wake, schedule
from relaunch.pool.state import ClaimRecord, FleetState, LiveGeneration, NodeProbe, NodeStatus
from relaunch.spec.fleet import FleetLimits, FleetNode
from tests.recovery.fleet_builders import T0, Desk, gpus, nodes
from tests.recovery.generated import searched

STATES: TypeAdapter[FleetState] = TypeAdapter(FleetState)
FILE = (
    *nodes("n1", "n2", "n3", "n4"),
    *nodes("n5", gpus=4),
    *nodes("n6", gpus=0),
    *nodes("n7", spare=True),
)
LIMITS = FleetLimits(
    repairs_at_once=2, nodes_out=1, reboots_per_hour=2, replacement_wait=timedelta(minutes=2)
)
ONCE = (
    FleetFileContent,
    ClaimEvent,
    ProbeResults,
    EndedJobs,
    QuarantineCommand,
    ReclaimResult,
    PreviousRun,
    RepairStart,
    RepairResult,
)
JOBS = ("a", "b", "c", "d", "e")
CAUSES = (Cause.GPU_FATAL, Cause.UNKNOWN, Cause.HANG, Cause.NODE_FAULT)


@dataclass
class Job:
    """A submission: it obeys the fleet, and reports what it does, in order."""

    name: str
    submission: int
    wanted: int
    gpus: int
    priority: int
    most: int = 0
    """More than `wanted`: it runs with fewer, and takes more."""
    had: int = 0
    seq: int = 0
    generation: int = 0
    places: tuple[Place, ...] = ()
    """Where ranks of it may live."""
    avoid: tuple[str, ...] = ()
    suspects: tuple[Suspect, ...] = ()
    stays: dict[str, datetime] = field(default_factory=dict)
    """Nodes that it was asked to leave and does not before that time."""
    waits: bool = True
    hopeless: bool = False
    runs: bool = False

    def holds(self, node: str) -> bool:
        return any(place.node == node for place in self.places)


class World:
    def __init__(self) -> None:
        self.now = T0
        self.scheduler = Scheduler()
        self.state = FleetState("gpus")
        self.ended: tuple[FleetState, ...] = ()
        self.jobs: dict[str, Job] = {}
        self.closed: list[Job] = []
        self.submissions = 0
        self.ranks: dict[str, dict[tuple[str, int], tuple[int, ...]]] = {
            node.name: {} for node in FILE
        }
        """By node: whose ranks live there, with which GPUs."""
        self.silent: set[str] = set()
        self.foreign_processes: dict[str, set[int]] = {node.name: set() for node in FILE}
        """By node: GPUs on which another user computes."""
        self.seen: dict[str, tuple[datetime, set[int]]] = {}
        """By node: when the fleet learned last who computes there, and where that is."""
        self.lost: set[str] = set()
        """Nodes of which one GPU does not answer."""
        self.to_fleet: list[FleetEvent] = []
        self.to_jobs: list[tuple[str, Grant | Offer]] = []
        self.quarantined: set[str] = set()
        """By people, and not released since."""
        self.repairs: dict[str, int] = {}
        """Nodes under repair, and its run."""
        self.ordered: dict[str, str] = {}
        """Those of them that a job has ordered, and which."""
        self.says_no = False
        """The next job that is asked to leave a node stays until it has to."""
        self.runs = 0
        self.restarted = False
        self.begin()

    def begin(self) -> None:
        """The fleet's workflow is new, and knows only what the run before it says at some time."""
        self.to_fleet = [fact for fact in self.to_fleet if not isinstance(fact, PreviousRun)]
        self.ended = (self.state,) if self.state.is_restored else (self.state, *self.ended)
        self.to_fleet.append(export_state(*self.ended))
        self.state = FleetState("gpus")
        self.looking: list[ProbeOrder] = []
        self.reclaiming: list[ReclaimOrder] = []
        self.acting: set[str] = set()
        self.learn(FleetFileContent("act", FILE, LIMITS))
        self.learn(RunningJobs(tuple(sorted(self.jobs))))

    # --- the fleet

    def learn(self, fact: FleetEvent) -> None:
        once = apply_event(self.state, fact, self.now)
        if isinstance(fact, ONCE):
            assert replace(apply_event(once, fact, self.now), notices=once.notices) == once
        self.state = once

    def settle(self) -> None:
        busy = {"probe"} if self.looking else set()
        busy |= {one.key for one in self.reclaiming}
        before = self.state
        settled = self.scheduler.schedule(before, self.now, frozenset(busy))
        # what the scheduler keeps from the time before makes no difference
        assert settled == schedule(before, self.now, frozenset(busy))
        self.state = settled.state
        self.check_quarantines()
        # else a job may say that it holds what was given away, because no rank of it lived there
        if not self.restarted:
            self.check_places()
            self.check_offers()
        for order in settled.orders:
            self.check(order, before)
            self.carry_out(order, before)
        again = schedule(self.state, self.now, frozenset(busy | {"probe"}))
        news = [
            order
            for order in again.orders
            if not isinstance(order, GrantMessage) or order.grant.kind != "waiting"
        ]
        # what was ordered is ordered once
        assert news == []
        wake = self.scheduler.next_wake(self.state, self.now)
        assert wake == next_wake(self.state, self.now)
        assert wake > self.now

    def check_quarantines(self) -> None:
        if not self.state.is_restored:
            return
        if any("are forgotten" in notice for notice in self.state.notices):
            self.quarantined.clear()
        self.quarantined &= {node.name for node in self.state.nodes}
        out = {node.name for node in self.state.nodes if node.status is NodeStatus.QUARANTINED}
        # only a person ends a quarantine by a person, whatever was restarted since
        assert self.quarantined <= out

    def check_places(self) -> None:
        taken: dict[tuple[str, int], str] = {}
        gpus = {node.name: node.spec.gpus for node in self.state.nodes}
        for record in self.state.claims:
            for place in record.places:
                for gpu in place.gpus or range(gpus.get(place.node, 0)):
                    # no GPU has two owners
                    assert taken.setdefault((place.node, gpu), record.claim.job) == record.claim.job

    def check_offers(self) -> None:
        gpus = {node.name: node.spec.gpus for node in self.state.nodes}
        held = {
            (place.node, gpu): record.claim.job
            for record in self.state.claims
            for place in record.places
            for gpu in place.gpus or range(8)
        }
        for offer in self.state.offers:
            assert not offer.places or self.now < offer.until, "an offer ends"
            for place in offer.places:
                for gpu in place.gpus or range(gpus.get(place.node, 0)):
                    # what is offered is granted to no other job
                    assert held.get((place.node, gpu), offer.job) == offer.job

    def check(self, order: Order, before: FleetState) -> None:
        match order:
            case OfferMessage():
                record = next(one for one in self.state.claims if one.claim.job == order.job)
                # a waiting job comes first
                assert not any(one.is_waiting for one in self.state.claims)
                assert (
                    not self.state.breaker.is_open
                    and record.claim.more_at is not None
                    and record.claim.more_at <= self.now
                )
                # never more than it would take
                assert len(record.claim.keep) + len(order.offer.nodes) <= record.claim.most
                for name in order.offer.nodes:
                    node = next(node for node in self.state.nodes if node.name == name)
                    assert (
                        not node.spec.spare
                        and node.status is NodeStatus.IN_SERVICE
                        and node.drain is None
                    )
            case GrantMessage() if order.grant.kind == "granted":
                self.check_grant(
                    order.grant,
                    next(one for one in self.state.claims if one.claim.job == order.job),
                    before,
                )
            case RepairRequest():
                node = next(node for node in before.nodes if node.name == order.node)
                assert (node.status is NodeStatus.SUSPECT or node.missing_gpus) and not node.repair
                # never twice without an end
                assert order.node not in self.repairs or self.restarted
                assert not self.state.breaker.is_open and not self.state.breaker.paused
                assert not any(
                    place.node == order.node
                    for record in self.state.claims
                    for place in record.places
                )
                assert not self.ranks[order.node] or order.node in self.silent
                assert sum(node.status is NodeStatus.REPAIRING for node in self.state.nodes) <= 2
            case PermitMessage() if order.permit.allowed:
                assert not self.state.breaker.is_open or self.had_permit(before, order)
                if not self.restarted and not self.had_permit(before, order):
                    request = next(
                        one
                        for one in before.requests
                        if (one.workflow, one.run) == (order.workflow, order.permit.run)
                    )
                    on = {
                        one.claim.job
                        for one in self.state.claims
                        if any(place.node == request.node for place in one.places)
                    }
                    # nothing is done to a node that another job has
                    assert on <= {request.job}
            case DrainMessage() if not order.request.cancelled:
                node = next(node for node in self.state.nodes if node.name == order.request.node)
                assert (
                    order.request == (node.drain or node.repair_drain)
                    and order.job in node.asked_jobs
                )
                assert node.status is NodeStatus.QUARANTINED or (
                    node.status is NodeStatus.SUSPECT and not self.state.breaker.is_open
                )
            case ReclaimOrder() if order.generation is not None:
                # what runs is stopped only where its job has nothing
                present = self.jobs.get(order.job)
                assert present is None or not any(map(present.holds, order.nodes))
            case ReclaimOrder():
                present = self.jobs.get(order.job)
                assert (
                    present is None
                    or present.submission > order.submission
                    or order.job in self.said_it_ended()
                )
            case _:
                pass

    def check_grant(self, grant: Grant, record: ClaimRecord, before: FleetState) -> None:
        claim = record.claim
        if any(one.claim == claim and one.answer == grant for one in before.claims):
            return  # told again
        names = [place.node for place in grant.places]
        assert (grant.submission, grant.seq) == (claim.submission, claim.seq)
        assert claim.nodes <= len(names) == len(set(names)) <= claim.max_nodes
        assert not set(names) & set(claim.avoid)
        # who can run with what it has waits for no breaker
        assert not self.state.breaker.is_open or set(names) <= set(claim.keep)
        for place in grant.places:
            node = next(node for node in self.state.nodes if node.name == place.node)
            if (
                place.node in claim.stays
                and (wish := node.drain or node.repair_drain) is not None
                and self.now < wish.until
            ):
                continue  # it has a while
            assert node.drain is None
            assert node.status is NodeStatus.IN_SERVICE or (
                place.node in claim.keep and node.status is NodeStatus.QUARANTINED
            )
            assert not place.gpus or len(place.gpus) == claim.gpus
            mine = set(place.gpus or range(node.spec.gpus))
            if place.node not in claim.keep and node.spec.gpus:
                at, used = self.seen[place.node]
                # no job is granted what a foreign process was seen to use
                assert not mine & used
                # that was seen a moment ago
                assert self.now - at < timedelta(seconds=10)
                # no job is granted a node that lacks GPUs
                assert not node.missing_gpus
            for (job, _), share in self.ranks[place.node].items():
                # no other job has ranks on these GPUs
                assert job == claim.job or not mine & set(share or range(node.spec.gpus))

    def had_permit(self, before: FleetState, order: PermitMessage) -> bool:
        return any(one.permit == order.permit for one in before.permits)

    def said_it_ended(self) -> list[str]:
        return [record.claim.job for record in self.state.claims if record.is_closed] + [
            one.job for one in self.state.last_claims
        ]

    def carry_out(self, order: Order, before: FleetState) -> None:
        match order:
            case ProbeOrder():
                # a node whose GPUs are read is probed
                assert set(order.inventories) <= set(order.nodes)
                assert not any(
                    node.repair or not node.spec.gpus
                    for node in before.nodes
                    if node.name in order.inventories
                )
                self.looking.append(order)
            case GrantMessage():
                self.to_jobs.append((order.job, order.grant))
            case OfferMessage():
                self.to_jobs.append((order.job, order.offer))
            case ReclaimOrder():
                self.reclaiming.append(order)
            case ClaimReminder():
                job = self.jobs.get(order.job)
                if job is not None and job.runs:
                    self.go_on_with_all(job)
                elif job is not None:
                    self.claim(
                        job,
                        job.wanted,
                        tuple(place.node for place in job.places),
                        runs=bool(job.places),
                    )
            case RepairRequest() if order.node not in self.repairs:
                self.runs += 1
                self.repairs[order.node] = self.runs
                self.to_fleet.append(
                    RepairStart(
                        order.node,
                        f"repair/gpus/{order.node}",
                        str(self.runs),
                        "fleet gpus",
                        order.reason,
                    )
                )
            case PermitMessage() if order.permit.allowed:
                node = order.workflow.rpartition("/")[2]
                if str(self.repairs.get(node)) == order.permit.run:
                    self.acting.add(node)
                assert len(self.acting) <= 2
            case DrainMessage():
                job = self.jobs.get(order.job)
                if job is not None and order.request.cancelled:
                    job.stays.pop(order.request.node, None)
                elif job is not None and job.runs and job.holds(order.request.node):
                    if self.says_no:
                        self.says_no, job.stays[order.request.node] = False, order.request.until
                    else:
                        self.relaunch(job, order.request.node)
            case _:
                pass

    # --- the world

    def claim(
        self,
        job: Job,
        wanted: int,
        keep: tuple[str, ...] = (),
        *,
        runs: bool = False,
        most: int = 0,
        more_at: datetime | None = None,
    ) -> None:
        job.seq += 1
        # Who goes on with all that it has waits for no answer.
        job.waits = (wanted if more_at is not None else max(wanted, most)) > len(keep)
        job.runs = job.runs or (wanted > 0 and not job.waits)
        claim = Claim(
            job.name,
            job.submission,
            job.seq,
            wanted,
            job.gpus,
            job.priority,
            T0 + timedelta(seconds=job.submission),
            runs,
            keep,
            job.places,
            job.avoid,
            job.suspects,
            most,
            job.had if most else 0,
            more_at,
            tuple(node for node in keep if node in job.stays),
        )
        self.to_fleet.append(ClaimEvent(claim))

    def go_on_with_all(self, job: Job) -> None:
        """Go on; a minute later it may be launched again on more nodes, if it would take more."""
        job.had = len(job.places)
        at = self.now + timedelta(minutes=1) if job.had < job.most else None
        self.claim(
            job,
            job.had,
            tuple(place.node for place in job.places),
            runs=True,
            most=job.most if at else 0,
            more_at=at,
        )

    def submit(self, name: str, wanted: int, gpus: int, priority: int, most: int = 0) -> None:
        self.submissions += 1
        job = self.jobs[name] = Job(name, self.submissions, wanted, gpus, priority, most)
        self.claim(job, wanted, most=most)

    def stop(self, job: Job, node: str) -> None:
        """Proven, or fenced where the node does not answer."""
        self.ranks[node] = {
            who: gpus
            for who, gpus in self.ranks[node].items()
            if who[0] != job.name or who[1] > job.submission
        }

    def relaunch(self, job: Job, without: str, suspects: tuple[Suspect, ...] = ()) -> None:
        for place in job.places:
            self.stop(job, place.node)
        job.places = tuple(place for place in job.places if place.node != without)
        job.avoid = (*job.avoid, without)[-2:]
        job.suspects = (*job.suspects, *suspects)[-4:]
        job.had, job.runs = len(job.places) + 1, False
        self.claim(
            job, job.wanted, tuple(place.node for place in job.places), runs=True, most=job.most
        )

    def end(self, job: Job) -> None:
        for place in job.places:
            self.stop(job, place.node)
        job.places, job.runs = (), False
        self.claim(job, 0)
        del self.jobs[job.name]

    def hear(self, name: str, grant: Grant | Offer) -> None:
        job = self.jobs.get(name)
        if job is None or (grant.submission, grant.seq) != (job.submission, job.seq):
            return
        if isinstance(grant, Offer):
            if job.runs and not job.waits:
                self.claim(
                    job,
                    job.wanted,
                    tuple(place.node for place in job.places),
                    runs=True,
                    most=job.most,
                )
            return
        if (
            job.runs
            and job.waits
            and grant.kind != "hopeless"
            and not {place.node for place in job.places} <= {p.node for p in grant.places}
        ):
            self.go_on_with_all(job)  # it asked for more and is to have less, or to wait
            return
        if grant.kind == "hopeless":
            job.waits, job.hopeless = False, True
        if grant.kind == "yield" and job.waits:
            for place in job.places:
                self.stop(job, place.node)
            job.places = ()
            self.claim(job, job.wanted, most=job.most)
        if grant.kind == "granted" and job.waits:
            kept = {place.node: place for place in job.places}
            for node in {*grant.holding, *kept, *(place.node for place in grant.places)}:
                self.stop(job, node)
            job.places = grant.places
            job.waits, job.runs = False, True
            job.generation += 1
            for place in grant.places:
                if place.node not in self.silent:
                    self.ranks[place.node][name, job.submission] = place.gpus
            # a job of one size keeps it, others their bounds
            assert job.wanted <= len(grant.places) <= max(job.wanted, job.most)
            if job.most > job.wanted:
                self.go_on_with_all(job)

    def see(self, node: str, read: bool = False) -> NodeProbe:
        if node in self.silent:
            return NodeProbe(node, silent="no route to host")
        held = "a repair holds it" if node in self.repairs else ""
        living = tuple(
            LiveGeneration(job, submission, 1) for job, submission in sorted(self.ranks[node])
        )
        look = NodeProbe(node, boot_id="boot", busy=held, generations=living)
        count = next(one.gpus for one in FILE if one.name == node)
        if not read or held or not count:
            return look
        used = ((gpu, "alice") for gpu in sorted(self.foreign_processes[node]) if gpu < count)
        lost = ("0000:5e:00.0",) if node in self.lost else ()
        return replace(look, inventory=gpus(count - len(lost), *used, lost=lost))

    def release(self, node: str) -> None:
        self.learn(ReleaseCommand(node, "clean", "grace"))
        if any(one.name == node and not one.is_removed for one in self.state.nodes):
            self.quarantined.discard(node)

    def finish_look(self) -> None:
        order = self.looking.pop(0)
        looks = tuple(self.see(node, node in order.inventories) for node in order.nodes)
        self.seen |= {
            one.node: (self.now, {gpu for use in one.inventory.used for gpu in use.gpus})
            for one in looks
            if one.inventory
        }
        self.learn(ProbeResults(looks))

    def finish_reclaim(self) -> None:
        order = self.reclaiming.pop(0)
        clean = tuple(node for node in order.nodes if node not in self.silent)
        for node in clean:
            gone = [
                who
                for who in self.ranks[node]
                if who[0] == order.job and who[1] <= order.submission
            ]
            for who in gone:
                del self.ranks[node][who]
        self.learn(ReclaimResult(order.job, order.submission, clean))

    def finish_repair(self, node: str, outcome: Any) -> None:
        run = self.repairs.pop(node)
        self.lost -= {node} if outcome == "done" else set()
        self.acting.discard(node)
        healthy = Verdict.HEALTHY if outcome == "done" else Verdict.UNKNOWN
        job = self.ordered.pop(node, "")
        by = f"job {job}" if job else "fleet gpus"
        self.to_fleet.append(
            RepairResult(
                node, f"repair/gpus/{node}", str(run), by, job, outcome, healthy, "it was examined"
            )
        )

    def deliver(self) -> None:
        if self.to_fleet:
            self.learn(self.to_fleet.pop(0))

    def move(self, number: int, moves: tuple[str, ...] = ()) -> None:
        draw = Random(number)
        kind = draw.choice(moves or MOVES)
        node = draw.choice(FILE).name
        name = draw.choice(JOBS)
        job = self.jobs.get(name)
        match kind:
            case "wait":
                self.now += timedelta(seconds=draw.choice((1, 2, 5, 11, 60, 130, 700)))
            case "deliver":
                self.deliver()
            case "repeat" if self.state.claims:
                self.learn(ClaimEvent(draw.choice(self.state.claims).claim))
            case "hear" if self.to_jobs:
                self.hear(*self.to_jobs.pop(0))
            case "look" if self.looking:
                self.finish_look()
            case "lost" if self.looking:
                self.looking.pop(0)
            case "reclaim" if self.reclaiming:
                self.finish_reclaim()
            case "submit" if job is None:
                wanted = draw.randint(1, 4)
                most = draw.choice((0, 0, wanted + 1, wanted + 3))
                self.submit(
                    name, wanted, draw.choice((0, 0, 2, 4, 8)), draw.choice((0, 0, 1)), most
                )
            case "end" if job is not None:
                self.end(job)
            case "terminate" if job is not None:
                self.closed.append(self.jobs.pop(name))
            case "notice" if self.closed:
                gone = self.closed.pop(0)
                self.to_fleet.append(EndedJobs(((gone.name, gone.submission),)))
            case "fail" if job is not None and job.runs:
                bad = draw.choice(job.places).node
                cause = draw.choice(CAUSES)
                evidence = Suspect(
                    bad,
                    self.now,
                    job.generation,
                    cause,
                    f"{cause} on {bad}",
                    isolate=cause in (CAUSES[0], CAUSES[3]),
                )
                self.relaunch(job, bad, (evidence,))
            case "silence":
                self.silent ^= {node}
            case "stranger":
                self.foreign_processes[node] ^= {draw.randrange(8)}
            case "lose":
                self.lost ^= {node}
            case "repair" if self.repairs:
                self.finish_repair(
                    draw.choice(sorted(self.repairs)),
                    draw.choice(("done", "done", "refused", "ambiguous")),
                )
            case "permit" if self.repairs:
                at = draw.choice(sorted(self.repairs))
                step: Any = draw.choice(("reset", "reboot"))
                request = PermitRequest(
                    f"repair/gpus/{at}",
                    str(self.repairs[at]),
                    draw.randint(1, 3),
                    at,
                    step,
                    "Xid 79",
                    self.now,
                    job=self.ordered.get(at, ""),
                )
                self.to_fleet.append(PermitRequestEvent(request))
            case "order" if job is not None and job.runs and not job.waits:
                at = draw.choice(job.places).node
                if at not in self.repairs:
                    self.stop(job, at)
                    self.runs += 1
                    self.repairs[at], self.ordered[at] = self.runs, name
                    self.learn(
                        RepairStart(
                            at, f"repair/gpus/{at}", str(self.runs), f"job {name}", "Xid 119"
                        )
                    )
            case "stay":
                self.says_no = True
            case "leave" if (
                job is not None
                and job.runs
                and (due := [node for node, until in job.stays.items() if self.now >= until])
            ):
                job.stays.pop(due[0])
                if job.holds(due[0]):
                    self.relaunch(job, due[0])
            case "quarantine":
                self.learn(
                    QuarantineCommand(
                        node, "dust", "grace", draw.choice((None, timedelta(minutes=30)))
                    )
                )
                self.quarantined.add(node)
            case "release":
                self.release(node)
            case "pause":
                self.learn(PauseCommand("", "grace"))
            case "restart":
                self.restarted = True
                self.begin()
            case "resume":
                self.learn(ResumeCommand("", "grace"))
            case "file":
                left: tuple[FleetNode, ...] = tuple(
                    one for one in FILE if one.name != node or draw.random() < 0.5
                )
                self.learn(FleetFileContent("act", left, LIMITS))
            case _:
                pass
        self.settle()

    def calm_down(self) -> None:
        """Let everything answer, nothing fail, and all that is under way end well."""
        self.silent.clear()
        self.lost.clear()
        for used in self.foreign_processes.values():
            used.clear()
        while self.to_fleet:
            self.deliver()
        self.learn(FleetFileContent("act", FILE, LIMITS))
        self.learn(ResumeCommand("", "grace"))
        for node in FILE:
            self.release(node.name)
        while self.closed:
            gone = self.closed.pop(0)
            self.to_fleet.append(EndedJobs(((gone.name, gone.submission),)))

    def go_on(self) -> None:
        while self.to_fleet:
            self.deliver()
        for node in sorted(self.repairs):
            self.finish_repair(node, "done")
        while self.looking:
            self.finish_look()
        while self.reclaiming:
            self.finish_reclaim()
        self.settle()
        while self.to_jobs:
            self.hear(*self.to_jobs.pop(0))
        self.now = min(next_wake(self.state, self.now), self.now + timedelta(seconds=60))
        self.settle()


MOVES = (
    *("wait",) * 5,
    *("deliver",) * 8,
    *("hear",) * 6,
    *("look",) * 6,
    *("submit",) * 5,
    *("fail", "permit") * 4,
    *("reclaim", "repair", "notice") * 2,
    *("stranger",) * 3,
    *("order", "permit") * 2,
    *("stay", "leave"),
    *(
        "repeat",
        "lost",
        "lose",
        "end",
        "terminate",
        "silence",
        "quarantine",
        "release",
        "pause",
        "resume",
        "file",
        "restart",
    ),
)
SHARED = (
    *("fail", "order", "permit", "deliver", "deliver", "hear", "hear", "look", "look") * 2,
    *(
        "stay",
        "leave",
        "repair",
        "wait",
        "wait",
        "release",
        "resume",
        "quarantine",
        "terminate",
        "notice",
        "reclaim",
        "submit",
    ),
)
"""Jobs that share nodes, one of which has evidence against them."""
RUNS = st.lists(st.integers(0, 2**16), min_size=40, max_size=120)


@given(RUNS)
@searched(15)
def test_no_gpu_has_two_owners_and_every_feasible_job_is_served(numbers: list[int]) -> None:
    world = World()
    for number in numbers:
        world.move(number)
    assert schedule(world.state, world.now, frozenset()) == schedule(
        world.state, world.now, frozenset()
    )
    assert STATES.validate_json(STATES.dump_json(world.state)) == world.state
    world.calm_down()
    for _ in range(60):
        world.go_on()
        for job in [job for job in world.jobs.values() if job.runs]:
            world.end(job)
        if not world.state.claims and not any(world.ranks.values()):
            break
    # every claim that can be served was
    assert {job.name for job in world.jobs.values() if not job.hopeless} == set()
    assert not any(world.ranks.values())
    assert {record.claim.job for record in world.state.claims} <= {
        job.name for job in world.jobs.values()
    }


@given(st.lists(st.integers(0, 2**16), min_size=30, max_size=60))
@searched(15)
def test_a_shared_node_is_repaired_only_when_the_others_left_it(
    numbers: list[int],
) -> None:
    """The checks are with each order, above.

    A job that was asked leaves, or says no and leaves when it has to.
    """
    world = World()
    for name in JOBS:
        world.submit(name, 1, 2, 0)
    while not all(job.runs for job in world.jobs.values()):
        world.go_on()
    assert Counter(place.node for job in world.jobs.values() for place in job.places)["n5"] > 1, (
        "they share"
    )
    for number in numbers:
        world.move(number, SHARED)
    world.calm_down()
    world.settle()
    # no job is asked to leave a node that is in service
    assert all(not node.asked_jobs and node.repair_drain is None for node in world.state.nodes)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from((0, 2, 4, 8))), min_size=1, max_size=12)
)
@searched(15)
def test_equal_jobs_of_one_priority_are_served_in_order(
    wanted: list[tuple[int, int]],
) -> None:
    """A job is never served before an earlier one that wants no more, however long that waits."""
    now: datetime = T0
    state = FleetState("gpus")
    specs = nodes("n1", "n2", "n3", "n4")
    looks = ProbeResults(tuple(NodeProbe(node.name, inventory=gpus()) for node in specs))
    for fact in (FleetFileContent("act", specs, LIMITS), RunningJobs(()), PreviousRun(), looks):
        state = apply_event(state, fact, now)
    for number, (count, each) in enumerate(wanted):
        claim = Claim(f"j{number:02}", 1, 1, count, each, since=T0 + timedelta(seconds=number))
        state = apply_event(state, ClaimEvent(claim), now)
    served: list[int] = []
    running: list[str] = []
    for _ in range(2 * len(wanted)):
        settled = schedule(state, now, frozenset())
        state = settled.state
        granted = [
            order.job
            for order in settled.orders
            if isinstance(order, GrantMessage) and order.grant.kind == "granted"
        ]
        served += [int(job[1:]) for job in granted]
        running += granted
        if running:
            state = apply_event(state, ClaimEvent(Claim(running.pop(0), 1, 2, 0)), now)
        state = apply_event(state, looks, now)
    assert served == list(range(len(wanted)))


@given(
    st.lists(
        st.tuples(st.integers(1, 2), st.integers(0, 4), st.booleans()), min_size=1, max_size=3
    ),
    st.integers(1, 3),
    st.integers(0, 600),
)
@searched(25)
def test_a_waiting_job_is_served_however_many_would_like_to_grow(
    wanted: list[tuple[int, int, bool]], needs: int, after: int
) -> None:
    """Jobs run with fewer than they would take, and some let their offers pass.

    Then one comes that needs what is free.
    """
    desk = Desk(*nodes("n1", "n2", "n3", "n4", "n5", "n6", "n7", "n8", "n9"))
    takes: dict[str, bool] = {}
    places: dict[str, tuple[str, ...]] = {}
    seqs: Counter[str] = Counter()

    def says(job: str, count: int, keep: tuple[str, ...], most: int, **more: Any) -> None:
        seqs[job] += 1
        desk.claim(
            job,
            count,
            seq=seqs[job],
            keep=keep,
            most=most,
            had=len(keep),
            running=bool(keep),
            **more,
        )

    def answer() -> None:
        for tell in desk.of(OfferMessage):
            most = len(places[tell.job]) + len(tell.offer.nodes)
            if takes[tell.job]:
                says(tell.job, len(places[tell.job]), places[tell.job], most)
                places[tell.job] = tuple(place.node for place in desk.grants()[tell.job].places)
                # what was offered is granted
                assert len(places[tell.job]) == most

    for number, (count, _, taking) in enumerate(wanted):
        job = f"j{number}"
        says(job, count, (), count)
        places[job], takes[job] = tuple(desk.granted()[job]), taking
    for job, (count, extra, _) in zip(places, wanted, strict=True):
        says(job, count, places[job], count + extra, more_at=desk.now)
        answer()
    desk.now += timedelta(seconds=after)
    desk.go()
    answer()
    free = 9 - sum(map(len, places.values()))
    says("late", needs, (), needs)
    waited = T0 - T0
    while "late" not in desk.granted() and waited <= OFFER_TIMEOUT:
        # nothing is offered while a job waits
        assert not desk.of(OfferMessage)
        step = timedelta(seconds=desk.wakes_in())
        desk.now, waited = desk.now + step, waited + step
        desk.go()
    assert ("late" in desk.granted()) is (needs <= free)
