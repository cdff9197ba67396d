"""Lets a worker that runs for months use certificates and API keys that are replaced meanwhile.

The SDK reads them once, when it connects, and presents the same ones at each reconnection. So the
files are read again here, and what has changed is used by a new connection, without a restart.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from google.protobuf.message import Message
from temporalio.api.workflowservice.v1 import GetSystemInfoRequest
from temporalio.client import Client
from temporalio.service import RPCError, ServiceClient, ServiceResponse
from temporalio.worker import Worker

from relaunch.config import ConfigError
from relaunch.credentials import (
    Credentials,
    describe_expiry,
    find_defect,
    find_expiry,
    read_credentials,
)
from relaunch.temporal import connect, explain_refusal, read_server_id

log = logging.getLogger("relaunch.credentials")

INTERVAL_S = 30.0
"""Seconds between two looks at the files: a replaced certificate has hours or days left."""
ANSWER_TIMEOUT = timedelta(seconds=10)
REPEAT_S = 6 * 3600.0
"""Seconds after which the same warning is logged again."""


class RenewableService(ServiceClient):
    """The SDK's connection, which can be replaced by another one to the same server."""

    def __init__(self, service: ServiceClient) -> None:
        super().__init__(service.config)
        self._service = service

    def replace(self, service: ServiceClient) -> None:
        """Send all later calls through another connection."""
        self._service, self.config = service, service.config

    @property
    def worker_service_client(self) -> Any:  # its type is private to the SDK
        return self._service.worker_service_client

    def update_rpc_metadata(self, metadata: Mapping[str, str | bytes]) -> None:
        self._service.update_rpc_metadata(metadata)

    def update_api_key(self, api_key: str | None) -> None:
        self._service.update_api_key(api_key)

    async def _rpc_call(
        self,
        rpc: str,
        req: Message,
        resp_type: type[ServiceResponse],
        *,
        service: str,
        retry: bool,
        metadata: Mapping[str, str | bytes],
        timeout: timedelta | None,
    ) -> ServiceResponse:
        return await self._service._rpc_call(
            rpc,
            req,
            resp_type,
            service=service,
            retry=retry,
            metadata=metadata,
            timeout=timeout,
        )


def make_renewable(client: Client) -> Client:
    """Return the same client with a connection that can be replaced."""
    config = client.config()
    config["service_client"] = RenewableService(client.service_client)
    return Client(**config)


@dataclass(slots=True)
class Renewal:
    """Watches the configuration of one client, made by `make_renewable`."""

    client: Client
    state: Path
    used: Credentials
    """What the present connection was made with."""
    server: str
    """The id of the server; another one is not followed."""
    interval: float = INTERVAL_S
    """Seconds."""
    _said: dict[str, float] = field(default_factory=dict)

    async def run(self, worker: Worker) -> None:
        """Look until cancelled. What cannot be used now is said, and looked at again."""
        if not self.used.has_tls and not self.used.api_key_origin:
            return  # nothing that ends
        while True:
            try:
                await self.look(worker)
            except (ConfigError, RPCError) as error:
                reason = explain_refusal(error) if isinstance(error, RPCError) else error
                self._warn(f"{reason}; this worker tries again every {self.interval:g} s")
            await asyncio.sleep(self.interval)

    async def look(self, worker: Worker) -> None:
        """Read the configuration, use what has changed, and ask whether the connection works.

        Raises:
            ConfigError: the configuration cannot be used, the server refuses it, or it is away;
                nothing has changed.
            RPCError: as above.
        """
        now = datetime.now(UTC)
        found = await asyncio.to_thread(read_credentials)
        if found != self.used:
            await self._renew(worker, found, now)
        if text := self.describe_expiry():
            self._warn(f"{text}: replace it, and this worker takes the new one by itself")
        try:
            await self.client.workflow_service.get_system_info(
                GetSystemInfoRequest(), timeout=ANSWER_TIMEOUT
            )
        except RPCError:
            # What a reconnection of the SDK fails with says little. A new connection says more.
            await connect(self.state)

    def describe_expiry(self) -> str:
        """Return a sentence about a certificate in use that has ended or ends soon, or nothing."""
        expiry = find_expiry(self.used)
        return (describe_expiry(expiry, datetime.now(UTC)) or "") if expiry else ""

    async def _renew(self, worker: Worker, found: Credentials, now: datetime) -> None:
        for key in ("target_host", "namespace"):
            if found.config.get(key) != self.used.config.get(key):
                raise ConfigError(
                    f"{key} is {found.config.get(key)!r} now: expected"
                    f" {self.used.config.get(key)!r} until the worker is restarted"
                )
        if defect := find_defect(found, now):
            # A certificate is replaced a moment before its key, or after it.
            raise ConfigError(defect)
        new = await connect(self.state)
        if (server := await read_server_id(new)) != self.server:
            raise ConfigError(f"another server answers, whose namespace is {server}")
        service = self.client.service_client
        assert isinstance(service, RenewableService)
        service.replace(new.service_client)
        worker.client = self.client  # so that its polls take the new connection, too
        self.used = found
        self._said.clear()
        log.info("certificates or API key have changed: a new connection uses them")

    def _warn(self, text: str) -> None:
        now = time.monotonic()
        if now - self._said.get(text, -REPEAT_S) >= REPEAT_S:
            self._said[text] = now
            log.warning("%s", text)
