"""The log of a worker holds up nothing when it is not read, and has the SDK's messages too."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from temporalio.client import Client
from temporalio.runtime import Runtime, TelemetryConfig, TelemetryFilter
from temporalio.service import RPCError

from relaunch.credentials import Credentials
from relaunch.temporal import connect_with
from relaunch.worker_log import SDK_LOGGER, LogWriter, forward_sdk_log
from tests.activities.harness import eventually
from tests.servers import start_dev_server

PATIENCE = 60.0


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.Logger("relaunch.test")
    yield logger
    logger.handlers.clear()


def test_an_unread_log_holds_up_no_caller(logger: logging.Logger) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    full = 0
    while True:
        try:
            full += os.write(writing, b"." * 4096)
        except BlockingIOError:
            break
    os.set_blocking(writing, True)
    # The reading end is closed first: a failed test does not hang.
    with os.fdopen(writing, "w") as stream, os.fdopen(reading, "rb", buffering=0) as pipe:
        writer = LogWriter(stream, limit=3)
        logger.addHandler(writer)

        def log() -> None:
            for number in range(10):
                logger.warning("message %d", number)

        caller = threading.Thread(target=log, daemon=True)
        caller.start()
        caller.join(PATIENCE)
        assert not caller.is_alive()
        assert len(pipe.read(full) or b"") == full
        writer.finish(PATIENCE)
        lines = pipe.read(65536).decode().splitlines()
    kept = [line for line in lines if "message " in line and "lost" not in line]
    assert 3 <= len(kept) <= 4 and kept[0].endswith("WARNING relaunch.test: message 0")
    lost = f"{10 - len(kept)} messages lost here: this log was not read for a while"
    assert lines == [*kept, lost]


def test_a_log_whose_reader_has_ended_is_no_error(logger: logging.Logger) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w")
    writer = LogWriter(stream)
    logger.addHandler(writer)
    logger.warning("first")
    logger.warning("second")
    writer.finish(PATIENCE)
    assert not writer._thread.is_alive()
    with pytest.raises(BrokenPipeError):
        stream.close()


async def test_messages_of_the_sdk_are_in_the_log_not_on_stdout(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    config = replace(forward_sdk_log(), filter=TelemetryFilter("TRACE", "TRACE"))
    caplog.set_level(logging.DEBUG, SDK_LOGGER)
    runtime = Runtime(telemetry=TelemetryConfig(logging=config))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(RuntimeError):
        await Client.connect(f"127.0.0.1:{port}", runtime=runtime)
    await eventually(
        lambda: any(record.name == SDK_LOGGER for record in caplog.records),
        "a message of the SDK",
    )
    assert capfd.readouterr().out == ""


@pytest.mark.long
async def test_the_sdk_prints_nothing_among_results_of_commands(
    capfd: pytest.CaptureFixture[str],
) -> None:
    environment = await start_dev_server()
    async with environment:
        client = await connect_with(
            Credentials({}), environment.client.service_client.config.target_host
        )
    capfd.readouterr()
    with pytest.raises(RPCError):  # after some seconds and retries
        await client.count_workflows("")
    assert capfd.readouterr().out == ""
