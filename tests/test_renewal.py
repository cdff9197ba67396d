"""Certificates that are replaced while a worker runs; with nginx in `tests/deploy/test_nginx.py`.

The connection is a double: what matters here is when it is replaced, and by which.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from temporalio.api.workflowservice.v1 import GetSystemInfoRequest, GetSystemInfoResponse
from temporalio.client import Client
from temporalio.service import ConnectConfig, RPCError, RPCStatusCode, ServiceClient
from temporalio.worker import Worker

from relaunch import renewal
from relaunch.config import ConfigError, Settings
from relaunch.credentials import read_credentials
from relaunch.renewal import RenewableService, Renewal, make_renewable
from relaunch.worker import _reach_server
from tests.tls import DAY, Authority, use_tls

ADDRESS = "temporal.lab:7443"


class Connection(ServiceClient):
    """Answers every call with its number."""

    def __init__(self, number: int) -> None:
        super().__init__(ConnectConfig(target_host=ADDRESS))
        self.number, self.is_refused = number, False

    @property
    def worker_service_client(self) -> Any:
        return self.number

    def update_rpc_metadata(self, metadata: Any) -> None:
        raise NotImplementedError

    def update_api_key(self, api_key: str | None) -> None:
        raise NotImplementedError

    async def _rpc_call(self, rpc: str, req: Any, resp_type: Any, **options: Any) -> Any:
        if self.is_refused:
            raise RPCError("refused", RPCStatusCode.INTERNAL, b"")
        return resp_type(server_version=str(self.number))


class Stand:
    """A worker whose client has connection 1, and whose server gives out 2, 3, …"""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ca = Authority(folder, "ca")
        self.ca.issue("worker")
        for name, value in use_tls(folder, "worker", TEMPORAL_ADDRESS=ADDRESS).items():
            monkeypatch.setenv(name, value)
        self.count, self.server, self.refusal = 1, "one", ""
        monkeypatch.setattr(renewal, "connect", self._connect)
        monkeypatch.setattr(renewal, "read_server_id", self._read_server_id)
        self.first = Connection(1)
        self.client = make_renewable(Client(self.first))
        self.worker = SimpleNamespace(client=self.client)
        self.renewal = Renewal(self.client, folder, read_credentials(), "one")

    async def _connect(self, state: Path) -> Client:
        self.count += 1
        if self.refusal:
            raise ConfigError(self.refusal)
        return Client(Connection(self.count))

    async def _read_server_id(self, client: Client) -> str:
        return self.server

    async def look(self) -> str:
        """Look once; return which connection a call takes now."""
        await self.renewal.look(cast(Worker, self.worker))
        return await self.ask()

    async def ask(self) -> str:
        service = self.client.workflow_service
        answer: GetSystemInfoResponse = await service.get_system_info(GetSystemInfoRequest())
        taken = cast(RenewableService, self.client.service_client).worker_service_client
        assert answer.server_version == str(taken), "the polls' connection is the calls' one"
        return answer.server_version


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stand:
    return Stand(tmp_path, monkeypatch)


async def test_a_new_pair_gets_a_new_connection_once(stand: Stand) -> None:
    assert await stand.look() == "1"
    stand.ca.issue("worker")
    assert [await stand.look(), await stand.look()] == ["2", "2"]
    stand.ca.issue("worker")
    assert await stand.look() == "3"


async def test_what_cannot_be_used_changes_nothing(
    stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(word: str) -> None:
        with pytest.raises(ConfigError, match=word):
            await stand.look()
        assert await stand.ask() == "1"

    shutil.copy(tmp_path / "worker.key", tmp_path / "first.key")
    shutil.copy(tmp_path / "worker.pem", tmp_path / "first.pem")
    stand.ca.issue("worker")
    shutil.copy(tmp_path / "worker.key", tmp_path / "second.key")
    shutil.copy(tmp_path / "first.key", tmp_path / "worker.key")
    await refuse("worker.key .* does not belong to")
    (tmp_path / "worker.key").unlink()
    await refuse(r"worker\.key .* cannot be read")
    shutil.copy(tmp_path / "second.key", tmp_path / "worker.key")
    stand.server = "another"
    await refuse("another server")
    stand.server = "one"
    monkeypatch.setenv("TEMPORAL_ADDRESS", "elsewhere:7443")
    await refuse("target_host is 'elsewhere:7443' now")
    monkeypatch.setenv("TEMPORAL_ADDRESS", ADDRESS)
    count = stand.count
    assert await stand.look() == str(count + 1)


async def test_a_connection_that_is_refused_is_explained_and_replaced(stand: Stand) -> None:
    stand.first.is_refused, stand.refusal = True, "worker.pem is of another CA"
    with pytest.raises(ConfigError, match=r"worker\.pem is of another CA"):
        await stand.look()
    stand.ca.issue("worker")
    stand.refusal = ""
    assert await stand.look() == "3"


async def test_an_end_that_is_near_is_said_once(
    stand: Stand, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stand.ca.issue("worker", ends=3 * DAY)
    for _ in range(3):
        await stand.look()
    said = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert len(said) == 1 and f"{tmp_path}/worker.pem" in said[0]
    assert "worker.pem" in stand.renewal.describe_expiry()
    stand.ca.issue("worker")
    await stand.look()
    assert stand.renewal.describe_expiry() == ""


async def test_a_worker_waits_for_a_server_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("relaunch.worker.CONNECT_INTERVAL_S", 0.01)
    monkeypatch.setenv("TEMPORAL_ADDRESS", "127.0.0.1:1")
    settings, stop = Settings(state=tmp_path), asyncio.Event()
    waiting = asyncio.create_task(_reach_server(settings, stop))
    while not caplog.records:  # noqa: ASYNC110 - what is awaited is a line of the log
        await asyncio.sleep(0.01)
    assert not waiting.done()
    stop.set()
    assert await waiting is None
    said = [one.getMessage() for one in caplog.records]
    assert len(said) == 1 and "127.0.0.1:1 cannot be reached" in said[0], said
    monkeypatch.setenv("TEMPORAL_TLS_CLIENT_CERT_PATH", str(tmp_path / "gone.pem"))
    with pytest.raises(ConfigError, match=r"gone\.pem"):
        await _reach_server(settings, asyncio.Event())
