"""The claims of a job on its fleet, and the answers. A claim states everything, so the answer to an
earlier one is void."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError

with workflow.unsafe.imports_passed_through():
    from pydantic import TypeAdapter

    from relaunch.activities.fleet import FLEET_UNKNOWN, FleetActivities, TellFleetInput
    from relaunch.evidence.causes import OWN_CAUSES
    from relaunch.generation import LaunchedGeneration
    from relaunch.job.claim import as_it_is, claim, give_back, is_known_by, suspects
    from relaunch.job.drain import left_out
    from relaunch.job.events import Event, NodesGranted, NodesMissing, RanksFound, SubmissionRaised
    from relaunch.job.places import MOVED, StartedPlaces
    from relaunch.job.ranks import keep_places
    from relaunch.job.state import JobState, Relaunch, Slot
    from relaunch.messages.jobs import ClaimsCarried
    from relaunch.pool.messages import Claim, FaultReport, Grant, Offer, Place
    from relaunch.workflows.training_job import commands
    from relaunch.workflows.training_job.commands import KEEP_TRYING

GRANT = TypeAdapter(Grant)


class Claims:
    def __init__(
        self, job: Callable[[], JobState], tell: Callable[[Event], None], carried: ClaimsCarried
    ) -> None:
        self._job = job
        self._tell = tell
        self._seq = carried.seq
        self.nodes = carried.nodes
        """Nodes granted to the job and not given back: those of its slots, except for a moment
        around a launch."""
        self._wants: Callable[[int], Claim] | None = None
        """The claim that has not been answered yet."""
        self._answers: list[Grant] = []
        self.more_at = carried.more_at
        """When the job would take more, as last sent to the fleet."""
        self._launched = carried.launched
        """The launches with their fencing timeouts, as last sent to the fleet."""
        self._more = carried.more
        """Granted to a job that asked for more while it ran; it has not been launched with them
        yet."""
        self._reported = carried.reported
        """The faults last reported to the fleet."""
        self._asks = 0
        """Counts the requests for more; every request but the newest is void."""
        self._grows = False
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
        )

    @property
    def waits(self) -> bool:
        return self._wants is not None

    async def _ask(
        self, keep: tuple[str, ...], avoid: tuple[str, ...], *, queue: bool = False
    ) -> None:
        """Send a claim; `_answer` returns the answer."""
        self.nodes = keep
        self._wants = lambda seq: claim(self._job(), seq, keep=keep, avoid=avoid, queue=queue)
        await self._send(self._wants)

    async def _answer(self) -> Grant:
        await workflow.wait_condition(lambda: bool(self._answers))
        grant = self._answers.pop(0)
        if grant.kind == "granted":
            self.nodes, self._wants, self.fewer = (
                tuple(place.node for place in grant.places),
                None,
                grant.fewer,
            )
        return grant

    # --- more nodes for a running job

    async def ask_for_more(self, generation: int) -> None:
        """Claim the offered nodes while the ranks keep running. A later claim or return of nodes
        replaces this one."""
        own, avoid = self.nodes, tuple(one.node for one in self._job().avoided)
        self._asks, self._grows = self._asks + 1, True
        number = self._asks

        def is_over() -> bool:
            return number != self._asks

        self._wants = lambda seq: claim(self._job(), seq, keep=own, avoid=avoid)
        await self._send(self._wants)
        await workflow.wait_condition(lambda: is_over() or bool(self._answers))
        if is_over():
            return
        grant = self._answers.pop(0)
        self._grows, self._wants = False, None
        if grant.kind == "granted":
            self._more, self.fewer = grant.places, grant.fewer
        if grant.holding:
            self._tell(_ranks_found(grant))
        self._tell(NodesGranted(generation, tuple(place.node for place in grant.places)))

    @property
    def is_asking_for_more(self) -> bool:
        """Whether the job has asked for more and neither launched with the grant nor declined
        it."""
        return self._grows or bool(self._more)

    def forget_more(self) -> None:
        """Forget the request for more, because the job does something else; its next claim tells
        the fleet so."""
        if self._grows:
            self._asks, self._grows, self._wants = self._asks + 1, False, None
        self._more = ()

    def take_more(self) -> tuple[Place, ...]:
        more, self._more = self._more, ()
        if more:
            self.nodes = tuple(place.node for place in more)
        return keep_places(self._job().slots, more)

    def is_current(self, offer: Offer) -> bool:
        """Return whether the offer belongs to the job's last claim."""
        return self._wants is None and (offer.submission, offer.seq) == (
            self._job().submission,
            self._seq,
        )

    def leave(self, slots: tuple[Slot, ...]) -> tuple[Place, ...]:
        """Continue with some of the nodes; `say_what_is_left` informs the fleet once no rank lives
        on the others."""
        self.nodes = tuple(slot.node for slot in slots)
        return tuple(Place(slot.node, slot.address, slot.gpus) for slot in slots)

    # --- nodes for a launch

    async def acquire(self, decision: Relaunch, excluded: tuple[str, ...]) -> tuple[Place, ...]:
        """Have the fleet grant all the nodes that are wanted; return none if it never can."""
        # Nodes of its slots that were given back may belong to another job by now.
        mine = (
            [slot.node for slot in self._job().slots if slot.node in self.nodes]
            if decision.keep_nodes
            else []
        )
        keep = tuple(node for node in mine if node not in excluded)
        waits = False
        await self._ask(keep, excluded)
        while (grant := await self._answer()).kind != "granted":
            if grant.kind == "behind" and not self._job().slots:
                self._tell(SubmissionRaised(grant.above + 1))
                await workflow.wait_condition(lambda: self._job().submission > grant.above)
                await self._ask(keep, excluded)
                continue
            is_hopeless = grant.kind in ("hopeless", "behind")
            self._tell(NodesMissing(grant.reason, hopeless=is_hopeless))
            if is_hopeless:
                return ()
            if grant.kind == "yield":
                keep = self.nodes = ()
            if grant.kind == "yield" or not waits:
                # The job may wait for hours, and its ranks are not watched meanwhile.
                if alive := self._job().maybe_alive:
                    self._tell(
                        await commands.prove_stopped(
                            self._job(), decision.generation - 1, alive, "stop what waits for nodes"
                        )
                    )
                    await workflow.wait_condition(lambda: not self._job().maybe_alive)
                # No other nodes are available. A node that was only lost is good again once it
                # answers, because its old ranks are stopped first.
                unwanted = (
                    *left_out(self._job(), workflow.now()),
                    *(avoided.node for avoided in self._job().avoided),
                )
                await self._ask(keep, unwanted, queue=grant.kind == "yield")
            waits = True
        if grant.holding:
            self._tell(_ranks_found(grant))
            await workflow.wait_condition(
                lambda: set(grant.holding) <= set(self._job().maybe_alive)
            )
        return keep_places(self._job().slots if keep else (), grant.places)

    def must_tell_times(self, launch: LaunchedGeneration) -> bool:
        """Return whether the fleet knows too short timeouts for a later submission to judge this
        launch."""
        return not is_known_by(self._launched, launch)

    async def say_what_is_left(self) -> None:
        """Claim only the nodes of the job's slots: it no longer holds any other."""
        await self._send(self._as_it_is)

    async def give_back(self) -> None:
        """Give back all nodes; the claim lists only those on which ranks may still live.

        Delivery to the server is enough: a fleet that is lost afterwards asks which jobs hold
        nodes, and this job will not be among them.
        """
        if self._seq:
            self.nodes, self._wants = (), None
            await self._send(lambda seq: give_back(self._job(), seq))

    async def resend(self) -> None:
        """Send the last claim again: the fleet was restarted and does not know it."""
        if self._wants is not None:
            await self._send(self._wants)
        elif self.nodes:
            await self._send(self._as_it_is)
        else:
            await self._send(lambda seq: give_back(self._job(), seq))

    def receive(self, message: Any) -> None:
        """Take an answer.

        Raises:
            ValidationError: The message is not a grant.
        """
        grant = GRANT.validate_python(message)
        if (grant.submission, grant.seq) != (self._job().submission, self._seq):
            return
        if self._wants is not None:
            self._answers.append(grant)
        elif grant.holding:
            # The job already had all that it wanted; new is where older ranks live. They are
            # stopped with the next launch, or at the end.
            self._tell(_ranks_found(grant))

    def _as_it_is(self, seq: int) -> Claim:
        return as_it_is(self._job(), seq, self.nodes)

    async def _send(self, make: Callable[[int], Claim]) -> None:
        self._seq += 1
        self._answers.clear()
        job, message = self._job(), make(self._seq)
        self.more_at, self._launched, self._reported = (
            message.more_at,
            message.launched,
            message.suspects,
        )
        unknown = await self._signal("claim", message, _summary(message, job.spec.fleet))
        if unknown and self._wants is not None and message.seq == self._seq:
            self._answers.append(Grant(job.submission, message.seq, "hopeless", reason=unknown))

    async def _signal(self, signal: str, message: Claim | FaultReport, summary: str) -> str:
        """Send the fleet a signal; return why there is no such fleet, or an empty string."""
        try:
            await commands.unless_cancelled(
                workflow.execute_activity_method(
                    FleetActivities.tell_fleet,
                    TellFleetInput(self._job().spec.fleet, signal, message),
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

    # --- faults

    @property
    def has_faults_to_report(self) -> bool:
        """Whether there are new faults to report at once.

        Faults that may be the job's own wait for its next claim: those of a single job are no
        reason to examine a node.
        """
        new = [one for one in suspects(self._job()) if one not in self._reported]
        return bool(self._seq) and any(one.isolate or one.cause not in OWN_CAUSES for one in new)

    async def report_faults(self) -> None:
        """Report new evidence against nodes to the fleet, unless a claim has done so meanwhile."""
        if self.has_faults_to_report:
            job = self._job()
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
        f"ask fleet {fleet} for {new} node{'s' * (new != 1)}{kept}"
        if new
        else f"tell fleet {fleet} which nodes are in use"
    )
