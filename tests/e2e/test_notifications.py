"""Notifications for real: a worker, a job that fails, an HTTP server, and `relaunch doctor`."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from pathlib import Path

import pytest

from relaunch.activities.channels import SIGNATURE, sign
from relaunch.cli import channel_test
from relaunch.cli.worker_status import read_statuses
from relaunch.config import ConfigError
from relaunch.messages.ids import NOTIFIER_ID_PREFIX
from relaunch.spec.policy import resolve
from tests.chaos.world import FLEET, QUEUE, TIMES, World, eventually
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


@pytest.mark.long
async def test_each_reminder_of_a_question_reaches_more_channels(
    tmp_path: Path,
) -> None:
    """A worker that is killed in between changes nothing; the answer reaches all, once."""
    async with World(tmp_path / "world", 123) as world:
        with webhook() as first, webhook() as second, webhook() as third, webhook() as never:
            channels = [
                {"webhook": first.url},
                {"webhook": second.url, "from_reminder": 1, "severities": ["critical"]},
                {"webhook": third.url, "from_reminder": 2},
                {"webhook": never.url, "from_reminder": 100},
            ]
            file = world.fleet_file
            file.write_text(f"{file.read_text()}notify: {json.dumps(channels)}\n")
            ladder = {"APPLICATION": [{"strategy": "ASK"}]}
            times = {**TIMES, "answer_within": "4s"}
            job = await world.submit(policy=resolve({"causes": ladder, "timeouts": times}))
            await job.until_phase("RUNNING", generation=1)
            (job.folder / "fail.1").write_text("KeyError: 'lr'")
            await job.until_phase("WAITING_FOR_PERSON")

            async def reminded() -> bool:
                return bool(second.notices)

            await eventually(reminded, "the second channel gets nothing", 120)
            assert first.notices[0]["reminders"] == 0 < first.notices[1]["reminders"]
            assert not never.notices
            await world.worker.end()
            await world.worker.start()

            async def reminded_again() -> bool:
                return bool(third.notices)

            await eventually(reminded_again, "the third channel gets nothing", 120)
            state = await job.state()
            assert (state.phase, state.generation) == ("WAITING_FOR_PERSON", 1), "it ends no job"
            code, said = await world.run_starter("answer", job.name, "deny", "--reason", "a bug")
            assert code == 0, said
            await job.until_phase("FAILED")
            hooks = (first, second, third)

            async def resolved() -> bool:
                return all(
                    any(one["state"] == "resolved" for one in hook.notices) for hook in hooks
                )

            await eventually(resolved, "not all channels got the answer", 120)
            assert not never.requests
            for at, hook in enumerate(hooks):
                # A message that the killed worker had sent may have come twice, by the same id.
                bodies = {body["id"]: body for body in hook.bodies}.values()
                asked = [
                    one for body in bodies for one in body["notices"] if one["event"] == "question"
                ]
                told = [one["reminders"] for one in asked if one["state"] == "open"]
                # One that the next one overtook, while no worker ran, is not sent any more.
                assert told == sorted(set(told)) and told[0] >= at, "each once, from its first on"
                assert [one["state"] for one in asked].count("resolved") == 1
                assert {one["severity"] for one in asked} == {"critical"}
                assert len({one["key"] for one in asked}) == 1
            subjects = [body["subject"] for body in third.bodies]
            again = re.escape(f"relaunch: job {job.name} still waits for a person")
            assert re.fullmatch(rf"{again} \(reminder [2-9]\)", subjects[0]), subjects


@pytest.mark.long
async def test_a_test_message_goes_from_the_worker_to_every_channel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key"
    key.write_text("k3y\n")
    async with World(tmp_path / "world", 122) as world:
        with webhook() as received, webhook(404) as refusing:

            async def refused() -> str | None:
                with pytest.raises(ConfigError) as error:
                    await channel_test.send(world.client, QUEUE, FLEET)
                return None if "no worker answers" in str(error.value) else str(error.value)

            # A worker that is starting does not answer yet, and a busy machine starts it slowly.
            said = await eventually(refused, "no worker answers")
            assert "fleet chaos has no channel" in said
            with pytest.raises(ConfigError, match="'nosuch' is not known to this worker"):
                await channel_test.send(world.client, QUEUE, "nosuch")
            channels: list[dict[str, object]] = [
                {"webhook": received.url, "secret": {"file": str(key)}, "events": ["failed"]}
            ]
            text = world.fleet_file.read_text()
            world.fleet_file.write_text(f"{text}notify: {json.dumps(channels)}\n")
            code, said = await world.run_starter("notify", "test", FLEET, "--json")
            assert code == 0, said
            shown = json.loads(said)
            assert shown["channels"] == [
                {"name": "webhook 127.0.0.1", "outcome": "done", "reason": ""}
            ]
            assert shown["worker"].startswith(f"{world.worker.pid}@")
            ((headers, body),) = received.requests
            assert headers[SIGNATURE] == sign(body, "k3y"), "the worker's secret"
            (notice,) = json.loads(body)["notices"]
            assert (notice["event"], notice["key"]) == ("test", f"{FLEET}/test")
            assert "this is a test" in json.loads(body)["subject"]

            channels += [
                {"webhook": refusing.url},
                {"webhook": f"http://localhost:{find_port()}/{WRONG}"},
                {"webhook": {"env": "NO_SUCH_HOOK"}},
            ]
            world.fleet_file.write_text(f"{text}notify: {json.dumps(channels)}\n")
            code, said = await world.run_starter("notify", "test", FLEET)
            assert code == 1, said
            lines = said.splitlines()
            assert [line.partition("  ")[2].strip().partition(":")[0] for line in lines[:4]] == [
                "delivered",
                "FAILED",
                "FAILED",
                "FAILED",
            ]
            assert "it answered 404" in said and "the worker's environment has no NO_" in said
            assert WRONG not in said
            assert len(received.requests) == 2, "one message a test"
            world.fleet_file.write_text(f"{text}notify: [{{webhook: nowhere}}]\n")
            last = await channel_test.send(world.client, QUEUE, FLEET)
            assert len(last.results) == 4, "by the last good content"
            code, said = await world.run_starter("doctor")
            line = text.count("\n") + 1
            assert code == 1 and f"{world.fleet_file}:{line}: notify.0.webhook" in said
            assert f"fleet {FLEET} is served by its last good content" in said
            world.fleet_file.write_text(text)
            with pytest.raises(ConfigError, match="has no channel"):
                await channel_test.send(world.client, QUEUE, FLEET)
            (status,) = await read_statuses(world.client, QUEUE)
            assert status.unusable_files == () and status.worker == shown["worker"]
        runs = [one async for one in world.client.list_workflows("WorkflowType = 'Notifier'")]
        assert runs == [], "a test is no matter"
        await world.worker.end()
        monkeypatch.setattr(channel_test, "START_TIMEOUT", timedelta(seconds=1))
        with pytest.raises(ConfigError, match="no worker answers for fleet chaos"):
            await channel_test.send(world.client, QUEUE, FLEET)
