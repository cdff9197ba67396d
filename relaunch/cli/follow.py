"""Watches a job until it ends: a live view on a terminal, plain lines elsewhere, and the job's own
output for `run`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from temporalio.client import Client
from temporalio.service import RPCError

from relaunch.cli import job_views, jobs, logs
from relaunch.cli.cancellation import explain
from relaunch.cli.rank_output import Printer, RunOutput
from relaunch.cli.terminal import is_closed_output, make_console
from relaunch.job import failure
from relaunch.job.state import Incident, JobState, Phase
from relaunch.spec.job import OutputStream
from relaunch.temporal import is_away
from relaunch.text import count_noun, omit_said

if TYPE_CHECKING:
    from rich.console import RenderableType

LOOK_DELAY_S = 0.2
"""Seconds from an event of the job to the look at it: a recovery is some thirty events, and a look
takes time from it."""
LOOK_INTERVAL_S = 0.4
"""Fewest seconds between two looks."""
REFRESH_INTERVAL_S = 10.0
"""Seconds without an event after which the job is looked at all the same: a job that waits for a
worker has none."""
LIVE_REFRESH_INTERVAL_S = 1.0
"""The same for a view that shows the progress, which heartbeats bring without an event."""
MAX_PARTS = 8
"""Most ranks that a sentence names."""
LAST_LOOK_TIMEOUT_S = 2.0
"""Seconds to find out, at a second ctrl-C, what was not printed."""

Say = Callable[[str], None]


async def watch(
    client: Client,
    name: str,
    refresh_interval: float = REFRESH_INTERVAL_S,
    *,
    is_kept: bool = False,
) -> AsyncIterator[jobs.JobSnapshot]:
    """Yield the state of the job whenever it has changed, last when it has ended.

    The server tells of each event (a long poll), so nothing is asked while nothing happens.

    Args:
        client: The client of the server.
        name: The job's name.
        refresh_interval: Seconds without an event after which the job is looked at all the same.
        is_kept: Whether the caller starts the server again when it ends, so it is waited for.
    """
    loop = asyncio.get_running_loop()
    events: EventFeed | None = None
    now: jobs.JobSnapshot | None = None
    try:
        while True:
            looked_at = loop.time()
            try:
                newer = await jobs.load_job(client, name, now)
            except RPCError as error:
                if not is_kept or not is_away(error):
                    raise
                await asyncio.sleep(LOOK_INTERVAL_S)
                continue
            if newer != now:
                yield newer
            now = newer
            if not now.open:
                return
            if events is None or events.run_id != now.run_id or events.is_over:
                if events is not None:
                    events.close()
                events = EventFeed(client, name, now.run_id)
            await events.wait(refresh_interval)
            if not events.is_over:  # an end is reported at once
                await asyncio.sleep(max(LOOK_DELAY_S, looked_at + LOOK_INTERVAL_S - loop.time()))
    finally:
        if events is not None:
            events.close()


class EventFeed:
    """Waits for new events of one run of a job, until the run has ended."""

    def __init__(self, client: Client, name: str, run_id: str) -> None:
        self.run_id = run_id
        self._handle = client.get_workflow_handle(jobs.handle_of(client, name).id, run_id=run_id)
        self._news = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    @property
    def is_over(self) -> bool:
        """Whether there will be no more events: the run has ended, or the server did not answer."""
        return self._reading.done()

    async def wait(self, within: float) -> None:
        """Wait for an event since the last call, or for the end, but not longer than this."""
        news = asyncio.create_task(self._news.wait())
        try:
            await asyncio.wait(
                {news, self._reading}, timeout=within, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            news.cancel()
            self._news.clear()

    def close(self) -> None:
        self._reading.cancel()

    async def _read(self) -> None:
        try:
            async for _ in self._handle.fetch_history_events(wait_new_event=True):
                self._news.set()
        except RPCError:  # the next look says what is wrong, or reads on
            await asyncio.sleep(LOOK_INTERVAL_S)


class Narrator:
    """Prints what has changed since the last look, one line per change."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._phase = ""
        self._generation = 0
        self._told: dict[datetime, int] = {}
        self._said: list[str] = []
        """The reasons given in the newest incident."""
        self._closed: set[datetime] = set()
        self._notices: tuple[str, ...] = ()
        self._first = True
        self._silence = ""
        """What was said of a worker that does not answer; empty: one does."""

    def tell(self, now: jobs.JobSnapshot) -> None:
        state = now.state
        if state is None:
            if now.phase != self._phase:
                self._say(f"{now.phase}: {now.memo.get('reason', 'no worker answers')}")
            self._phase = now.phase
            if now.open and now.silence != self._silence:
                self._silence = now.silence
                self._say(now.silence)
            return
        if self._silence:
            self._silence = ""
            self._say("a worker answers now")
        if self._first:
            # Incidents closed before the first look are history, not news.
            self._closed.update(incident.opened for incident in state.incidents)
            self._first = False
        if state.incident is None:
            self._said = []
        for incident in state.incidents:
            if incident.opened not in self._closed:
                self._decisions(incident)
                self._closed.add(incident.opened)
                if not state.phase.is_final:
                    self._say(
                        f"incident closed after {_open_seconds(incident):.1f} s: "
                        f"{incident.outcome or 'recovered'}"
                    )
        if state.incident:
            self._decisions(state.incident)
        for notice in state.notices:
            if notice not in self._notices:
                self._say(notice)
        self._notices = state.notices
        if (state.phase, state.generation) != (
            self._phase,
            self._generation,
        ) and not state.phase.is_final:
            generation = f"generation {state.generation} " if state.generation else ""
            self._say_reason(f"{generation}{state.phase}", state.reason)
        self._phase, self._generation = str(state.phase), state.generation

    def _decisions(self, incident: Incident) -> None:
        if incident.opened not in self._told:
            where = f" on {job_views.names(list(incident.nodes))}" if incident.nodes else ""
            self._say(
                f"incident in generation {incident.generation}: {incident.cause}{where}: "
                f"{incident.reason}"
            )
            self._told[incident.opened], self._said = 0, [incident.reason]
        for decision in incident.decisions[self._told[incident.opened] :]:
            strategy = f" {decision.strategy}" if decision.strategy else ""
            self._say_reason(f"{decision.decision}{strategy}", decision.reason)
        self._told[incident.opened] = len(incident.decisions)

    def _say_reason(self, what: str, reason: str) -> None:
        """Say it with its reason, as far as that is news in this incident."""
        (further,) = omit_said([reason], self._said)
        self._said.append(reason)
        self._say(f"{what}: {further}" if further else what)


def _open_seconds(incident: Incident) -> float:
    return ((incident.closed or incident.opened) - incident.opened).total_seconds()


def closing_line(now: jobs.JobSnapshot, *, can_retry: bool = True) -> tuple[str, int]:
    """Return the closing text for a job that has ended, and its exit code.

    After a job that failed or was cancelled, the text says why, and what a person may type next.

    Args:
        now: The job, ended.
        can_retry: Whether its server goes on and could run it again.
    """
    state = now.state
    if state is None or not state.phase.is_final:
        return (
            f"job {now.name} ended as {now.status} without a result: its workflow was ended from "
            "outside, and its ranks may still run",
            1,
        )
    text = f"job {now.name} {state.phase}: {state.reason}"
    if state.phase is not Phase.SUCCEEDED:
        lines = [*failure.describe_failure(state), *failure.list_commands(state, can_retry)]
        text += "".join(f"\n  {line}" for line in lines)
    code = (
        state.exit_code
        if state.exit_code is not None
        else 0
        if state.phase is Phase.SUCCEEDED
        else 1
    )
    return text, code


async def follow_lines(client: Client, name: str, say: Say) -> int:
    """Print plain lines until the job ends; return its exit code."""
    narrator = Narrator(say)
    now: jobs.JobSnapshot | None = None
    async for now in watch(client, name):
        narrator.tell(now)
    assert now is not None
    text, code = closing_line(now)
    say(text)
    return code


async def follow_live(client: Client, name: str) -> int:
    """Show a live view until the job ends; return the job's exit code."""
    from rich.live import Live

    console = make_console()
    now: jobs.JobSnapshot | None = None
    with Live(console=console, auto_refresh=False) as live:
        narrator = Narrator(
            lambda line: live.console.print(line, style="dim", markup=False, highlight=False)
        )
        async for now in watch(client, name, LIVE_REFRESH_INTERVAL_S):
            narrator.tell(now)
            live.update(render(now, datetime.now(UTC)), refresh=True)
    assert now is not None
    text, code = closing_line(now)
    first, *rest = text.split("\n")
    console.print(first, style="bold", markup=False, highlight=False)
    for line in rest:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return code


def render(now: jobs.JobSnapshot, at: datetime) -> RenderableType:
    from rich.panel import Panel
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    if now.state is None:
        rows = [
            ("phase", f"{now.phase}: {now.memo.get('reason', '')}"),
            ("", now.silence),
        ]
    else:
        view = job_views.show(now.state, now.watch, at)
        rows = [
            line_to_row(line) for line in job_views.show_lines({**view, "incident": None}, at)[1:]
        ]
        if now.watch and now.watch.unreachable:
            rows.append(("no answer", job_views.names(list(now.watch.unreachable))))
        if now.state.incident:
            incident = now.state.incident
            rows.append(
                ("open", f"{incident.cause} in generation {incident.generation}: {incident.reason}")
            )
    for left, right in rows:
        table.add_row(left, right)
    return Panel(table, title=now.name, title_align="left")


def line_to_row(line: str) -> tuple[str, str]:
    word, _, rest = line.partition(" ")
    return word, rest.strip()


async def follow_with_logs(
    client: Client,
    task_queue: str,
    name: str,
    say: Say,
    *,
    is_kept: bool = False,
    output: RunOutput | None = None,
    report_unprinted: Say | None = None,
) -> int:
    """Print the output of all ranks of every generation, and what relaunch does, until the job
    ends.

    Return the job's exit code. `is_kept` is that of `watch`: the server is there for this job only,
    and cannot run it again. `output` says what is printed of what ranks print. `report_unprinted`
    is given a sentence if output is missing at the end, also when this is cancelled after the job
    has ended; without it, `say` is.
    """
    narrator = Narrator(say)
    reader = LogReader(client, task_queue, say, output=output)
    watching = watch(client, name, is_kept=is_kept)
    now = await reader.print_while(watching, narrator.tell, report_unprinted or say)
    text, code = closing_line(now, can_retry=not is_kept)
    say(text)
    return code


async def follow_logs(
    client: Client, task_queue: str, name: str, selection: logs.Selection, say: Say
) -> int:
    """Print the newest generation's output and that of all that follow, until the job ends.

    Return the exit code of this command, which is not the job's.

    Raises:
        ConfigError: There are no logs to read, or no worker that could read them.
    """
    now, state = await logs.load_checked(client, name, selection)
    if not now.open:
        return await logs.print_job_logs(client, task_queue, name, None, selection, False, say)
    if state.launched_at is None:
        say(f"job {name} is {state.phase}: {state.reason}")
    reader = LogReader(client, task_queue, say, selection, from_newest=True, is_needed=True)
    now = await reader.print_while(watch(client, name), lambda now: None, say)
    say(f"job {name} {now.phase}" + (f": {now.state.reason}" if now.state else ""))
    return 0


class LogReader:
    """Prints the logs of one generation after another.

    Generations that were never seen running are included: one may fail between two looks.
    """

    def __init__(
        self,
        client: Client,
        task_queue: str,
        say: Say,
        selection: logs.Selection = logs.EVERYTHING,
        *,
        from_newest: bool = False,
        is_needed: bool = False,
        output: RunOutput | None = None,
    ) -> None:
        self._client, self._task_queue, self._say = client, task_queue, say
        self._selection = selection
        self._output = output
        self._from_newest = from_newest
        self._is_needed = is_needed
        """Whether it is of no use to go on where the logs cannot be read."""
        self._error: BaseException | None = None
        """The error that has ended the reading, once it is said."""
        self._queue: asyncio.Queue[int | None] = asyncio.Queue()
        self._state: JobState | None = None
        self._queued = 0
        self._finished = False
        self._reading: logs.Generation | None = None
        """The generation that is being read."""
        self._positions: dict[OutputStream, logs.ReadPosition] = {}
        self._given_up: list[int] = []
        """Generations whose output was not read to its end."""

    def see(self, state: JobState) -> None:
        self._state = state
        last = (
            state.generation
            if state.launched_at is not None or state.phase.is_final
            else state.generation - 1
        )
        if state.slots and last > 0:
            if self._from_newest:
                self._queued, self._from_newest = last - 1, False
            for number in range(self._queued + 1, last + 1):
                self._queue.put_nowait(number)
            self._queued = max(self._queued, last)

    async def print_while(
        self,
        watching: AsyncIterator[jobs.JobSnapshot],
        tell: Callable[[jobs.JobSnapshot], None],
        report_unprinted: Say,
    ) -> jobs.JobSnapshot:
        """Print what ranks print until the job has ended; return the job, ended.

        Args:
            watching: The looks at the job.
            tell: Called with each of them.
            report_unprinted: As for `print_rest`.

        Raises:
            OSError: The output cannot be written: the pipe of `| head` is closed.
        """

        async def watch_to_end() -> jobs.JobSnapshot:
            async for now in watching:
                tell(now)
                if now.state is not None:
                    self.see(now.state)
            return now

        reading = asyncio.create_task(self.run())
        watched = asyncio.create_task(watch_to_end())
        try:
            await asyncio.wait({reading, watched}, return_when=asyncio.FIRST_COMPLETED)
            self._check(reading)
            now = await watched
            await self.print_rest(reading, report_unprinted)
        finally:
            reading.cancel()
            watched.cancel()
        return now

    def _check(self, reading: asyncio.Task[None]) -> None:
        """Say the error that has ended the reading, or raise it where it ends the command."""
        error = _find_error(reading)
        if error is None or error is self._error:
            return
        if self._is_needed or is_closed_output(error):
            raise error
        self._error = error
        self._say(f"the output of ranks is printed no more: {explain(error)}")

    async def print_rest(self, reading: asyncio.Task[None], report_unprinted: Say) -> None:
        """Print what ranks of an ended job have printed, as long as it arrives.

        Args:
            reading: The task of `run`.
            report_unprinted: Called with a sentence if something is missing, also if this task is
                cancelled.
        """
        self._finished = True
        self._queue.put_nowait(None)
        clock = asyncio.get_running_loop().time
        began_at = clock()
        try:
            while not reading.done():
                arrived_at = max([began_at, *(one.arrived_at for one in self._positions.values())])
                left = arrived_at + logs.LAST_LOGS_TIMEOUT_S - clock()
                if left <= 0:
                    break
                await asyncio.wait({reading}, timeout=left)
            self._check(reading)
        finally:
            is_done = reading.done() and not reading.cancelled() and reading.exception() is None
            reading.cancel()
            await asyncio.wait({reading})  # it prints what it has
            is_wanted = not is_closed_output(_find_error(reading))
            if is_wanted and (not is_done or self._given_up):
                report_unprinted(await self._explain_unprinted())

    async def _explain_unprinted(self) -> str:
        """Return a sentence about the output that is not printed."""
        reading = self._reading
        numbers = [*self._given_up, *([reading.number] if reading is not None else [])]
        while not self._queue.empty():
            numbers += [number for number in [self._queue.get_nowait()] if number is not None]
        generations = ", ".join(map(str, dict.fromkeys(numbers))) or "?"
        unknown = f"the end of the output of generation {generations} is not printed"
        if reading is None or numbers != [reading.number]:
            return unknown
        parts = []
        try:
            async with asyncio.timeout(LAST_LOOK_TIMEOUT_S):
                for stream, position in self._positions.items():
                    where = replace(reading, stream=stream)
                    unread = await logs.find_unread(self._client, self._task_queue, where, position)
                    if unread is None:
                        return f"{unknown}, because no worker answers"
                    of = " (stderr)" if stream == "stderr" else ""
                    parts += [
                        f"{count_noun(size, 'byte')} of rank {rank}{of}"
                        for rank, size in unread.items()
                    ]
        except (TimeoutError, RPCError):
            return f"{unknown}, because the server does not answer"
        more = f" and more of {len(parts) - MAX_PARTS} others" if len(parts) > MAX_PARTS else ""
        named = ", ".join(parts[:MAX_PARTS])
        return f"not printed of generation {generations}: {named}{more}" if parts else unknown

    async def run(self) -> None:
        selection, is_first = self._selection, True
        while (number := await self._queue.get()) is not None:
            state = self._state
            assert state is not None, "a generation is queued when the job was seen"

            def over(number: int = number) -> bool:
                # Not before a later one is launched: until then its ranks may still print.
                return self._finished or self._queued > number

            if not is_first:
                self._say(f"--- generation {number} {_explain_restart(state, number)}---")
            where = logs.generation_of(state, number)
            if where is None:
                self._say(logs.explain_forgotten(state, number))
                continue
            self._reading = logs.limit_to_rank(where, state, selection.rank)
            printers = self._make_printers(state, number, selection)
            self._positions = {stream: logs.ReadPosition() for stream in printers}
            await logs.print_streams(
                self._client,
                self._task_queue,
                self._reading,
                printers,
                self._say,
                over,
                selection,
                self._positions,
            )
            if any(position.is_given_up for position in self._positions.values()):
                self._given_up.append(number)
            self._reading = None
            # Later generations are printed from their begin.
            selection, is_first = replace(selection, tail=None, since=None), False

    def _make_printers(
        self, state: JobState, number: int, selection: logs.Selection
    ) -> dict[OutputStream, Printer]:
        spec, output = state.spec, self._output
        streams = selection.streams(spec)
        if output is None:
            return {
                stream: selection.make_printer(spec.world_size, streams, stream)
                for stream in streams
            }
        return {
            stream: output.make_printer(
                spec.world_size, spec.ranks_per_node, number, streams, stream
            )
            for stream in streams
        }


def _find_error(task: asyncio.Task[None]) -> BaseException | None:
    """Return the error that has ended a task."""
    return task.exception() if task.done() and not task.cancelled() else None


def _explain_restart(state: JobState, number: int) -> str:
    """Return after what a generation was launched, or nothing if no fault is known."""
    incidents = (*state.incidents, *((state.incident,) if state.incident else ()))
    reasons = [
        fault.reason
        for incident in incidents
        for fault in incident.faults or (incident,)
        if fault.generation == number - 1
    ]
    return f"(after {reasons[-1]}) " if reasons else ""
