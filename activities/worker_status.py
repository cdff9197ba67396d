"""Says what is wrong with the worker that carries this out; `relaunch doctor` asks."""

from __future__ import annotations

from collections.abc import Callable

from temporalio import activity
from temporalio.client import Client

from relaunch.messages.workers import HeartbeatStatus, UnusableFile, WorkerStatus


class WorkerStatusActivities:
    def __init__(
        self,
        client: Client,
        unusable: Callable[[], tuple[UnusableFile, ...]],
        heartbeats: Callable[[], tuple[HeartbeatStatus, ...]],
        expiry: Callable[[], str] = str,
        rules: Callable[[], dict[str, str]] = dict,
        untaken: Callable[[], dict[str, dict[str, str]]] = dict,
    ) -> None:
        self._client = client
        self._unusable = unusable
        self._heartbeats = heartbeats
        self._expiry = expiry
        self._rules = rules
        self._untaken = untaken

    @activity.defn
    async def read_worker_status(self) -> WorkerStatus:
        return WorkerStatus(
            self._client.identity,
            self._unusable(),
            self._heartbeats(),
            self._expiry(),
            self._rules(),
            self._untaken(),
        )
