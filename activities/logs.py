"""Reads what ranks printed, where they are now, and archived incidents, for people at the command line. Starts and changes nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from temporalio import activity

from relaunch.activities.records import read_archive
from relaunch.backends.base import Backend, BackendError, Fleets, Logs, Refused
from relaunch.generation import Token
from relaunch.messages.logs import (
    LogPiece,
    ReadIncidentsInput,
    ReadIncidentsOutput,
    ReadLogsInput,
    ReadLogsOutput,
    ReadStacksInput,
    ReadStacksOutput,
    Stack,
)

GATHER = 0.03
"""Seconds to let other nodes' lines arrive once one node has some: a step is printed by all ranks at about the same time."""


STACKS = 1_000_000
"""Characters of all stacks together, below the 2 MiB that a payload may have."""
STACK_LEAST = 300


class LogActivities:
    def __init__(self, fleets: Fleets, archive: Path) -> None:
        self._fleets = fleets
        self._archive = archive

    @activity.defn
    async def read_logs(self, input: ReadLogsInput) -> ReadLogsOutput:
        """Return what is new; with `wait`, as soon as one node has something new."""
        backend = self._fleets.backend(input.fleet)
        token = Token(input.namespace, input.job, input.submission, input.generation)
        share = max(4096, input.max_bytes // max(1, len(input.nodes)))
        reads = {node: asyncio.create_task(_read(backend, node, token, input, share)) for node in input.nodes}
        try:
            pending = set(reads.values())
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if any(result.chunks for task in done if isinstance(result := task.result(), Logs)):
                    await asyncio.wait(pending or done, timeout=GATHER)
                    break
            results = {node: task.result() for node, task in reads.items() if task.done()}
        finally:
            for task in reads.values():
                task.cancel()
        logs = [result for result in results.values() if isinstance(result, Logs)]
        return ReadLogsOutput(
            chunks=tuple(LogPiece(chunk.rank, chunk.next, chunk.data) for part in logs for chunk in part.chunks),
            ended=len(logs) == len(input.nodes) and all(part.ended for part in logs),
            unreachable=tuple(node for node, result in results.items() if result is None),
            refused=tuple(f"{node}: {result.reason}" for node, result in results.items() if isinstance(result, Refused)),
        )

    @activity.defn
    async def read_stacks(self, input: ReadStacksInput) -> ReadStacksOutput:
        """Look at ranks: nodes side by side, the ranks of one node one after the other, for each costs the node a process."""
        backend = self._fleets.backend(input.fleet)
        token = Token(input.namespace, input.job, input.submission, input.generation)
        most = max(STACK_LEAST, STACKS // max(1, len(input.places)))
        nodes: dict[str, list[int]] = {}
        for node, rank in input.places:
            nodes.setdefault(node, []).append(rank)

        async def of(node: str, ranks: list[int]) -> list[Stack]:
            return [await _stack(backend, node, token, rank, most) for rank in ranks]

        found = await asyncio.gather(*(of(node, ranks) for node, ranks in nodes.items()))
        return ReadStacksOutput(tuple(sorted((one for part in found for one in part), key=lambda one: one.rank)))

    @activity.defn
    async def read_incidents(self, input: ReadIncidentsInput) -> ReadIncidentsOutput:
        return ReadIncidentsOutput(tuple(await asyncio.to_thread(read_archive, self._archive, input.namespace, input.job)))


async def _read(backend: Backend, node: str, token: Token, input: ReadLogsInput, share: int) -> Logs | Refused | None:
    try:
        return await backend.logs(node, token, input.offsets, share, input.wait, input.tail)
    except BackendError:
        return None


async def _stack(backend: Backend, node: str, token: Token, rank: int, most: int) -> Stack:
    try:
        answer = await backend.stacks(node, token, rank)
    except BackendError as error:
        return Stack(rank, node, None, f"no answer: {error.reason}")
    if isinstance(answer, Refused):
        return Stack(rank, node, None, answer.reason)
    row = answer["stacks"][0]
    pid = row.get("pid")
    return Stack(rank, node, pid if isinstance(pid, int) else None, told(row)[:most])


def told(row: Mapping[str, Any]) -> str:
    """What an agent found of one rank, for a person: Python's own stacks, else where the kernel has its threads."""
    if "unreadable" in row:
        return str(row["unreadable"])
    py_spy = row.get("py_spy")
    if isinstance(py_spy, str):
        return py_spy.rstrip()
    why = f"py-spy: {py_spy['unreadable']}" if isinstance(py_spy, Mapping) else "py-spy is not on the node's PATH"
    threads = Counter(_thread(one) for one in row.get("threads", ()) if isinstance(one, Mapping))
    lines = [f"{count} thread{'s' if count > 1 else ''} {where}" for where, count in threads.most_common()]
    return "\n".join([f"{' '.join(why.split())[:300]}; in the kernel:", *lines])


def _thread(thread: Mapping[str, Any]) -> str:
    status = thread.get("status")
    state = next(
        (line.partition(":")[2].strip() for line in str(status).splitlines() if line.startswith("State:")), "in no state that can be read"
    )
    wchan, stack = thread.get("wchan"), thread.get("stack")
    # 0: it runs, or the kernel does not tell this user.
    where = f" at {wchan}" if isinstance(wchan, str) and wchan not in ("", "0") else ""
    below = "".join(f"\n    {line}" for line in stack.splitlines()) if isinstance(stack, str) else ""
    return f"{state}{where}{below}"
