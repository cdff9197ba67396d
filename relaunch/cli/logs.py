"""Reads the output of ranks through a worker, and prints each line prefixed with its rank."""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from temporalio.client import ActivityFailureError, Client
from temporalio.common import RetryPolicy

from relaunch.cli import jobs
from relaunch.config import ConfigError
from relaunch.job.state import JobState
from relaunch.messages.logs import ReadLogsInput, ReadLogsOutput

WAIT = 5.0
"""Seconds that one call waits for new output. After ctrl-C, a longer call would occupy a slot of
the worker for nothing."""
BETWEEN_CALLS = 0.1
"""Seconds: a rank that prints all the time costs ten calls a second, and people do not read faster.
"""
ANSWER_TIMEOUT = 10.0
COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)


@dataclass
class Printer:
    """Prints whole lines; an incomplete line is kept until its end arrives."""

    world_size: int
    colour: bool = field(default_factory=sys.stdout.isatty)
    _rest: dict[int, str] = field(default_factory=dict)

    def feed(self, rank: int, data: str) -> None:
        *lines, self._rest[rank] = (self._rest.get(rank, "") + data).split("\n")
        self._print(rank, lines)

    def flush(self) -> None:
        for rank, rest in sorted(self._rest.items()):
            self._print(rank, [rest] if rest else [])
        self._rest.clear()

    def _print(self, rank: int, lines: list[str]) -> None:
        if not lines:
            return
        # Launchers are numbered after the ranks, in the order of their nodes.
        name = (
            f"[rank {rank}]" if rank < self.world_size else f"[launcher {rank - self.world_size}]"
        )
        prefix = name.ljust(len(f"[rank {self.world_size - 1}]"))
        if self.colour:
            prefix = f"\x1b[{COLOURS[rank % len(COLOURS)]}m{prefix}\x1b[0m"
        sys.stdout.write("".join(f"{prefix} {line}\n" for line in lines))
        sys.stdout.flush()


@dataclass(frozen=True)
class Generation:
    """Identifies the logs of one generation."""

    fleet: str
    nodes: tuple[str, ...]
    namespace: str
    job: str
    submission: int
    number: int


def generation_of(state: JobState, number: int | None = None) -> Generation:
    return Generation(
        state.spec.fleet,
        tuple(slot.node for slot in state.slots),
        state.namespace,
        state.name,
        state.submission,
        state.generation if number is None else number,
    )


async def read(
    client: Client,
    task_queue: str,
    where: Generation,
    offsets: dict[int, int] | None,
    wait: float,
    tail: int | None,
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
                tail=tail,
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
    say: Callable[[str], None],
    over: Callable[[], bool],
    only: int | None = None,
    tail: int | None = None,
) -> None:
    """Print a generation's logs as they arrive.

    Return when the logs have ended, or when nothing new is there and `over` returns true.
    """
    offsets: dict[int, int] = {}
    complained: str | None = None
    while True:
        last = over()
        answer = await read(client, task_queue, where, offsets or None, 0.0 if last else WAIT, tail)
        if answer is None:
            complaint: str | None = "no worker answers: waiting for one to read the logs"
        else:
            silent = (
                [f"{', '.join(answer.unreachable[:8])}: no answer"] if answer.unreachable else []
            )
            complaint = (
                f"no logs from {'; '.join((*silent, *answer.refused[:8]))}"
                if silent or answer.refused
                else None
            )
            for piece in answer.chunks:
                offsets[piece.rank] = piece.next
                if only is None or piece.rank == only:
                    printer.feed(piece.rank, piece.data)
            if answer.ended and not answer.chunks:
                break
        # At the end, if something was printed, it does not matter that a node has gone since.
        if complaint != complained and complaint is not None and not (last and offsets):
            say(complaint)
        complained = complaint
        # Once `over` is true, an empty answer is the last one, and so is no answer.
        if last and (answer is None or not answer.chunks):
            break
        await asyncio.sleep(0 if answer is not None and last else BETWEEN_CALLS)
    printer.flush()


async def print_job_logs(
    client: Client,
    task_queue: str,
    job: str,
    rank: int | None,
    generation: int | None,
    tail: int | None,
    follow: bool,
    say: Callable[[str], None],
) -> None:
    """Print the logs of one generation of a job.

    Raises:
        ConfigError: There are no logs to read, or no worker that could read them.
    """
    now = await jobs.load_job(client, job)
    state = now.state
    if state is None:
        raise ConfigError(
            f"job {job}: no worker answers, and only a worker can read logs from nodes: start one "
            "(`relaunch up` or `relaunch-worker`)"
        )
    number = state.generation if generation is None else generation
    if not 1 <= number <= state.generation or not state.slots:
        if state.generation == 0:
            raise ConfigError(f"job {job} has not launched yet: there are no logs")
        raise ConfigError(f"job {job} has no generation {number}: expected 1 to {state.generation}")
    if rank is not None and not 0 <= rank < state.spec.world_size:
        raise ConfigError(
            f"job {job} has no rank {rank}: expected 0 to {state.spec.world_size - 1}"
        )
    where = generation_of(state, number)
    if await read(client, task_queue, where, None, 0.0, 0) is None:
        raise ConfigError(
            f"job {job}: no worker answers, and only a worker can read logs from nodes: start one "
            "(`relaunch up` or `relaunch-worker`)"
        )
    live = follow and now.open and number == state.generation
    printer = Printer(state.spec.world_size)
    await print_logs(
        client, task_queue, where, printer, say, lambda: not live, only=rank, tail=tail
    )
