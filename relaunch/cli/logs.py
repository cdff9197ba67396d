"""Reads the output of ranks through a worker, one generation after another.

How it is printed is the task of `rank_output`.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import get_args

from temporalio.client import ActivityFailureError, Client
from temporalio.common import RetryPolicy
from temporalio.service import RPCError

from relaunch.cli import jobs
from relaunch.cli.rank_output import Printer
from relaunch.config import ConfigError
from relaunch.fields import Pattern, compile_pattern, parse_duration
from relaunch.job.generation_nodes import find_nodes
from relaunch.job.state import JobState
from relaunch.messages.logs import MAX_READ_BYTES, ReadLogsInput, ReadLogsOutput
from relaunch.spec.job import JobSpec, OutputStream
from relaunch.temporal import is_away

FIRST_WAIT, LONGEST_WAIT = 5.0, 15.0
"""Seconds that one call waits for new output; each that found none makes the next one longer. Each
call is an activity, which costs the server some milliseconds and is kept in its database. After
ctrl-C, a longer call would occupy a slot of the worker for nothing."""
BETWEEN_CALLS = 0.1
"""Seconds: a rank that prints all the time costs ten calls a second, and people do not read faster.
While there is a backlog there is no pause: it would not make the calls fewer."""
LAST_LOGS_TIMEOUT_S = 30.0
"""Seconds without new output, after which the rest of an ended job or generation is given up: a
call that a killed worker has left behind ends within 25."""
ANSWER_TIMEOUT = 10.0
NAMED_NODES = 8
NO_WORKER = (
    "job {}: no worker answers, and only a worker can read logs from nodes: start one "
    "(`relaunch up` or `relaunch-worker`)"
)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Generation:
    """Identifies the logs of one generation."""

    fleet: str
    nodes: tuple[str, ...]
    namespace: str
    job: str
    submission: int
    number: int
    stream: OutputStream = "stdout"


@dataclass(frozen=True)
class Selection:
    """Which part of a generation's output is printed."""

    rank: int | None = None
    """Only this rank."""
    tail: int | None = None
    """Begin with this many last lines of each rank."""
    since: timedelta | None = None
    """Begin with what was printed in this last time."""
    grep: Pattern | None = None
    """Only lines that this pattern matches."""
    stream: OutputStream | None = None
    """Only this stream, of a job that keeps them apart."""

    def streams(self, spec: JobSpec) -> tuple[OutputStream, ...]:
        if self.stream is not None:
            return (self.stream,)
        return ("stdout", "stderr") if spec.output == "separate" else ("stdout",)

    def make_printer(
        self, world_size: int, streams: tuple[OutputStream, ...], stream: OutputStream
    ) -> Printer:
        marks = stream == "stderr" and len(streams) > 1
        printer = Printer(world_size, grep=self.grep, is_stderr=marks)
        printer.is_live = printer.is_live and stream == streams[-1]
        return printer


EVERYTHING = Selection()


@dataclass
class ReadPosition:
    """How far one log of each rank of a generation was read."""

    offsets: dict[int, int] = field(default_factory=dict)
    """Bytes from the begin of the log, by rank."""
    arrived_at: float = -math.inf
    """When output was last printed, by the event loop's clock."""
    is_given_up: bool = False
    """Whether it was not read to its end, because no worker answered."""


def parse_selection(
    rank: int | None,
    tail: int | None,
    since: str | None,
    grep: str | None,
    stream: str | None = None,
) -> Selection:
    """Read what a person typed.

    Raises:
        ConfigError: A value is invalid.
    """
    try:
        wanted = None if since is None else parse_duration(since)
    except OverflowError:
        raise ConfigError(f"--since: {since!r} is longer than a duration can be") from None
    except ValueError as error:
        raise ConfigError(f"--since: {error}") from None
    if wanted is not None and not isinstance(wanted, timedelta):
        raise ConfigError(f"--since: {since!r} is not a duration: write it like 30s, 5m or 1h30m")
    try:
        pattern = None if grep is None else compile_pattern(grep)
    except ValueError as error:
        raise ConfigError(f"--grep: {error}") from None
    streams: dict[str | None, OutputStream | None] = {
        one: one for one in (None, *get_args(OutputStream))
    }
    if stream not in streams:
        raise ConfigError(f"--stream: {stream!r} is not a stream: expected stdout or stderr")
    return Selection(rank, tail, wanted, pattern, streams[stream])


def generation_of(state: JobState, number: int | None = None) -> Generation | None:
    """Return the place of the logs of a generation; None: its nodes are no longer known."""
    number = state.generation if number is None else number
    nodes = find_nodes(state.generation_nodes, number)
    if nodes is None and not state.generation_nodes:
        nodes = tuple(slot.node for slot in state.slots)
    if nodes is None:
        return None
    return Generation(
        state.spec.fleet, nodes, state.namespace, state.name, state.submission, number
    )


def explain_forgotten(state: JobState, number: int) -> str:
    first = state.generation_nodes[0].first
    return (
        f"job {state.name}: the nodes of generation {number} are no longer known; "
        f"expected {first} to {state.generation}, which are kept"
    )


async def read(
    client: Client,
    task_queue: str,
    where: Generation,
    offsets: dict[int, int] | None,
    wait: float,
    selection: Selection,
) -> ReadLogsOutput | None:
    """Read once; return None if no worker answers."""
    within = timedelta(seconds=wait + ANSWER_TIMEOUT)
    try:
        answer: ReadLogsOutput = await client.execute_activity(
            "read_logs",
            ReadLogsInput(
                fleet=where.fleet,
                nodes=where.nodes,
                namespace=where.namespace,
                job=where.job,
                submission=where.submission,
                generation=where.number,
                offsets=offsets,
                wait=wait,
                tail=selection.tail,
                since=None if selection.since is None else selection.since.total_seconds(),
                stream=where.stream,
            ),
            id=f"read_logs/{where.job}/{where.number}/{uuid.uuid4().hex}",
            task_queue=task_queue,
            result_type=ReadLogsOutput,
            start_to_close_timeout=within,
            schedule_to_close_timeout=within,
            retry_policy=RetryPolicy(maximum_attempts=1),  # the caller retries from its offsets
            summary=f"logs of {where.job}, generation {where.number}",
        )
    except ActivityFailureError:
        return None
    return answer


async def print_logs(
    client: Client,
    task_queue: str,
    where: Generation,
    printer: Printer,
    say: Say,
    over: Callable[[], bool],
    selection: Selection = EVERYTHING,
    *,
    to_now: bool = False,
    position: ReadPosition | None = None,
) -> bool:
    """Print a generation's logs as they arrive.

    Return when the logs have ended, or when nothing new is there and `over` returns true; with
    `to_now`, when what was there at first is printed. Return whether the logs of all ranks were
    found. `position` is kept up to date with what was read.
    """
    position = position or ReadPosition()
    offsets = position.offsets
    clock = asyncio.get_running_loop().time
    answered_at = clock()
    sizes: dict[int, int] = {}
    complained: str | None = None
    found = True
    patience = FIRST_WAIT
    try:
        while True:
            # What `over` says counts from the next answer on: the newest output is still read.
            last = to_now or over()
            wait = 0.0 if last else min(patience, printer.next_refresh)
            answer, complaint = await _try_to_read(
                client, task_queue, where, offsets or None, wait, selection
            )
            if answer is not None:
                is_quiet = not answer.chunks
                patience = min(LONGEST_WAIT, 2 * patience) if is_quiet else FIRST_WAIT
                offsets |= {**answer.begins, **offsets}
                for piece in answer.chunks:
                    offsets[piece.rank] = piece.next
                    if selection.rank in (None, piece.rank):
                        printer.feed(piece.rank, piece.data)
                printer.refresh()
                answered_at = clock()
                if answer.chunks:
                    position.arrived_at = answered_at
            # Where reading ends at what there is, what is missing stays so, and is said once.
            is_new = complaint != complained and (found or not to_now)
            if complaint is not None and is_new:
                say(complaint)
            complained = complaint
            found = complaint is None and (found or not to_now)
            if to_now and answer is not None:
                sizes |= answer.sizes
                if sizes and all(offsets.get(rank, 0) >= size for rank, size in sizes.items()):
                    break
                where = _without_silent(where, answer)
            if answer is not None and answer.ended and not answer.chunks:
                break
            # Once `over` is true, an empty answer is the last one. Without an answer, the next
            # worker may have one.
            if last and answer is not None and not answer.chunks:
                break
            if answer is None and to_now:
                break
            if answer is None and last and clock() - answered_at >= LAST_LOGS_TIMEOUT_S:
                position.is_given_up = True
                break
            goes_on = answer is not None and (last or _has_backlog(where, answer))
            await asyncio.sleep(0 if goes_on else BETWEEN_CALLS)
    finally:
        printer.flush()
    return found


async def _try_to_read(
    client: Client,
    task_queue: str,
    where: Generation,
    offsets: dict[int, int] | None,
    wait: float,
    selection: Selection,
) -> tuple[ReadLogsOutput | None, str | None]:
    """Read once; return the answer, and a sentence that says what could not be read, and why."""
    try:
        answer = await read(client, task_queue, where, offsets, wait, selection)
    except RPCError as error:
        if not is_away(error):
            raise
        # Only this call is lost: the next one reads on from the same place.
        return None, "the server does not answer: waiting for it to read the logs"
    return answer, _find_complaint(where, selection, answer)


async def find_unread(
    client: Client, task_queue: str, where: Generation, position: ReadPosition
) -> dict[int, int] | None:
    """Return how many bytes of each rank's log were not read; None: no worker answers.

    Of ranks whose node does not answer it is unknown, and they are left out.
    """
    answer = await read(client, task_queue, where, None, 0.0, Selection(tail=0))
    if answer is None:
        return None
    unread = {
        rank: size - position.offsets.get(rank, 0) for rank, size in sorted(answer.sizes.items())
    }
    return {rank: size for rank, size in unread.items() if size > 0}


def _has_backlog(where: Generation, answer: ReadLogsOutput) -> bool:
    """Return whether so much was read that there is probably more."""
    share = MAX_READ_BYTES // max(1, len(where.nodes))
    return sum(len(piece.data) for piece in answer.chunks) > share // 2


def _without_silent(where: Generation, answer: ReadLogsOutput) -> Generation:
    """Return the same logs without the nodes that gave none: each would be waited for again."""
    silent = {text.partition(": ")[0] for text in (*answer.unreachable, *answer.refused)}
    return replace(where, nodes=tuple(node for node in where.nodes if node not in silent))


def _find_complaint(
    where: Generation, selection: Selection, answer: ReadLogsOutput | None
) -> str | None:
    """Return a sentence that says which logs could not be read, and why; None: all could be."""
    if answer is None:
        return "no worker answers: waiting for one to read the logs"
    missing = [
        f"{one.node}: rank {one.rank} has no log there: its file was removed, or it was not started"
        for one in answer.missing
        if selection.rank in (None, one.rank)
    ]
    reasons = (*answer.unreachable, *answer.refused, *missing)
    if not reasons:
        return None
    more = f"; and {len(reasons) - NAMED_NODES} more" if len(reasons) > NAMED_NODES else ""
    return f"generation {where.number}: no logs from {'; '.join(reasons[:NAMED_NODES])}{more}"


async def load_checked(
    client: Client, job: str, selection: Selection
) -> tuple[jobs.JobSnapshot, JobState]:
    """Return a job whose logs can be read.

    Raises:
        ConfigError: There is no such job or rank, or no worker that could read its logs.
    """
    now = await jobs.load_job(client, job)
    state, rank = now.state, selection.rank
    if state is None:
        raise ConfigError(NO_WORKER.format(job))
    if rank is not None and not 0 <= rank < state.spec.world_size:
        raise ConfigError(
            f"job {job} has no rank {rank}: expected 0 to {state.spec.world_size - 1}"
        )
    if selection.stream is not None and state.spec.output != "separate":
        raise ConfigError(
            f"job {job} has no log of {selection.stream} alone: its job file does not say "
            "`output: separate`"
        )
    return now, state


async def print_job_logs(
    client: Client,
    task_queue: str,
    job: str,
    generation: int | None,
    selection: Selection,
    follow: bool,
    say: Say,
) -> int:
    """Print the logs of one generation of a job; with `follow`, until its ranks have ended.

    By default it is the newest that has started. Return the exit code: 1 if a rank's log was not
    found.

    Raises:
        ConfigError: There are no logs to read, or no worker that could read them.
    """
    now, state = await load_checked(client, job, selection)
    number = generation
    if number is None:
        number = state.generation
        if state.launched_at is None and not state.phase.is_final and number > 1:
            # What is looked for is usually why it is launched.
            say(f"generation {number} has not started: these are the logs of {number - 1}")
            number -= 1
    if not 1 <= number <= state.generation or not state.slots:
        if state.generation == 0:
            raise ConfigError(f"job {job} has not launched yet: there are no logs")
        raise ConfigError(f"job {job} has no generation {number}: expected 1 to {state.generation}")
    where = generation_of(state, number)
    if where is None:
        raise ConfigError(explain_forgotten(state, number))
    size = len(where.nodes) * state.spec.ranks_per_node
    if selection.rank is not None and selection.rank >= size and state.spec.launcher == "none":
        raise ConfigError(
            f"job {job}: generation {number} has no rank {selection.rank}: expected 0 to {size - 1}"
        )
    where = limit_to_rank(where, state, selection.rank)
    if await read(client, task_queue, where, None, 0.0, Selection(tail=0)) is None:
        raise ConfigError(NO_WORKER.format(job))
    live = follow and now.open and number == state.generation
    streams = selection.streams(state.spec)
    printers = {
        stream: selection.make_printer(state.spec.world_size, streams, stream) for stream in streams
    }
    if live:
        await print_streams(client, task_queue, where, printers, say, lambda: False, selection)
        return 0
    is_complete = True
    for stream, printer in printers.items():
        # All of it is there: of a bar, only its final state is of interest.
        printer.is_live, printer.interval = False, math.inf
        one = replace(where, stream=stream)
        found = await print_logs(
            client, task_queue, one, printer, say, lambda: False, selection, to_now=True
        )
        is_complete = is_complete and found
    return 0 if is_complete else 1


async def print_streams(
    client: Client,
    task_queue: str,
    where: Generation,
    printers: Mapping[OutputStream, Printer],
    say: Say,
    over: Callable[[], bool],
    selection: Selection,
    positions: Mapping[OutputStream, ReadPosition] | None = None,
) -> None:
    """Print the streams of a generation as they arrive; see `print_logs`.

    An error of one stream ends them all, and is raised by itself: the pipe of `| head` is closed,
    or the server refuses.
    """
    first = next(iter(printers))
    try:
        async with asyncio.TaskGroup() as tasks:
            for stream, printer in printers.items():
                tasks.create_task(
                    print_logs(
                        client,
                        task_queue,
                        replace(where, stream=stream),
                        printer,
                        # What is missing of the one is missing of the other.
                        say if stream == first else lambda text: None,
                        over,
                        selection,
                        position=None if positions is None else positions[stream],
                    )
                )
    except ExceptionGroup as group:
        # Not `except*`: in Python 3.11.2, that of Debian 12, it wraps what its body raises.
        raise group.exceptions[0] from None


def limit_to_rank(where: Generation, state: JobState, rank: int | None) -> Generation:
    """Return the same logs, of only the node where a rank runs, if that is known."""
    if rank is None or state.spec.launcher != "none":
        return where  # a launcher numbers its ranks itself
    at = rank // state.spec.ranks_per_node
    return replace(where, nodes=where.nodes[at : at + 1])
