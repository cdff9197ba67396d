"""Reads the output of ranks, their stacks and archived incidents, for the command line.

Starts and changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from temporalio import activity

from relaunch.activities.records import read_archive
from relaunch.backends.base import Backend, BackendError, Fleets, Logs, Refusal
from relaunch.evidence.stacks import (
    RankLook,
    StackGroup,
    describe_rank,
    group_stacks,
    read_rank_looks,
)
from relaunch.generation import Token
from relaunch.messages.logs import (
    CheckpointFolder,
    LogPiece,
    MissingLog,
    RankGroup,
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
from relaunch.text import count_noun, printable

GATHER_DELAY_S = 0.03
"""Seconds to wait for lines of other nodes once one node has some: all ranks print a step at about
the same time."""


MAX_STACK_CHARACTERS = 1_000_000
"""Characters of all stacks together, below the 2 MiB limit of a payload."""
MIN_STACK_CHARACTERS = 300
MAX_GROUPS, MAX_FRAME_CHARACTERS = 32, 200
"""Groups of ranks that are sent, and characters of each of their frames; a hung job has a few."""


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
        """Read the stacks of ranks, all nodes in parallel.

        Each node is asked once, and reads its ranks in parallel.
        """
        backend = self._fleets.backend(input.fleet)
        token = Token(input.namespace, input.job, input.submission, input.generation)
        most = max(MIN_STACK_CHARACTERS, MAX_STACK_CHARACTERS // max(1, len(input.places)))
        nodes: dict[str, list[int]] = {}
        for node, rank in input.places:
            nodes.setdefault(node, []).append(rank)
        found = await asyncio.gather(
            *(_read_stacks(backend, node, token, ranks, most) for node, ranks in nodes.items())
        )
        looks = [look for part, _ in found for look in part]
        stacks = sorted((one for _, part in found for one in part), key=lambda one: one.rank)
        groups = group_stacks(looks)
        places = {
            look.rank: (describe_rank(look), index)
            for index, group in enumerate(groups)
            for look in group.looks
        }
        return ReadStacksOutput(
            tuple(
                replace(one, where=places[one.rank][0], group=places[one.rank][1])
                if one.rank in places
                else one
                for one in stacks
            ),
            _describe_groups(groups),
        )

    @activity.defn
    async def read_checkpoints(self, input: ReadCheckpointsInput) -> ReadCheckpointsOutput:
        """Read which checkpoints a job has, at the first of its nodes that answers."""
        backend = self._fleets.backend(input.fleet)
        reasons = []
        for node in input.nodes:
            try:
                answer = await backend.checkpoints(
                    node, input.directory, input.workdir, input.pattern
                )
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


async def _read_stacks(
    backend: Backend, node: str, token: Token, ranks: Sequence[int], most: int
) -> tuple[tuple[RankLook, ...], list[Stack]]:
    """Return what a node's ranks do, for groups and for people."""
    try:
        answer = await backend.stacks(node, token, ranks[0] if len(ranks) == 1 else None)
    except BackendError as error:
        return _miss_all(node, ranks, f"no answer: {error.reason}")
    if isinstance(answer, Refusal):
        return _miss_all(node, ranks, answer.reason)
    rows = {row["rank"]: row for row in answer["stacks"]}
    return read_rank_looks(node, rows.values()), [
        Stack(rank, node, rows[rank]["pid"], format_stacks(rows[rank])[:most])
        if rank in rows
        else Stack(rank, node, None, "the node has no such rank")
        for rank in ranks
    ]


def _describe_groups(groups: Sequence[StackGroup]) -> tuple[RankGroup, ...]:
    shown = tuple(
        RankGroup(
            str(group),
            tuple(printable(str(frame), MAX_FRAME_CHARACTERS) for frame in group.frames),
        )
        for group in groups[:MAX_GROUPS]
    )
    if (more := len(groups) - len(shown)) > 0:
        return (*shown, RankGroup(f"and {count_noun(more, 'more group')}"))
    return shown


def _miss_all(
    node: str, ranks: Sequence[int], reason: str
) -> tuple[tuple[RankLook, ...], list[Stack]]:
    return (
        tuple(RankLook(rank, node, unreadable=reason) for rank in ranks),
        [Stack(rank, node, None, reason) for rank in ranks],
    )


def format_stacks(row: Mapping[str, Any]) -> str:
    """Return the stacks that an agent found for the processes of one rank, as text.

    `row` is one of docs/reference/agent-protocol.md, `stacks`.
    """
    if row.get("unreadable") is not None:
        return str(row["unreadable"])
    return "\n".join(line for process in row["processes"] for line in _format_process(process))


def _format_process(process: Mapping[str, Any]) -> list[str]:
    where = f", in the kernel at {process['wchan']}" if process["wchan"] else ""
    lines = [
        f"Process {process['pid']}: {process['command']}",
        f"state {process['state']}{where}; {process['cpu_s']:.1f} s of CPU so far",
    ]
    lines += [f"    {name} (kernel)" for name in process["kernel"]]
    if process["unreadable"] is not None:
        lines.append(f"no Python stack: {process['unreadable']}")
    for thread in process["threads"]:
        lines.append(f"Thread {thread['tid']}: {thread['name']}")
        lines += [f"    {function} ({file}:{line})" for function, file, line in thread["frames"]]
    return lines
