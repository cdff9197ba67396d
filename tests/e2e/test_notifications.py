"""Notifications for real: a worker, a job that fails, an HTTP server, and `relaunch doctor`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relaunch.activities.channels import SIGNATURE, sign
from relaunch.messages.ids import NOTIFIER_ID_PREFIX
from relaunch.spec.policy import resolve
from tests.chaos.world import FLEET, TIMES, World, eventually
from tests.receivers import find_port, webhook

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]
WRONG = "s3cret-token"


@pytest.mark.long
async def test_a_failed_job_reaches_a_webhook_and_doctor_names_others(
    tmp_path: Path,
) -> None:
    key = tmp_path / "key"
    key.write_text("k3y\n")
    async with World(tmp_path / "world", 121) as world:
        with webhook() as received:
            channels = [
                {"webhook": received.url, "secret": {"file": str(key)}, "events": ["failed"]},
                {"webhook": f"http://localhost:{find_port()}/{WRONG}"},
            ]
            file = world.fleet_file
            file.write_text(f"{file.read_text()}notify: {json.dumps(channels)}\n")
            ladder = {"APPLICATION": [{"strategy": "FAIL"}]}
            job = await world.submit(policy=resolve({"causes": ladder, "timeouts": TIMES}))
            await job.until_phase("RUNNING", generation=1)
            (job.folder / "fail.1").write_text("KeyError: 'lr'")
            await job.until_phase("FAILED")

            async def sent() -> bool:
                return bool(received.requests)

            await eventually(sent, "no message is sent", 120)
            ((headers, body),) = received.requests
            assert headers[SIGNATURE] == sign(body, "k3y")
            (notice,) = json.loads(body)["notices"]
            said = (notice["event"], notice["state"], notice["job"], notice["cause"])
            assert said == ("failed", "open", job.name, "APPLICATION")

            async def shown() -> str:
                code, text = await world.run_starter("doctor")
                return text if code == 1 and "webhook localhost" in text else ""

            text = await eventually(shown, "doctor does not name the channel", 30)
            assert "cannot be reached" in text
            log = world.worker.log.read_text()
            assert "webhook localhost" in log
            assert WRONG not in log and WRONG not in text and "k3y" not in log
            notifier = world.client.get_workflow_handle(f"{NOTIFIER_ID_PREFIX}{FLEET}")
            history = (await notifier.fetch_history()).to_json()
            assert WRONG not in history and "k3y" not in history
