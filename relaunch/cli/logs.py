"""Reads what ranks print, through a worker, and prints it with the rank in front of each line."""

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
"""Seconds that one call waits for news. Longer calls hold a place in the worker that nobody needs any more after ctrl-C."""
BETWEEN_CALLS = 0.1
"""Seconds: a rank that prints all the time costs ten calls a second, and nobody reads faster."""
ANSWER_WITHIN = 10.0
COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)


@dataclass
class Printer:
    """Prints whole lines; what has no end yet is kept until it has one."""

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
        # A launcher is counted behind the ranks, by the number of its node.
        name = f"[rank {rank}]" if rank < self.world_size else f"[launcher {rank - self.world_size}]"
        prefix = name.ljust(len(f"[rank {self.world_size - 1}]"))
        if self.colour:
            prefix = f"\x1b[{COLOURS[rank % len(COLOURS)]}m{prefix}\x1b[0m"
        sys.stdout.write("".join(f"{prefix} {line}\n" for line in lines))
        sys.stdout.flush()


@dataclass(frozen=True)
class Generation:
    """Where the logs of one generation are."""

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
    client: Client, task_queue: str, where: Generation, offsets: dict[int, int] | None, wait: float, tail: int | None
) -> ReadLogsOutput | None:
    """Read once; None when no worker answers."""
    within = timedelta(seconds=wait + ANSWER_WITHIN)
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
            retry_policy=RetryPolicy(maximum_attempts=1),  # whoever reads asks again, from where it knows it is
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
    """Print a generation's logs as they come, until they end, or until nothing new is there and they are `over`."""
    offsets: dict[int, int] = {}
    complained: str | None = None
    while True:
        last = over()
        answer = await read(client, task_queue, where, offsets or None, 0.0 if last else WAIT, tail)
        if answer is None:
            complaint: str | None = "no worker answers: logs wait for one"
        else:
            silent = [f"{', '.join(answer.unreachable[:8])}: no answer"] if answer.unreachable else []
            complaint = f"no logs from {'; '.join((*silent, *answer.refused[:8]))}" if silent or answer.refused else None
            for piece in answer.chunks:
                offsets[piece.rank] = piece.next
                if only is None or piece.rank == only:
                    printer.feed(piece.rank, piece.data)
            if answer.ended and not answer.chunks:
                break
        # At the end, where something was printed, nobody needs to know that a node has gone since.
        if complaint != complained and complaint is not None and not (last and offsets):
            say(complaint)
        complained = complaint
        # Once over, an empty answer is the last one, and so is none at all.
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
        Mistake: there are none to read, or nobody who could read them.
    """
    now = await jobs.look(client, job)
    state = now.state
    if state is None:
        raise ConfigError(f"job {job}: no worker answers, and only a worker can read logs from nodes: start one")
    number = state.generation if generation is None else generation
    if not 1 <= number <= state.generation or not state.slots:
        if state.generation == 0:
            raise ConfigError(f"job {job} was not launched yet: there are no logs")
        raise ConfigError(f"job {job} has no generation {number}: expected 1 to {state.generation}")
    if rank is not None and not 0 <= rank < state.spec.world_size:
        raise ConfigError(f"job {job} has no rank {rank}: expected 0 to {state.spec.world_size - 1}")
    where = generation_of(state, number)
    if await read(client, task_queue, where, None, 0.0, 0) is None:
        raise ConfigError(f"job {job}: no worker answers, and only a worker can read logs from nodes: start one")
    live = follow and now.open and number == state.generation
    printer = Printer(state.spec.world_size)
    await print_logs(client, task_queue, where, printer, say, lambda: not live, only=rank, tail=tail)
