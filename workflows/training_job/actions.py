"""Carry out a job's decisions on its nodes, one action at a time: launch, stop, examine, repair."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from temporalio import workflow
from temporalio.exceptions import ActivityError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from relaunch.activities.launch import LaunchRanksOutput
    from relaunch.job.drain import nodes_to_drain
    from relaunch.job.events import (
        LaunchOrdered,
        NodesAcquired,
        RanksFound,
        RepairEnded,
    )
    from relaunch.job.fencing import fences, plan_generation, will_fence
    from relaunch.job.ladder import explain_shrink, remaining_slots
    from relaunch.job.places import StartedPlaces
    from relaunch.job.ranks import seat
    from relaunch.job.state import Examine, JobState, Relaunch, Repair, Slot
    from relaunch.messages.jobs import CarriedAction, ChosenNodes
    from relaunch.pool.messages import Place
    from relaunch.spec.policy import Strategy
    from relaunch.workflows.training_job import commands
    from relaunch.workflows.training_job.claims import Claims
    from relaunch.workflows.training_job.session import Session
    from relaunch.workflows.training_job.stops import prove_stopped


@dataclass(frozen=True, slots=True)
class OpenLaunch:
    """A launch that was ordered and has not reported its outcome."""

    generation: int
    sent: dict[str, str] = field(default_factory=dict)
    """Places of the nodes that got the order to start, as `commands.launch` fills it in."""


class Actions:
    """The action under way. A new one cancels it, and begins when its orders are released.

    Where it only waits (for nodes, for proof that ranks have stopped, for an examination or a
    repair) the workflow may continue as new: the next run begins the action again.
    """

    def __init__(
        self, session: Session, claims: Claims, dead: tuple[str, ...], carried: CarriedAction | None
    ) -> None:
        self._session = session
        self._claims = claims
        self.dead = dead
        """Nodes that a person has declared dead since nodes were last chosen."""
        self._action = carried
        """What is under way, as the next run would begin it again."""
        self.relaunching = carried.relaunch if carried is not None else None
        """The relaunch that was decided on and has not ended."""
        self._open_launch: OpenLaunch | None = None
        """It may have started ranks that `maybe_alive` does not yet include."""
        self._task: asyncio.Task[None] | None = None
        self._cancelled: list[asyncio.Task[None]] = []
        self._paused: CarriedAction | None = None

    @property
    def _job(self) -> JobState:
        return self._session.job

    @property
    def has_begun(self) -> bool:
        return self._task is not None

    @property
    def is_done(self) -> bool:
        return self._task is not None and self._task.done()

    async def wait(self) -> None:
        """Wait for the newest action.

        Raises:
            BaseException: The error of the action.
        """
        if self._task is not None:
            await self._task

    def relaunch(self, decision: Relaunch) -> None:
        self.relaunching = decision
        not_before = workflow.now() + decision.delay if decision.delay else None
        self._begin(CarriedAction("relaunch", relaunch=decision, not_before=not_before))

    def treat(self, decision: Examine | Repair) -> None:
        self._begin(CarriedAction("treat", treatment=decision))

    def stop(self, *, once: bool) -> None:
        """Stop all ranks. With `once`, try once on every node instead of waiting for the proof."""
        self._begin(CarriedAction("stop", once=once))

    def release(self, *, returns: bool) -> None:
        """Stop the ranks while a person is asked, which may take long, and withdraw a claim that
        waits. With `returns`, give back all nodes."""
        withdraws = returns or self._claims.is_waiting
        self._begin(CarriedAction("release", once=True, withdraws=withdraws))

    def give_up_launch(self) -> None:
        """End a launch that is under way although a person is asked, which is possible in jobs that
        an older build has left so. It keeps the nodes granted for it."""
        if self.is_under_way and self._action is not None and self._action.kind == "relaunch":
            self.release(returns=False)

    @property
    def has_to_resume(self) -> bool:
        """Whether the run before this one left an action that nothing has replaced yet."""
        return self._action is not None and self._task is None

    def resume(self) -> None:
        """Begin again what was under way when the run before continued as new, unless a later event
        has begun something else."""
        if self._action is not None and self._task is None:
            self._begin(self._action, resumed=True)

    def _begin(self, action: CarriedAction, *, resumed: bool = False) -> None:
        if self._task is not None:
            self._task.cancel()
            self._cancelled.append(self._task)
        self._cancelled = [one for one in self._cancelled if not one.done()]
        cancelled = tuple(self._cancelled)
        self._action = action

        async def carry_out() -> None:
            if cancelled:
                # Their orders must be released before anything else is ordered.
                await workflow.wait(cancelled)
            await self._report_open_launch()
            try:
                await self._carry_out(action, resumed=resumed)
            except ActivityError as error:
                if is_cancelled_exception(error):
                    return
                raise

        self._task = self._session.tasks.start("act", carry_out())

    async def _carry_out(self, action: CarriedAction, *, resumed: bool) -> None:
        match action.kind:
            case "relaunch":
                assert action.relaunch is not None
                await self._relaunch(action.relaunch, action, resumed=resumed)
            case "treat":
                assert action.treatment is not None
                await self._treat(action.treatment, dict(action.repairs))
            case "stop":
                await self._stop(once=action.once)
            case "release":
                await self._stop(once=True)
                if action.withdraws:
                    await self._claims.return_nodes()

    # --- continue-as-new

    @property
    def is_under_way(self) -> bool:
        return self._task is not None and not self._task.done()

    def pause(self) -> list[asyncio.Task[None]]:
        """Let go of the action under way, so that the next run begins it again; return the tasks
        that have to end first.

        A repair is left as it is: cancelled, it would end.
        """
        if self._task is None or not self._session.tasks.can_pause(self._task) or self._repairs:
            return []
        self._paused = self._action
        self._task.cancel()
        return [self._task]

    @property
    def carried(self) -> CarriedAction | None:
        """What the next run begins again."""
        return self._action if self.is_under_way else self._paused

    @property
    def _repairs(self) -> dict[str, str]:
        return self._action.repairs if self._action is not None else {}

    async def _report_open_launch(self) -> None:
        """After an aborted launch, report the nodes on which its ranks may have been started."""
        if (launch := self._open_launch) is None:
            return
        found = RanksFound(
            tuple(slot.node for slot in self._job.slots if slot.node not in self.dead),
            places=(StartedPlaces(self._job.submission, launch.generation, dict(launch.sent)),),
        )
        self._session.post(found)
        await workflow.wait_condition(lambda: found not in self._session.inbox)
        self._open_launch = None

    # --- launching

    async def _relaunch(self, decision: Relaunch, action: CarriedAction, *, resumed: bool) -> None:
        def is_superseded() -> bool:
            return decision.generation != self._job.generation or self._job.ending is not None

        if action.not_before is not None and (left := action.not_before - workflow.now()):
            await self._session.tasks.wait(
                workflow.sleep(
                    max(0.0, left.total_seconds()),
                    summary=f"delay before generation {decision.generation}",
                )
            )
        chosen = action.chosen or await self._choose_nodes(decision, resumed=resumed)
        if chosen is None or is_superseded():
            return
        self._action = replace(action, chosen=chosen)
        places, fewer, shrinks = chosen.places, chosen.fewer, chosen.shrinks
        slots = seat(self._job.slots, places, reassign=not decision.keep_nodes)
        leaves_ranks = self._leaves_ranks_behind(places)
        if leaves_ranks or self._needs_fencing(slots):
            # Stop ranks on all nodes, not only on those: a node that was cut off stops its ranks
            # only when no other node vouches for it.
            before = decision.generation - 1
            stopped = await prove_stopped(
                self._session,
                before,
                self._job.maybe_alive,
                f"stop generation {before} before another starts",
            )
            self._session.post(stopped)
            if is_superseded():
                return
        self._session.post(NodesAcquired(slots, fewer))
        if leaves_ranks or shrinks:
            await workflow.wait_condition(lambda: self._job.slots == slots)
            await self._claims.send_current()
        token = replace(self._job.token, generation=decision.generation)
        nodes = tuple(slot.node for slot in slots)
        while self._claims.must_send_timeouts(
            plan_generation(self._job, decision.generation, nodes)
        ):
            # The policy has changed: a later submission must not judge the ranks by shorter
            # timeouts.
            await self._claims.send_current()
            if is_superseded():
                return
        # From the same state as the orders: a later change of the policy applies to the next
        # launch.
        planned = plan_generation(self._job, decision.generation, nodes)
        self._session.post(LaunchOrdered(decision.generation, planned))
        self._open_launch = launch = OpenLaunch(decision.generation)

        def note(output: LaunchRanksOutput) -> None:
            launch.sent.update(output.places)
            if output.was_reset:
                self._session.was_reset(output.run)
            else:
                self._session.note_run(output.run)

        run = self._session.run
        self._session.post(await commands.launch(self._job, token, slots, run, note))
        self._open_launch = None
        self.relaunching = None

    async def _choose_nodes(self, decision: Relaunch, *, resumed: bool) -> ChosenNodes | None:
        """Return the nodes of the next launch. None: the fleet never can grant them.

        With `resumed`, the run before this one may have claimed them.
        """
        job, claims = self._job, self._claims
        excluded = tuple(
            dict.fromkeys(
                (
                    *decision.without,
                    *nodes_to_drain(job, workflow.now()),
                    *(avoided.node for avoided in job.avoided),
                )
            )
        )
        granted = set() if claims.is_waiting else set(claims.nodes)
        left = remaining_slots(job, excluded)
        if decision.strategy is Strategy.GROW and claims.is_growing:
            return ChosenNodes(claims.use_granted_nodes(), claims.fewer)
        if (
            decision.strategy is Strategy.SHRINK
            and not claims.is_waiting
            and {slot.node for slot in left} <= granted
            and len(left) >= job.spec.fewest_nodes
        ):
            return ChosenNodes(claims.keep_only(left), explain_shrink(job, left), shrinks=True)
        places = tuple(Place(slot.node, slot.address, slot.gpus) for slot in job.slots)
        names = {place.node for place in places}
        are_ours = bool(places) and not claims.is_waiting and names == granted
        if decision.keep_nodes and are_ours and not names & set(excluded):
            return ChosenNodes(places, job.fewer)
        acquired = await claims.acquire(decision, excluded, resumed=resumed)
        return ChosenNodes(acquired, claims.fewer) if acquired else None

    def _leaves_ranks_behind(self, places: tuple[Place, ...]) -> bool:
        """Return whether ranks may live on nodes that the next launch does not use."""
        return bool(set(self._job.maybe_alive) - {place.node for place in places})

    def _needs_fencing(self, slots: tuple[Slot, ...]) -> bool:
        """Return whether ranks that never fence themselves would be taken for ranks that do.

        Ranks launched without fencing, such as those of a single node, would be part of a gang that
        fences.
        """
        job = self._job
        return bool(job.maybe_alive) and not fences(job) and will_fence(job, len(slots))

    # --- examining, repairing, stopping

    async def _treat(self, decision: Examine | Repair, repairs: dict[str, str]) -> None:
        """Free the GPUs, which an examination and a repair both need, then order it.

        A check of links, or for foreign processes, comes before a launch, which would stop the
        ranks as well. `repairs` are
        those that a run before this one has begun.
        """
        generation = self._job.generation
        if self._job.maybe_alive:
            what = "examining" if isinstance(decision, Examine) else decision.strategy
            summary = f"stop generation {generation} before {what}"
            self._session.post(
                await prove_stopped(self._session, generation, self._job.maybe_alive, summary)
            )
        if isinstance(decision, Examine) and decision.links:
            self._session.post(await commands.check_links(self._job))
        elif isinstance(decision, Examine) and decision.foreign_processes:
            self._session.post(await commands.find_foreign_processes(self._job, decision))
        elif isinstance(decision, Examine):
            self._session.post(await commands.examine(self._job, decision))
        else:
            self._session.post(await self._repair(decision, repairs))

    async def _repair(self, decision: Repair, repairs: dict[str, str]) -> RepairEnded:
        task = asyncio.current_task()

        tasks = self._session.tasks

        def report_begin(node: str, run_id: str) -> None:
            begun[node] = run_id
            if task is self._task and self._action is not None and len(begun) == count:
                self._action = replace(self._action, repairs=dict(begun))
                tasks.mark_pausable(task)

        # What was refused is ordered again.
        begun = {node: run_id for node, run_id in repairs.items() if run_id}
        count = len(decision.nodes)
        if len(begun) == count:
            tasks.mark_pausable(task)
        try:
            return await commands.repair(self._job, decision, dict(begun), report_begin)
        finally:
            tasks.mark_busy(task)

    async def _stop(self, *, once: bool) -> None:
        job = self._job
        generation, alive = job.generation, job.maybe_alive
        nodes = tuple(slot.node for slot in job.slots if slot.node not in self.dead)
        if once:
            alive, nodes = (), tuple(dict.fromkeys((*alive, *nodes)))
        if alive:
            summary = f"stop generation {generation}"
            self._session.post(await prove_stopped(self._session, generation, alive, summary))
        if rest := tuple(node for node in nodes if node not in alive):
            # Proven stopped earlier; one of these nodes may be dead, so do not wait for it.
            summary = f"clean up after generation {generation}"
            self._session.post(
                await prove_stopped(self._session, generation, rest, summary, once=True)
            )
