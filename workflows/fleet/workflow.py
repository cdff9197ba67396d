"""Workflow of one fleet of nodes: takes facts from its inbox, has the scheduler settle grants and
repairs, and carries out its orders.

It asks the nodes and the server for the current state and never trusts only what it remembers: a
fleet that was terminated starts over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, cast

from temporalio import workflow
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from relaunch.messages.fleets import (
        FleetFile,
        FleetInput,
        FleetNews,
        WatchFleetInput,
        apply_message,
        claim_fact,
        dead_fact,
        fault_report_fact,
        pause_fact,
        quarantine_fact,
        read,
        release_fact,
        repair_began_fact,
        repair_ended_fact,
        repair_wanted_fact,
        resume_fact,
        short,
    )
    from relaunch.messages.ids import REPAIR_ID_PREFIX, WORKFLOW_ID_PREFIX
    from relaunch.messages.notices import Notice
    from relaunch.pool.breaker import is_doubly_stopped
    from relaunch.pool.counts import FleetCounts, count_fleet
    from relaunch.pool.events import (
        ClaimReminder,
        DrainMessage,
        EndedJobs,
        FleetEvent,
        FleetFileContent,
        GrantMessage,
        MalformedMessage,
        OfferMessage,
        Order,
        PermitMessage,
        PermitRequestEvent,
        PersonCommand,
        ProbeOrder,
        ProbeResults,
        ReclaimOrder,
        ReclaimResult,
        ReleaseCommand,
        RepairRequest,
        RepairResult,
        ResumeCommand,
        RunningJobs,
    )
    from relaunch.pool.messages import Claim
    from relaunch.pool.nodes import (
        SWEEP_INTERVAL,
        find_node,
        is_released_since,
        put_node,
        returns_known,
    )
    from relaunch.pool.restore import is_restoring
    from relaunch.pool.scheduler import PROBE, WATCH, Scheduler, apply_event
    from relaunch.pool.state import FleetState, NodeStatus
    from relaunch.spec.fleet import FleetLimits
    from relaunch.text import count_noun
    from relaunch.workflows.builds import continue_as_new, is_build_outdated
    from relaunch.workflows.fleet import commands
    from relaunch.workflows.fleet.details import fleet_details
    from relaunch.workflows.fleet.notices import list_notices, resolve_notice
    from relaunch.workflows.notifier.tell import tell_people
    from relaunch.workflows.patches import RepeatedPatch
    from relaunch.workflows.updates import read_signed_message

CHECK_WHILE_WAITED_FOR = timedelta(seconds=10)
"""How often the fleet file is read, and the server is asked which jobs have ended without giving
back their nodes, while a job waits: it may wait for nodes of a terminated job. Otherwise, and once
a job has waited longer than `HURRY_FOR`, the watch does that every minute."""
HURRY_FOR = timedelta(minutes=10)
SHORTEST_WAIT = timedelta(milliseconds=100)
"""So that a time that has just passed causes no busy loop."""
MAX_EVENTS = 1000
"""Events of a run before it continues as new. The server suggests it at 4,096; but a continuation
fails if a message arrives while it is on its way, and the whole run is then replayed, which must
not take longer than the pause between two messages of a busy fleet."""
CHECK, FIND, REMEMBER = "check", "find", "remember"
PEOPLE = "people"
MAX_ID_BYTES = 1000
"""Of the id of a workflow; the server's limit."""
MAX_NOTICES = 100
"""Notices posted at once."""
POST_TIMEOUT = timedelta(seconds=20)
"""How long a fleet that continues as new waits until they are posted: so long an attempt takes.
Then the next run posts them."""


@workflow.defn
class Fleet:
    @workflow.init
    def __init__(self, start: FleetInput) -> None:
        self._name = start.name
        if workflow.info().continued_run_id is None:
            start = FleetInput(start.name)  # a person who starts one by hand brings no rules along
        self._state = start.resume or FleetState(name=start.name)
        self._scheduler = Scheduler(spares_renamed=RepeatedPatch("renamed-nodes").is_reached)
        self._clearings = RepeatedPatch("cleared-nodes")
        self._renewals = RepeatedPatch("renewed-permits")
        self._inbox: list[FleetEvent] = list(start.inbox)
        self._early: list[FleetEvent] = []
        """Facts that arrived before the fleet file was read: they may be about nodes that are not
        known yet."""
        self._checked_at = start.checked_at
        self._check_asked = False
        self._settled: tuple[FleetState, frozenset[str]] | None = None
        """The state after the last settling, and what was under way then: while both are unchanged,
        only time brings news."""
        self._wake: datetime | None = None
        self._file_digest = start.file_digest
        """Of the fleet file as last read."""
        self._file_wrong = ""
        self._watched: WatchFleetInput | None = None
        """The input of the watch under way."""
        self._watched_since = workflow.now()
        self._watched_probes = 0
        """How many probes had been ordered when it began."""
        self._asking: dict[str, asyncio.Task[None]] = {}
        """Questions and orders that the next run can repeat, by key."""
        self._telling: dict[str, asyncio.Task[None]] = {}
        """Signals and repairs being sent, by receiver: they would not be sent a second time."""
        self._outbox: dict[str, list[tuple[str, Any]]] = {}
        self._open_notices = list(start.open_notices)
        """The keys of the open matters that people were notified of."""
        self._notices: list[Notice] = []
        """To be posted, or on their way."""

    @workflow.run
    async def run(self, start: FleetInput) -> None:
        while True:
            self._learn()
            if self._state.awaited_jobs is None:
                self._ask(FIND, self._find_jobs)
            if self._state.nodes and is_restoring(self._state, workflow.now()):
                self._ask(REMEMBER, self._remember)
            self._keep_watching()  # first: a watch makes a check unnecessary
            if (due := self._check_due()) is not None and due <= workflow.now():
                self._checked_at, self._check_asked = workflow.now(), False
                self._ask(CHECK, self._check)
            if self._is_news():
                if (
                    self._state.is_file_read
                ):  # before that, a job would get the answer that there are no nodes
                    self._settle()
                    self._wake = self._scheduler.next_wake(
                        self._state, workflow.now(), frozenset(self._asking)
                    )
                self._settled = (self._state, frozenset(self._asking))
                now = workflow.now()
                notable = self._scheduler.list_notable(self._state, now)
                self._tell_people(list_notices(self._state, notable, now))
                workflow.set_current_details(
                    fleet_details(self._state, notable, now, self._doing(), self.next())
                )
                if self._may_watch():
                    continue  # begin now: only while it is not watched does the fleet set a timer
            await self._news()
            self._forget_ended()
            if self._continues_as_new():
                await self._continue_as_new()

    def _learn(self) -> None:
        while self._inbox:
            fact = self._inbox.pop(0)
            if not self._state.is_file_read and not isinstance(
                fact, FleetFileContent | RunningJobs | MalformedMessage
            ):
                self._early.append(fact)
                continue
            if (
                isinstance(fact, FleetFileContent)
                and returns_known(self._state, fact)
                and not workflow.patched("removed-nodes")
            ):
                self._state = replace(self._state, removed=())
            if (
                isinstance(fact, ResumeCommand)
                and is_doubly_stopped(self._state)
                and not workflow.patched("keep-pause")
            ):
                fact = replace(fact, ends_both=True)
            if (
                isinstance(fact, PermitRequestEvent)
                and fact.request.renews is not None
                and not self._renewals.is_reached()
            ):
                fact = replace(fact, request=replace(fact.request, renews=None))
            before, self._state = self._state, apply_event(self._state, fact, workflow.now())
            if isinstance(fact, ReleaseCommand | RepairResult):
                self._keep_clearing(before, fact.node)
            if isinstance(fact, ReleaseCommand):
                self._withdraw_repair(before, fact.node)
            if self._state.is_file_read:
                self._inbox[:0], self._early = self._early, []

    def _is_news(self) -> bool:
        """Return whether there is anything to settle.

        Settling a fleet of thousands of nodes takes tens of milliseconds, and each delivered
        message wakes it too.
        """
        if self._settled is None or (self._wake is not None and workflow.now() >= self._wake):
            return True
        state, asking = self._settled
        return state is not self._state or asking != frozenset(self._asking)

    async def _news(self) -> None:
        """Wait until a message arrives, a task under way has ended, or it is time."""

        def news() -> bool:
            return (
                bool(self._inbox)
                or (self._check_asked and CHECK not in self._asking)
                or any(task.done() for task in self._under_way())
                or self._continues_as_new()
            )

        times = [at for at in (self._check_due(), self._wake, self._rewatch_due()) if at]
        wait = max(SHORTEST_WAIT, min(times) - workflow.now()) if times else None
        try:
            await workflow.wait_condition(
                news, timeout=wait, timeout_summary="until it looks again, if nothing happens"
            )
        except TimeoutError:
            return

    def _settle(self) -> None:
        settled = self._scheduler.schedule(self._state, workflow.now(), frozenset(self._asking))
        self._state = settled.state
        for order in settled.orders:
            self._carry_out(order)

    def _carry_out(self, order: Order) -> None:
        workflow.logger.info("%s", str(order)[:300])
        match order:
            case ProbeOrder():
                self._ask(PROBE, lambda: self._probe(order))
            case ReclaimOrder():
                self._ask(order.key, lambda: self._reclaim(order))
            case GrantMessage():
                self._tell(f"{WORKFLOW_ID_PREFIX}{order.job}", "granted", order.grant)
            case OfferMessage():
                self._tell(f"{WORKFLOW_ID_PREFIX}{order.job}", "nodes_offered", order.offer)
            case DrainMessage():
                self._tell(f"{WORKFLOW_ID_PREFIX}{order.job}", "drain_node", order.request)
            case ClaimReminder():
                self._tell(f"{WORKFLOW_ID_PREFIX}{order.job}", "claim_again", {})
            case PermitMessage():
                self._tell(order.workflow, "permitted", order.permit)
            case RepairRequest():
                self._telling[f"repair of {order.node}"] = asyncio.create_task(self._repair(order))

    def _keep_clearing(self, before: FleetState, name: str) -> None:
        """Forget that a node was found healthy or released, in a replay of what 0.1.0 has done.

        It did not note the time. With it, evidence and repairs from before count for less, and the
        fleet would not give the orders that the history has.
        """
        was, node = find_node(before, name), find_node(self._state, name)
        if was is None or node is None or node.cleared_at == was.cleared_at:
            return
        if not self._clearings.is_reached():
            as_before = replace(node, cleared_at=was.cleared_at, released_at=was.released_at)
            self._state = put_node(self._state, as_before)

    def _withdraw_repair(self, before: FleetState, name: str) -> None:
        """Cancel a repair of a node that a person has released, if it has done nothing to it:
        what it asks is answered by that."""
        was, node = find_node(before, name), find_node(self._state, name)
        if was is None or node is None or was.status is not NodeStatus.REPAIRING:
            return
        if not is_released_since(node) or not workflow.patched("withdraw-repair"):
            return
        self._telling[f"withdrawal of {node.repair}"] = asyncio.create_task(
            commands.withdraw_repair(node.repair, node.past[-1].end)
        )

    # --- questions and orders

    def _ask(self, key: str, question: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if key not in self._asking:
            self._asking[key] = asyncio.create_task(question())

    async def _find_jobs(self) -> None:
        jobs = await commands.find_jobs(self._name)
        if jobs is not None:
            self._inbox.append(RunningJobs(jobs))

    async def _remember(self) -> None:
        known = await commands.read_last_state(self._name)
        if known is not None:
            self._inbox.append(known)

    async def _check(self) -> None:
        """Read the fleet file, and ask the server which jobs have ended without giving back their
        nodes."""
        found = await commands.read_fleet(self._name, self._file_digest)
        if found is not None:
            self._take_file(found)
        if self._state.restore_error and not is_restoring(self._state, workflow.now()):
            await self._remember()  # a worker that was busy or away may be able to answer by now
        if self._state.awaited_jobs:  # a job that has ended meanwhile never claims what it holds
            await self._find_jobs()
        if (claims := self._open_claims()) and (
            closed := await commands.find_closed_jobs(self._name, claims)
        ):
            self._inbox.append(EndedJobs(closed))

    def _take_file(self, found: FleetFile) -> None:
        if not found.wrong:
            if found.applied is not None:
                self._inbox.append(found.applied)
            self._file_digest, self._file_wrong = found.digest, ""
            return
        if found.wrong != self._file_wrong:
            self._inbox.append(MalformedMessage("fleet file", found.wrong))
        if found.applied is not None:  # as the worker serves it since it could be used last
            self._inbox.append(found.applied)
            self._file_digest = found.digest
        elif not self._state.is_file_read:  # claims are then answered that there are no nodes
            self._inbox.append(FleetFileContent("observe", (), FleetLimits()))
        self._file_wrong = found.wrong

    async def _probe(self, order: ProbeOrder) -> None:
        probes = await commands.probe_nodes(self._name, order)
        if probes is not None:
            self._inbox.append(ProbeResults(probes))

    async def _reclaim(self, order: ReclaimOrder) -> None:
        clean = await commands.reclaim(self._name, order)
        # Of a submission that runs, the next probe shows what is left: it may have been granted
        # one of these nodes meanwhile.
        if clean and order.generation is None:
            self._inbox.append(ReclaimResult(order.job, order.submission, clean))

    async def _repair(self, order: RepairRequest) -> None:
        def is_awaited() -> bool:
            ordered = (
                f"{REPAIR_ID_PREFIX}{self._name}/{order.node}"  # once begun, the run follows in it
            )
            return any(
                node.name == order.node and node.repair == ordered for node in self._state.nodes
            )

        await commands.start_repair(self._name, order, is_awaited)

    # --- the watch: one activity looks after everything while nothing happens

    def _keep_watching(self) -> None:
        """Begin a watch if there is none and there is time for one, and end one whose input is no
        longer so."""
        if self._may_watch():
            self._ask(WATCH, self._watch)
        elif (due := self._rewatch_due()) is not None and due <= workflow.now():
            self._asking[WATCH].cancel()

    def _may_watch(self) -> bool:
        """Return whether a watch can begin. While the fleet has other questions, or a job
        hurries, it asks by itself."""
        state = self._state
        return (
            state.is_probed
            and state.awaited_jobs == ()
            and state.is_restored
            and not (state.restore_error or self._inbox or self._check_asked or self._hurries())
            and self._asking.keys().isdisjoint((WATCH, PROBE, CHECK, FIND, REMEMBER))
        )

    async def _watch(self) -> None:
        now, state = workflow.now(), self._state
        last = max((at for at in (state.swept_at, state.watched_at) if at), default=now)
        self._watched = WatchFleetInput(
            self._name,
            self._file_digest,
            self._file_wrong,
            self._open_claims(),
            self._scheduler.list_known(state, now),
            first_in=max(timedelta(0), last + SWEEP_INTERVAL - now),
            interval=SWEEP_INTERVAL,
        )
        self._watched_since, self._watched_probes = now, state.probe_count
        news = await commands.watch_fleet(self._watched)
        self._watched = None
        if news is None and _is_cancelled() and workflow.patched("unfinished-watch"):
            return  # no round: the next watch begins with one that is due
        news = news or FleetNews()
        if news.file is not None:
            self._take_file(news.file)
        if news.closed:
            self._inbox.append(EndedJobs(news.closed))
        self._inbox.append(ProbeResults(news.probes, is_sweep=True))

    def _rewatch_due(self) -> datetime | None:
        """Return when the watch under way is to be replaced: its input is no longer so.

        At once if a repair has begun on a node whose GPUs it reads: none may be open for a reset.
        Otherwise once a minute at most, which is as often as it looks.
        """
        watched = self._watched
        if watched is None:
            return None
        since = self._watched_since
        if any(node.repair for node in self._scheduler.list_notable(self._state, workflow.now())):
            repaired = {node.name for node in self._state.nodes if node.repair}
            if any(node.read_in is not None and node.node in repaired for node in watched.nodes):
                return since
        is_current = (
            self._watched_probes == self._state.probe_count
            and watched.claims == self._open_claims()
            and watched.file_digest == self._file_digest
            and watched.file_wrong == self._file_wrong
        )
        return None if is_current or self._hurries() else since + SWEEP_INTERVAL

    def _open_claims(self) -> tuple[tuple[str, int], ...]:
        return tuple(record.key for record in self._state.claims if not record.is_closed)

    # --- signals to other workflows

    def _tell(self, receiver: str, signal: str, message: Any) -> None:
        """Send a signal after those on their way to the same receiver: a grant must not be
        overtaken by the one that it replaces."""
        if len(receiver.encode()) > MAX_ID_BYTES:
            return  # no workflow has such an id, and the server would refuse this task, for ever
        self._outbox.setdefault(receiver, []).append((signal, message))
        if receiver not in self._telling:
            self._telling[receiver] = asyncio.create_task(self._deliver(receiver))

    async def _deliver(self, receiver: str) -> None:
        handle = workflow.get_external_workflow_handle(receiver)
        while self._outbox[receiver]:
            signal, message = self._outbox[receiver].pop(0)
            try:
                await handle.signal(signal, message)
            except (
                ApplicationError
            ) as error:  # the receiver has ended; if it held nodes, the check finds that out
                workflow.logger.info("%s could not be sent signal %s: %s", receiver, signal, error)
                self._check_asked = self._check_asked or receiver.startswith(WORKFLOW_ID_PREFIX)
        del self._outbox[receiver], self._telling[receiver]

    # --- people

    def _tell_people(self, matters: dict[str, Notice]) -> None:
        """Post notices of matters that are new, or resolved."""
        now = workflow.now()
        ended = [key for key in self._open_notices if key not in matters]
        self._notices += [resolve_notice(self._state, key, now) for key in ended]
        known = frozenset(self._open_notices)
        self._notices += [one for key, one in matters.items() if key not in known]
        self._open_notices = list(matters)
        if self._notices and PEOPLE not in self._telling:
            self._telling[PEOPLE] = asyncio.create_task(self._post_notices())

    async def _post_notices(self) -> None:
        while self._notices:
            batch = tuple(self._notices[:MAX_NOTICES])
            await tell_people(self._name, batch)
            del self._notices[: len(batch)]

    def _list_told(self) -> tuple[str, ...]:
        """Return the keys of the matters that people have as open, by the notices that were posted.

        The next run compares them with its own, and so posts the others again.
        """
        unposted = {one.key: one for one in self._notices}  # the newest of each matter
        told = [key for key in self._open_notices if key not in unposted]
        return (*told, *(key for key, one in unposted.items() if one.state == "resolved"))

    # --- tasks under way

    def _under_way(self) -> list[asyncio.Task[None]]:
        return [*self._asking.values(), *self._telling.values()]

    def _forget_ended(self) -> None:
        for task in self._under_way():
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                # A bug. It fails the workflow task, not the workflow: the server shows it and
                # retries until it is fixed.
                raise RuntimeError(f"unexpected error: {error}") from error
        self._asking = {key: task for key, task in self._asking.items() if not task.done()}
        self._telling = {key: task for key, task in self._telling.items() if not task.done()}

    def _continues_as_new(self) -> bool:
        info = workflow.info()
        wants = (
            info.is_continue_as_new_suggested()
            or info.get_current_history_length() >= MAX_EVENTS
            or is_build_outdated(info)
        )
        # A fleet that has just started first learns what it has and who is on it.
        return wants and self._state.is_file_read and self._state.awaited_jobs is not None

    async def _continue_as_new(self) -> None:
        """Continue as new with nothing half-done: pending signals are delivered first, and the next
        run repeats the questions, and posts what could not be posted."""
        for task in self._asking.values():
            task.cancel()
        posting = self._telling.get(PEOPLE)
        if posting is not None and not posting.done() and workflow.patched("carried-notices"):
            await workflow.wait([posting], timeout=POST_TIMEOUT.total_seconds())
            del self._telling[PEOPLE]
        await workflow.wait_condition(
            lambda: (
                all(task.done() for task in self._under_way()) and workflow.all_handlers_finished()
            )
        )
        self._forget_ended()
        checked_at = None if self._check_asked else self._checked_at
        continue_as_new(
            FleetInput(
                self._name,
                self._state,
                tuple(self._inbox),
                checked_at,
                self._file_digest,
                self._list_told(),
            )
        )

    # --- timing

    def _check_due(self) -> datetime | None:
        """Return when the fleet file is read, and the server asked, apart from the watch."""
        if CHECK in self._asking:
            return None
        if self._checked_at is None or self._check_asked:
            return workflow.now()
        if self._hurries():
            return self._checked_at + CHECK_WHILE_WAITED_FOR
        return None if WATCH in self._asking else self._checked_at + SWEEP_INTERVAL

    def _hurries(self) -> bool:
        """Return whether a job has begun to wait for nodes a short time ago."""
        lately = workflow.now() - HURRY_FOR
        return any(
            record.is_waiting and (record.waiting_since or lately) > lately
            for record in self._state.claims
        )

    def _doing(self) -> list[str]:
        words = {
            PROBE: "a probe of nodes",
            CHECK: "a check of the fleet file and of which jobs still run",
            FIND: "a search for jobs",
            REMEMBER: "a query to the previous run",
        }
        return [words.get(key, key) for key in self._asking if key != WATCH]

    # --- signals from programs and people: any message may arrive, and none raises

    @workflow.signal(
        description="A job states all nodes that it wants and holds. Only jobs send it."
    )
    def claim(self, message: Any = None, *_more: Any) -> None:
        self._inbox.append(read("claim", message, claim_fact))

    @workflow.signal(
        description="Another build of relaunch is to work for this fleet. Only relaunch sends it."
    )
    def upgrade(self, *_more: Any) -> None:
        """Nothing: the server tells with the task of this signal which build is to work for it."""

    @workflow.signal(description="A job reports faults of its nodes. Only jobs send it.")
    def report_faults(self, message: Any = None, *_more: Any) -> None:
        self._inbox.append(read("report_faults", message, fault_report_fact))

    @workflow.signal(description="A repair has begun. Only repairs send it.")
    def repair_began(self, message: Any = None, *_more: Any) -> None:
        self._inbox.append(read("repair_began", message, repair_began_fact))

    @workflow.signal(
        description="A repair asks whether it may act on its node. Only repairs send it."
    )
    def repair_wanted(self, message: Any = None, *_more: Any) -> None:
        self._inbox.append(read("repair_wanted", message, repair_wanted_fact))

    @workflow.signal(description="A repair has ended. Only repairs send it.")
    def repair_ended(self, message: Any = None, *_more: Any) -> None:
        self._inbox.append(read("repair_ended", message, repair_ended_fact))

    @workflow.signal(
        description="Take a node out of service: "
        '{"node": "n2", "reason", "by", "drain": false, "within": "30m"}.'
    )
    def quarantine(self, message: Any = None, *_more: Any) -> None:
        self._take_command("quarantine", message, quarantine_fact)

    @workflow.signal(
        description="Take a node into service again; you vouch for it: "
        '{"node": "n2", "reason", "by"}.'
    )
    def release(self, message: Any = None, *_more: Any) -> None:
        self._take_command("release", message, release_fact)

    @workflow.signal(
        description="Vouch that no process of an ended job runs on a node: "
        '{"node": "n2", "reason", "by"}.'
    )
    def declare_dead(self, message: Any = None, *_more: Any) -> None:
        self._take_command("declare_dead", message, dead_fact)

    @workflow.signal(
        description='Stop all repairs, until `resume`: {"reason", "by"}, all optional.'
    )
    def pause(self, message: Any = None, *_more: Any) -> None:
        self._take_command("pause", message, pause_fact)

    @workflow.signal(
        description='Close the breaker or, where it is closed, end a pause: {"reason", "by"}, all '
        "optional."
    )
    def resume(self, message: Any = None, *_more: Any) -> None:
        self._take_command("resume", message, resume_fact)

    def _take_command(self, name: str, message: Any, parse: Callable[[Any], FleetEvent]) -> None:
        """Take what a person orders, with the text that their signature has to be of."""
        fact = read(name, message, parse)
        if isinstance(fact, PersonCommand):
            fact = replace(fact, signed=read_signed_message(name, message))
        self._inbox.append(fact)

    @workflow.signal(description='Read the fleet file again now: {"reason", "by"}, all optional.')
    def apply(self, message: Any = None, *_more: Any) -> None:
        said = read("apply", message, apply_message)
        if isinstance(said, MalformedMessage):
            self._inbox.append(said)
        else:
            self._check_asked = True

    @workflow.query(description="Everything this fleet knows.")
    def state(self) -> FleetState:
        return cast(FleetState, short(self._state))

    @workflow.query(description="What metrics show of it. Only workers ask it.")
    def counts(self) -> FleetCounts:
        return count_fleet(self._state)

    @workflow.query(
        description="How many free nodes a job could have beside those that its claim avoids. Only "
        "jobs ask it."
    )
    def count_free(self, claim: Claim) -> int:
        return self._scheduler.count_free(self._state, workflow.now(), claim)

    @workflow.query(
        description="Whether a person's order may be signed. Only the command line asks it."
    )
    def takes_proofs(self) -> bool:
        return True

    @workflow.query(description="What this fleet does next, or what it waits for.")
    def next(self) -> str:
        state = self._state
        if not state.is_file_read:
            return "the fleet file is read"
        if state.breaker.is_open:
            return f"nothing, until a person closes the breaker: {state.breaker.reason}"
        if state.awaited_jobs is None:
            return "the running jobs are searched for"
        if state.awaited_jobs:
            asked = count_noun(
                len(state.awaited_jobs),
                "job is asked what it holds",
                "jobs are asked what they hold",
            )
            return f"{asked}, before anything is granted"
        if is_restoring(state, workflow.now()):
            return (
                "the previous run is asked which nodes are out of service,"
                " before anything is granted"
            )
        if not state.is_probed:
            return "every node is probed once, before anything is granted"
        waiting = sum(record.is_waiting for record in state.claims)
        if not waiting:
            return "it waits until a job wants nodes"
        return f"{count_noun(waiting, 'job waits', 'jobs wait')} for nodes"


def _is_cancelled() -> bool:
    """Return whether the present task was cancelled, also if what it waited for has caught that."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
