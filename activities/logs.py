"""Reads the output of ranks, their stacks and archived incidents, for the command line.

Starts and changes nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from temporalio import activity

from relaunch.activities.records import read_archive
from relaunch.backends.base import Backend, BackendError, Fleets, Logs, Refusal
from relaunch.generation import Token
from relaunch.messages.logs import (
    CheckpointFolder,
    LogPiece,
    MissingLog,
    ReadCheckpointsInput,
    ReadCheckpointsOutput,
    ReadIncidentsInput,
    ReadIncidentsOutput,
    ReadLogsInput,
    ReadLogsOutput,
    ReadStacksInput,
    ReadStacksOutput,
    Stack,
)
from relaunch.text import count_noun

GATHER_DELAY_S = 0.03
"""Seconds to wait for lines of other nodes once one node has some: all ranks print a step at about
the same time."""


MAX_STACK_CHARACTERS = 1_000_000
"""Characters of all stacks together, below the 2 MiB limit of a payload."""
MIN_STACK_CHARACTERS = 300


class LogActivities:
    def __init__(self, fleets: Fleets, archive: Path) -> None:
        self._fleets = fleets
        self._archive = archive

    @activity.defn
    async def read_logs(self, input: ReadLogsInput) -> ReadLogsOutput:
        """Return new output: without `wait` of all nodes, else as soon as one of them has some."""
        backend = self._fleets.backend(input.fleet)
        token = Token(input.namespace, input.job, input.submission, input.generation)
        share = max(4096, input.max_bytes // max(1, len(input.nodes)))
        reads = {
            node: asyncio.create_task(_read(backend, node, token, input, share))
            for node in input.nodes
        }
        try:
            pending = set(reads.values())
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                found = [result for task in done if isinstance(result := task.result(), Logs)]
                if input.wait > 0 and any(result.chunks for result in found):
                    await asyncio.wait(pending or done, timeout=GATHER_DELAY_S)
                    break
            results = {node: task.result() for node, task in reads.items() if task.done()}
        finally:
            for task in reads.values():
                task.cancel()
        logs = [result for result in results.values() if isinstance(result, Logs)]
        return ReadLogsOutput(
            chunks=tuple(
                LogPiece(chunk.rank, chunk.next, chunk.data)
                for part in logs
                for chunk in part.chunks
            ),
            ended=len(logs) == len(input.nodes) and all(part.ended for part in logs),
            unreachable=tuple(
                f"{node}: {result.reason}"
                for node, result in results.items()
                if isinstance(result, BackendError)
            ),
            refused=tuple(
                f"{node}: {result.reason}"
                for node, result in results.items()
                if isinstance(result, Refusal)
            ),
            begins={rank: offset for part in logs for rank, offset in part.begins.items()},
            sizes={rank: size for part in logs for rank, size in part.sizes.items()},
            missing=tuple(
                MissingLog(rank, node)
                for node, result in results.items()
                if isinstance(result, Logs)
                for rank in result.missing
            ),
        )

    @activity.defn
    async def read_stacks(self, input: ReadStacksInput) -> ReadStacksOutput:
        """Read the stacks of ranks.

        Nodes are read in parallel, the ranks of one node in turn, because each costs the node a
        process.
        """
        backend = self._fleets.backend(input.fleet)
        token = Token(input.namespace, input.job, input.submission, input.generation)
        most = max(MIN_STACK_CHARACTERS, MAX_STACK_CHARACTERS // max(1, len(input.places)))
        nodes: dict[str, list[int]] = {}
        for node, rank in input.places:
            nodes.setdefault(node, []).append(rank)

        async def read_stacks_of_node(node: str, ranks: list[int]) -> list[Stack]:
            return [await _read_stack(backend, node, token, rank, most) for rank in ranks]

        found = await asyncio.gather(
            *(read_stacks_of_node(node, ranks) for node, ranks in nodes.items())
        )
        return ReadStacksOutput(
            tuple(sorted((one for part in found for one in part), key=lambda one: one.rank))
        )

    @activity.defn
    async def read_checkpoints(self, input: ReadCheckpointsInput) -> ReadCheckpointsOutput:
        """Read which checkpoints a job has, at the first of its nodes that answers."""
        backend = self._fleets.backend(input.fleet)
        reasons = []
        for node in input.nodes:
            try:
                answer = await backend.checkpoints(node, input.directory, input.workdir)
            except BackendError as error:
                reasons.append(f"{node}: {error.reason}")
                continue
            if isinstance(answer, Refusal):
                reasons.append(f"{node}: {answer.reason}")
                continue
            if answer["unreadable"] is not None:
                return ReadCheckpointsOutput(node, unreadable=f"{node}: {answer['unreadable']}")
            newest = answer["newest"]
            return ReadCheckpointsOutput(
                node,
                None if newest is None else CheckpointFolder(**newest),
                tuple(CheckpointFolder(**one) for one in answer["incomplete"]),
            )
        return ReadCheckpointsOutput(unreadable="; ".join(reasons))

    @activity.defn
    async def read_incidents(self, input: ReadIncidentsInput) -> ReadIncidentsOutput:
        return ReadIncidentsOutput(
            tuple(await asyncio.to_thread(read_archive, self._archive, input.namespace, input.job))
        )


async def _read(
    backend: Backend, node: str, token: Token, input: ReadLogsInput, share: int
) -> Logs | Refusal | BackendError:
    try:
        return await backend.logs(
            node, token, input.offsets, share, input.wait, input.tail, input.since, input.stream
        )
    except BackendError as error:
        return error


async def _read_stack(backend: Backend, node: str, token: Token, rank: int, most: int) -> Stack:
    try:
        answer = await backend.stacks(node, token, rank)
    except BackendError as error:
        return Stack(rank, node, None, f"no answer: {error.reason}")
    if isinstance(answer, Refusal):
        return Stack(rank, node, None, answer.reason)
    row = answer["stacks"][0]
    pid = row.get("pid")
    return Stack(rank, node, pid if isinstance(pid, int) else None, format_stacks(row)[:most])


def format_stacks(row: Mapping[str, Any]) -> str:
    """Return the stacks that an agent found for one rank, as text.

    They are Python's own stacks, or else where its threads are in the kernel.
    """
    if "unreadable" in row:
        return str(row["unreadable"])
    py_spy = row.get("py_spy")
    if isinstance(py_spy, str):
        return py_spy.rstrip()
    why = (
        f"py-spy: {py_spy['unreadable']}"
        if isinstance(py_spy, Mapping)
        else "py-spy is not on the node's PATH"
    )
    threads = Counter(
        _format_thread(one) for one in row.get("threads", ()) if isinstance(one, Mapping)
    )
    lines = [f"{count_noun(count, 'thread')} {where}" for where, count in threads.most_common()]
    return "\n".join([f"{' '.join(why.split())[:300]}; in the kernel:", *lines])


def _format_thread(thread: Mapping[str, Any]) -> str:
    status = thread.get("status")
    state = next(
        (
            line.partition(":")[2].strip()
            for line in str(status).splitlines()
            if line.startswith("State:")
        ),
        "in no state that can be read",
    )
    wchan, stack = thread.get("wchan"), thread.get("stack")
    # 0: the thread is running, or the kernel hides this from the agent's user.
    where = f" at {wchan}" if isinstance(wchan, str) and wchan not in ("", "0") else ""
    below = (
        "".join(f"\n    {line}" for line in stack.splitlines()) if isinstance(stack, str) else ""
    )
    return f"{state}{where}{below}"
