"""Reads what ranks printed, and archived incidents, for people at the command line. Starts and changes nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

from temporalio import activity

from activities.records import read_archive
from backends.base import Backend, BackendError, Fleets, Logs, Refused
from recovery.model import Token
from workflows.log_messages import LogPiece, ReadIncidentsInput, ReadIncidentsOutput, ReadLogsInput, ReadLogsOutput

GATHER = 0.03
"""Seconds to let other nodes' lines arrive once one node has some: a step is printed by all ranks at about the same time."""


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
            refused=tuple(f"{node}: {result.because}" for node, result in results.items() if isinstance(result, Refused)),
        )

    @activity.defn
    async def read_incidents(self, input: ReadIncidentsInput) -> ReadIncidentsOutput:
        return ReadIncidentsOutput(tuple(await asyncio.to_thread(read_archive, self._archive, input.namespace, input.job)))


async def _read(backend: Backend, node: str, token: Token, input: ReadLogsInput, share: int) -> Logs | Refused | None:
    try:
        return await backend.logs(node, token, input.offsets, share, input.wait, input.tail)
    except BackendError:
        return None
