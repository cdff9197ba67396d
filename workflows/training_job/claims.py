"""The claims of a job on its fleet, and the answers. A claim states everything, so the answer to an
earlier one is void."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from pydantic import TypeAdapter

    from relaunch.activities.fleet import (
        FLEET_UNKNOWN,
        CountFreeInput,
        FleetActivities,
        TellFleetInput,
    )
    from relaunch.evidence.causes import OWN_CAUSES
    from relaunch.generation import LaunchedGeneration
    from relaunch.job.claim import (
        build_claim,
        build_current_claim,
        build_empty_claim,
        is_known_by,
        more_at,
        suspects,
    )
    from relaunch.job.drain import nodes_to_drain
    from relaunch.job.events import (
        FreeNodesCounted,
        NodesGranted,
        NodesMissing,
        RanksFound,
        SubmissionRaised,
        SubmitterChecked,
        WorkflowReset,
    )
    from relaunch.job.places import MOVED, StartedPlaces
    from relaunch.job.ranks import keep_places
    from relaunch.job.state import JobState, Phase, Relaunch, Slot
    from relaunch.messages.jobs import ClaimsCarried, OpenClaim
    from relaunch.pool.messages import Claim, FaultReport, Grant, Offer, Place
    from relaunch.text import count_noun, join_names
    from relaunch.workflows.training_job import commands
    from relaunch.workflows.training_job.commands import KEEP_TRYING
    from relaunch.workflows.training_job.session import Session
    from relaunch.workflows.training_job.stops import prove_stopped

GRANT = TypeAdapter(Grant)
COUNT_RETRY = RetryPolicy(maximum_attempts=3)
"""Of a number that only a sentence for people needs."""
NEW_CLAIM_PATCH = "claim-again-if-changed"
"""Recorded by jobs that do not repeat a claim when they learn that they wait."""
WANTED_AGAIN_PATCH = "claim-nodes-wanted-again"
"""Recorded by jobs whose waiting claim takes back a node that is not to be left any more."""
RESEND, REPORT = "resend the claim", "report faults"


class Claims:
    def __init__(self, session: Session, carried: ClaimsCarried) -> None:
        self._session = session
        self._signed = carried.signed
        """The submission as its caller has signed it."""
        self._seq = carried.seq
        self.nodes = carried.nodes
        """Nodes granted to the job and not given back: those of its slots, except for a moment
        around a launch."""
        self._open = carried.open
        """The claim that has not been answered yet."""
        self._grants = list(carried.grants)
        self.more_at = carried.more_at
        """When the job would take more, as last sent to the fleet."""
        self._launched = carried.launched
        """The launches with their fencing timeouts, as last sent to the fleet."""
        self._more = carried.more
        """Granted to a job that asked for more while it ran; it has not been launched with them
        yet."""
        self._reported = carried.reported
        """The faults last reported to the fleet."""
        self._growth_requests = 0
        """Counts the requests for more nodes; every request but the newest is void."""
        self._awaits_growth = False
        self.fewer = ""
        """Why the nodes last granted are fewer than the job would take."""

    @property
    def carried(self) -> ClaimsCarried:
        return ClaimsCarried(
            self._seq,
            self.nodes,
            self.more_at,
            self._more,
            launched=self._launched,
            reported=self._reported,
            open=self._open,
            grants=tuple(self._grants),
            signed=self._signed,
        )

    @property
    def _job(self) -> JobState:
        return self._session.job

    @property
    def is_waiting(self) -> bool:
        """Whether the fleet has not answered the claim yet."""
        return self._open is not None

    async def _claim_nodes(
        self, keep: tuple[str, ...], avoid: tuple[str, ...], *, queue: bool = False
    ) -> None:
        """Send a claim; `_next_grant` returns the answer."""
        self.nodes = keep
        self._open = OpenClaim(keep, avoid, queue)
        await self._send(self._build_open)

    def _build_open(self, seq: int) -> Claim:
        assert self._open is not None
        claim = self._open
        return build_claim(self._job, seq, keep=claim.keep, avoid=claim.avoid, queue=claim.queue)

    async def _next_grant(self) -> Grant:
        waiting = workflow.wait_condition(lambda: bool(self._grants))
        await self._session.tasks.wait(waiting)
        grant = self._grants.pop(0)
        if grant.kind == "granted":
            self.nodes, self._open, self.fewer = (
                tuple(place.node for place in grant.places),
                None,
                grant.fewer,
            )
        return grant

    # --- more nodes for a running job

    def start_growth(self) -> None:
        """Claim offered nodes in the background, unless that is already under way."""
        if not self.is_growing:
            self._session.tasks.start("claim more nodes", self._claim_more(self._job.generation))

    async def _claim_more(self, generation: int) -> None:
        """Claim the offered nodes while the ranks keep running. A later claim or return of nodes
        replaces this one."""
        own, avoid = self.nodes, tuple(one.node for one in self._job.avoided)
        self._growth_requests, self._awaits_growth = self._growth_requests + 1, True
        number = self._growth_requests

        def is_over() -> bool:
            return number != self._growth_requests

        self._open = OpenClaim(own, avoid)
        await self._send(self._build_open)
        await workflow.wait_condition(lambda: is_over() or bool(self._grants))
        if is_over():
            return
        grant = self._grants.pop(0)
        self._awaits_growth, self._open = False, None
        if grant.kind == "granted":
            self._more, self.fewer = grant.places, grant.fewer
        if grant.holding:
            self._session.post(_ranks_found(grant))
        self._session.post(NodesGranted(generation, tuple(place.node for place in grant.places)))

    @property
    def is_growing(self) -> bool:
        """Whether the job has asked for more and neither launched with the grant nor declined
        it."""
        return self._awaits_growth or bool(self._more)

    def cancel_growth(self) -> None:
        """Withdraw a request for more nodes: the job does something else, and the fleet may grant
        them to others."""
        if not self.is_growing:
            return
        if self._awaits_growth:
            self._growth_requests, self._awaits_growth, self._open = (
                self._growth_requests + 1,
                False,
                None,
            )
        self._more = ()
        self.start_resend()

    def forget(self) -> None:
        """Forget what was claimed and granted: the workflow was reset, and the fleet may have given
        the nodes to others since. The next launch claims them as a later submission."""
        self.nodes, self._open, self._more, self._awaits_growth = (), None, (), False
        self._growth_requests += 1
        self._grants.clear()

    def use_granted_nodes(self) -> tuple[Place, ...]:
        more, self._more = self._more, ()
        if more:
            self.nodes = tuple(place.node for place in more)
        return keep_places(self._job.slots, more)

    def is_current(self, offer: Offer) -> bool:
        """Return whether the offer belongs to the job's last claim."""
        return self._open is None and (offer.submission, offer.seq) == (
            self._job.submission,
            self._seq,
        )

    def keep_only(self, slots: tuple[Slot, ...]) -> tuple[Place, ...]:
        """Continue with some of the nodes; `send_current` informs the fleet once no rank lives on
        the others."""
        self.nodes = tuple(slot.node for slot in slots)
        return tuple(Place(slot.node, slot.address, slot.gpus) for slot in slots)

    # --- nodes for a launch

    async def acquire(
        self, decision: Relaunch, excluded: tuple[str, ...], *, resumed: bool
    ) -> tuple[Place, ...]:
        """Have the fleet grant all the nodes that are wanted; return none if it never can.

        With `resumed`, wait for the answer to the claim of the run before this one, if it sent one.
        """
        # Nodes of its slots that were given back may belong to another job by now.
        mine = (
            [slot.node for slot in self._job.slots if slot.node in self.nodes]
            if decision.keep_nodes
            else []
        )
        keep = tuple(node for node in mine if node not in excluded)
        waits = False
        if not (resumed and self.is_waiting):
            await self._claim_nodes(keep, excluded)
        while (grant := await self._next_grant()).kind != "granted":
            if grant.kind == "behind" and not self._job.slots:
                self._session.post(SubmissionRaised(grant.above + 1))
                await workflow.wait_condition(lambda: self._job.submission > grant.above)
                await self._claim_nodes(keep, excluded)
                continue
            is_hopeless = grant.kind in ("hopeless", "behind")
            unwanted = self._list_unwanted()
            reason, again = grant.reason, [node for node in excluded if node not in unwanted]
            if again and not waits and not is_hopeless:
                reason += f"; no other node is free, so it may use {join_names(again)} again"
            self._session.post(NodesMissing(reason, hopeless=is_hopeless))
            if is_hopeless:
                return ()
            if grant.kind == "yield":
                keep = self.nodes = ()
            if grant.kind == "yield" or not waits:
                # The job may wait for hours, and its ranks are not watched meanwhile.
                if alive := self._job.maybe_alive:
                    try:
                        generation, summary = decision.generation - 1, "stop what waits for nodes"
                        self._session.post(
                            await prove_stopped(self._session, generation, alive, summary)
                        )
                    except (ActivityError, asyncio.CancelledError) as error:
                        if is_cancelled_exception(error):
                            self._grants.insert(0, grant)  # the next run takes it again
                        raise
                    await workflow.wait_condition(lambda: not self._job.maybe_alive)
                # No other nodes are available. A node that was only lost is good again once it
                # answers, because its old ranks are stopped first.
                claim = OpenClaim(keep, self._list_unwanted(), grant.kind == "yield")
                # Another claim would make a grant void that is on its way.
                is_new = bool(alive) or claim != self._open
                if is_new or not workflow.patched(NEW_CLAIM_PATCH):
                    await self._claim_nodes(claim.keep, claim.avoid, queue=claim.queue)
            waits = True
        if grant.holding:
            self._session.post(_ranks_found(grant))
            await workflow.wait_condition(lambda: set(grant.holding) <= set(self._job.maybe_alive))
        return keep_places(self._job.slots if keep else (), grant.places)

    def _list_unwanted(self) -> tuple[str, ...]:
        """Return the nodes that the job does not use even where no other is free."""
        return (
            *nodes_to_drain(self._job, workflow.now()),
            *(avoided.node for avoided in self._job.avoided),
        )

    def claim_nodes_wanted_again(self) -> None:
        """Send the waiting claim again if it avoids a node that the job may use by now, such as
        one whose drain was cancelled."""
        job, claim = self._job, self._open
        if claim is None or job.phase is not Phase.WAITING_FOR_NODES:
            return
        # Where ranks may be alive, `acquire` proves them stopped and then claims again; a grant is
        # better than another claim.
        if job.maybe_alive or any(grant.kind == "granted" for grant in self._grants):
            return
        unwanted = self._list_unwanted()
        avoid = tuple(node for node in claim.avoid if node in unwanted)
        if avoid != claim.avoid and workflow.patched(WANTED_AGAIN_PATCH):
            self._open = replace(claim, avoid=avoid)
            self.start_resend()

    def must_send_timeouts(self, launch: LaunchedGeneration) -> bool:
        """Return whether the fleet knows too short timeouts for a later submission to judge this
        launch."""
        return not is_known_by(self._launched, launch)

    async def send_current(self) -> None:
        """Claim only the nodes of the job's slots: it no longer holds any other."""
        await self._send(self._current_claim)

    async def return_nodes(self) -> None:
        """Give back all nodes; the claim lists only those on which ranks may still live.

        Delivery to the server is enough: a fleet that is lost afterwards asks which jobs hold
        nodes, and this job will not be among them.
        """
        if self._seq:
            self.nodes, self._open = (), None
            await self._send(lambda seq: build_empty_claim(self._job, seq))

    def start_resend(self) -> None:
        """Send the claim again in the background: it has changed, or the fleet does not know it."""
        self._session.tasks.start(RESEND, self._resend())

    def update_growth_time(self) -> None:
        """Inform the fleet when the job would take more nodes, if that has changed."""
        job = self._job
        if not job.spec.is_elastic or job.phase is not Phase.RUNNING:
            return
        if job.drains or job.incident is not None:
            return
        busy = self.is_waiting or self.is_growing or self._session.tasks.is_running(RESEND)
        if not busy and more_at(job) != self.more_at:
            self.start_resend()

    async def _resend(self) -> None:
        if self._open is not None:
            await self._send(self._build_open)
        elif self.nodes:
            await self._send(self._current_claim)
        else:
            await self._send(lambda seq: build_empty_claim(self._job, seq))

    def take_grant(self, message: Any) -> None:
        """Take an answer.

        Raises:
            ValidationError: The message is not a grant.
        """
        grant = GRANT.validate_python(message)
        if (grant.submission, grant.seq) != (self._job.submission, self._seq):
            return
        if grant.submitter and grant.submitter != self._job.submitted_by:
            self._session.post(SubmitterChecked(grant.submitter))
        if grant.kind == "behind" and grant.above == grant.submission:
            self._session.post(WorkflowReset(grant.above + 1))
            return
        if self._open is not None:
            self._grants.append(grant)
        elif grant.holding:
            # The job already had all that it wanted; new is where older ranks live. They are
            # stopped with the next launch, or at the end.
            self._session.post(_ranks_found(grant))

    def _current_claim(self, seq: int) -> Claim:
        return build_current_claim(self._job, seq, self.nodes)

    async def _send(self, make: Callable[[int], Claim]) -> None:
        self._seq += 1
        self._grants.clear()
        job, message = self._job, make(self._seq)
        if message.nodes > 0 and not (message.running or message.keep or message.has_run):
            message = replace(message, submitted_by=job.submitted_by, signed=self._signed)
        self.more_at, self._launched, self._reported = (
            message.more_at,
            message.launched,
            message.suspects,
        )
        unknown = await self._signal("claim", message, _summary(message, job.spec.fleet))
        if unknown and self._open is not None and message.seq == self._seq:
            self._grants.append(Grant(job.submission, message.seq, "hopeless", reason=unknown))

    async def _signal(self, signal: str, message: Claim | FaultReport, summary: str) -> str:
        """Send the fleet a signal; return why there is no such fleet, or an empty string."""
        try:
            await commands.unless_cancelled(
                workflow.execute_activity_method(
                    FleetActivities.tell_fleet,
                    TellFleetInput(self._job.spec.fleet, signal, message),
                    start_to_close_timeout=timedelta(seconds=10),
                    retry_policy=KEEP_TRYING,
                    summary=summary,
                )
            )
        except ActivityError as error:
            cause = error.cause
            if not (isinstance(cause, ApplicationError) and cause.type == FLEET_UNKNOWN):
                raise
            return cause.message
        return ""

    # --- what a question says about the fleet

    def start_count(self) -> None:
        """Count in the background what could replace the nodes that an approval leaves out."""
        if self._job.asked is not None and self._job.asked.without:
            self._session.tasks.start("count free nodes", self._count_free())

    async def _count_free(self) -> None:
        job = self._job
        own = tuple(slot.node for slot in job.slots)
        avoid = tuple(dict.fromkeys((*own, *(one.node for one in job.avoided))))
        try:
            count = await commands.unless_cancelled(
                workflow.execute_activity_method(
                    FleetActivities.count_free_nodes,
                    CountFreeInput(job.spec.fleet, build_claim(job, self._seq, avoid=avoid)),
                    start_to_close_timeout=timedelta(seconds=15),
                    retry_policy=COUNT_RETRY,
                    summary=f"which nodes of fleet {job.spec.fleet} are free",
                )
            )
        except ActivityError as error:
            # The question then says what is done in either case.
            workflow.logger.info("%s", error.cause or error)
            return
        self._session.post(FreeNodesCounted(job.generation, count))

    # --- faults

    @property
    def _has_new_faults(self) -> bool:
        """Whether there are new faults to report at once.

        Faults that may be the job's own wait for its next claim: those of a single job are no
        reason to examine a node.
        """
        new = [one for one in suspects(self._job) if one not in self._reported]
        return bool(self._seq) and any(one.isolate or one.cause not in OWN_CAUSES for one in new)

    def start_fault_report(self) -> None:
        """Report new suspects at once, in the background: a job that restarts in place, or waits,
        sends no claim that would."""
        tasks = self._session.tasks
        if not tasks.is_running(REPORT) and self._job.ending is None and self._has_new_faults:
            # The task starts after the current decision, which may send a claim.
            tasks.start(REPORT, self._report_faults())

    async def _report_faults(self) -> None:
        """Report new evidence against nodes to the fleet, unless a claim has done so since."""
        if self._has_new_faults:
            job = self._job
            self._reported = suspects(job)
            report = FaultReport(job.name, job.submission, self._reported)
            await self._signal("report_faults", report, f"report faults to fleet {job.spec.fleet}")


def _ranks_found(grant: Grant) -> RanksFound:
    moved = StartedPlaces(0, 0, dict.fromkeys(grant.moved, MOVED))
    return RanksFound(
        grant.holding, launched=grant.launched, places=(moved,) if grant.moved else ()
    )


def _summary(message: Claim, fleet: str) -> str:
    if not message.nodes:
        return f"give every node back to fleet {fleet}"
    new = message.nodes - len(message.keep)
    kept = f", keeping {len(message.keep)}" if message.keep else ""
    if message.max_nodes > message.nodes:
        return f"ask fleet {fleet} for {message.nodes} to {message.most} nodes{kept}"
    return (
        f"ask fleet {fleet} for {count_noun(new, 'node')}{kept}"
        if new
        else f"tell fleet {fleet} which nodes are in use"
    )
