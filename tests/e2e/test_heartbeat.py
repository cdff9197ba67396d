"""A dead man's switch for real: a server, workers that die, a fleet, and an HTTP server."""

from __future__ import annotations

import asyncio
import json
import signal
from datetime import datetime
from pathlib import Path

import pytest
from temporalio.api.workflow.v1 import PendingActivityInfo

from relaunch.messages.ids import FLEET_ID_PREFIX
from tests.chaos.world import FLEET, World, eventually
from tests.payloads import decrypt
from tests.receivers import Webhook, webhook

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.long,  # some minutes of waiting, and little work
    pytest.mark.timeout(1200),
]
EVERY_S = 10.0
SILENCE_S = 35.0
"""Three requests and a half."""


async def until_more(received: Webhook, more: int, why: str) -> None:
    before = len(received.requests)

    async def arrived() -> bool:
        return len(received.requests) >= before + more

    await eventually(arrived, why, 300)


async def expect_silence(received: Webhook) -> None:
    """Check that no request comes any more, after one that may be under way."""
    await asyncio.sleep(2.0)
    before = len(received.requests)
    await asyncio.sleep(SILENCE_S)
    assert len(received.requests) == before


async def test_pings_come_only_while_the_fleet_is_watched(tmp_path: Path) -> None:
    async with World(tmp_path / "world", 123) as world:
        with webhook() as received:
            heartbeat = {"url": received.url, "every": f"{EVERY_S:g}s"}
            text = world.fleet_file.read_text()
            world.fleet_file.write_text(f"{text}heartbeat: {json.dumps(heartbeat)}\n")
            await world.worker.end()
            await world.worker.start()
            code, said = await world.run_starter("nodes", "list", "--fleet", FLEET)
            assert code == 0, said
            fleet = world.client.get_workflow_handle(f"{FLEET_ID_PREFIX}{FLEET}")

            async def find_watch() -> PendingActivityInfo | None:
                pending = (await fleet.describe()).raw_description.pending_activities
                watches = [one for one in pending if one.activity_type.name == "watch_fleet"]
                return next((one for one in watches if one.HasField("last_heartbeat_time")), None)

            await eventually(find_watch, "no worker watches the fleet")
            await until_more(received, 1, "no ping")

            # Quiet, it writes nothing: pings neither.
            async def count_events() -> int:
                described = (await fleet.describe()).raw_description
                return described.workflow_execution_info.history_length

            before = await count_events()
            await until_more(received, 3, "no further ping")
            assert await count_events() == before

            # A service that hangs: the watch goes on, and doctor names it.
            received.hangs.set()
            await until_more(received, 1, "no ping to the service that hangs")

            async def last_round() -> str | None:
                watch = await find_watch()
                if watch is None or not watch.heartbeat_details.payloads:
                    return None
                (details,) = watch.heartbeat_details.payloads
                return str(json.loads(decrypt(details).data)["last round"])

            first = await eventually(last_round, "no round is shown", 300)

            async def went_on() -> bool:
                return datetime.fromisoformat(await last_round() or first) > (
                    datetime.fromisoformat(first)
                )

            await eventually(went_on, "the watch waits for the service", 300)
            code, said = await world.run_starter("doctor")
            assert code == 1 and "its dead man's switch (127.0.0.1) is not requested since" in said
            assert "no answer within 10 s" in said and "/hook" not in said
            received.hangs.clear()
            await until_more(received, 2, "no ping after the service hung")
            code, said = await world.run_starter("doctor")
            assert code == 0 and "was last requested at" in said, said

            # The server is away.
            assert world.server.running is not None
            world.server.running.send_signal(signal.SIGSTOP)
            await asyncio.sleep(10.0)
            await expect_silence(received)
            world.server.running.send_signal(signal.SIGCONT)
            await until_more(received, 1, "no ping after the server was away")

            # The worker is gone, and another one takes the watch over.
            await world.worker.end()
            await expect_silence(received)
            await world.worker_elsewhere()
            await until_more(received, 2, "no ping of the other worker")
