"""What Temporal's server stores of a job with faults, as bytes of its database and of a backup; and
where else the secrets of a job, a fleet and a worker could have got to."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from relaunch.builds import RunningWorkflow
from relaunch.cli import jobs
from relaunch.cli.backup import back_up
from relaunch.cli.database import DATABASE
from relaunch.cli.upgrade import read_task_failure
from relaunch.config import KEYRING_VARIABLE, ConfigError
from relaunch.messages.logs import ReadIncidentsInput, ReadIncidentsOutput
from relaunch.temporal import connect
from tests.chaos.checks import violations
from tests.chaos.rounds import KILLED, Expected
from tests.chaos.world import FLEET, QUEUE, ROOT, Process, World, chaos_policy, eventually
from tests.receivers import Webhook, webhook

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
SECRET, FILED = "planted-of-a-secret", "planted-of-an-env-file"
HOOK, SIGNING, API_KEY = "planted-of-an-address", "planted-of-a-webhook", "planted-of-an-api-key"
SECRETS = [SECRET, FILED, HOOK, SIGNING, API_KEY]
"""Of the job, which prints its two; of the webhook; and of the way to the server."""
PLANTED = {
    name: f"planted-{name.replace(' ', '-')}"
    for name in (
        "variable",
        "argument",
        "annotation",
        "checkpoint folder",
        "log pattern",
        "secrets file",
        "environment file",
        "log line",
        "exception",
        "source line",
        "cancel",
        "retry",
        "policy change",
        "quarantine",
        "release",
        "pause",
        "resume",
        "repair",
        "work folder",
        "person",
    )
}
PROGRAM = f"""
import os, pathlib, sys, time
secrets = os.environ["TOKEN"] + " " + os.environ["FILED"]
print({PLANTED["log line"]!r}, secrets, flush=True)
step = 0
while not pathlib.Path("stop").exists():
    step += 1
    print("step", step, flush=True)
    time.sleep(0.05)
    if os.environ["RANK"] == "0" and pathlib.Path("fail").exists():
        pathlib.Path("fail").unlink()
        raise RuntimeError({PLANTED["exception"]!r} + secrets)  # {PLANTED["source line"]}
"""
KEY_OF_PAYLOAD = rb"encryption-key-id\x12.(first|second|third|fourth|fifth)"
STILL_SHOWN = ("job/faulty", f"fleet/{FLEET}", "RUNNING", "APPLICATION", "RESTART_IN_PLACE", "n1")
"""Of the search attributes and ids: docs/encryption.md."""


def list_forms(text: str) -> list[bytes]:
    """Return how a text may stand in a file: as it is, in UTF-16, in base64 at any offset."""
    raw = text.encode()
    coded = [base64.b64encode(b"\0" * n + raw)[(n * 4 + 2) // 3 + 1 :][:-4] for n in range(3)]
    return [raw, text.encode("utf-16-le"), *coded]


def find(texts: Iterable[str], files: Iterable[Path]) -> set[str]:
    """Return which of the texts are in one of the files."""
    forms = {text: list_forms(text) for text in texts}
    found: set[str] = set()
    for path in files:
        with contextlib.suppress(OSError):
            content = path.read_bytes()
            found |= {text for text, each in forms.items() if any(one in content for one in each)}
    return found


def find_in_processes(text: str) -> list[str]:
    """Return what has a text in its command line or environment. Of ranks their own secrets do not
    count."""
    is_of_ranks = text in (SECRET, FILED)
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes()
            variables = (process / "environ").read_bytes()
            if text.encode() in words:
                found.append(f"command line {words!r}")
            is_given = is_of_ranks and b"\0RANK=" in variables
            if text.encode() in variables and not is_given:
                found.append(f"environment of {words!r}")
    return found


def is_worker(found: str, key: str) -> bool:
    """Return whether it is the worker or a command, whose environment has the API key."""
    return bool(key) and found.startswith("environment of ") and "er.py" in found


def write_key(folder: Path, id: str) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / id).touch(mode=0o600)
    (folder / id).write_text(base64.b64encode(os.urandom(32)).decode() + "\n")


async def play(world: World, folder: Path, hook: Webhook, rotate: bool) -> None:
    """Run a job with faults, ordered about by a person, with a new key in the middle."""
    work = folder / PLANTED["work folder"]
    work.mkdir()
    (work / "train.py").write_text(PROGRAM)
    secret, filed = folder / PLANTED["secrets file"], folder / PLANTED["environment file"]
    address, signing = folder / "hook", folder / "signing"
    for path, text in (
        (secret, SECRET),
        (filed, f"FILED={FILED}\n"),
        (address, f"{hook.url}/{HOOK}"),
        (signing, SIGNING),
    ):
        path.touch(mode=0o600)
        path.write_text(text)
    with world.fleet_file.open("a") as file:
        file.write(f"notify: [{{webhook: {{file: {address}}}, secret: {{file: {signing}}}}}]\n")
    keys = [path.read_text().strip() for path in (folder / "keys").glob("*")]

    async def order(*words: str) -> str:
        code, output = await world.run_starter(*words)
        assert code == 0, output
        assert not any(text in output for text in (*SECRETS, *keys))
        return output

    job = await world.submit(
        name="faulty",
        nodes=1,
        policy=chaos_policy(),
        command=[world.python, "-S", "train.py", PLANTED["argument"]],
        workdir=str(work),
        env={"SHOWN": PLANTED["variable"], "WHO": PLANTED["person"]},
        env_file=str(filed),
        secrets={"TOKEN": {"file": str(secret)}},
        redact=["FILE*"],
        checkpoint={"directory": PLANTED["checkpoint folder"]},
        progress={"log_pattern": rf"({PLANTED['log pattern']}|step) (?P<step>\d+)"},
        metadata={"annotations": {"note": PLANTED["annotation"]}},
    )

    async def fail(generation: int) -> None:
        await job.until_phase("RUNNING", generation=generation)
        (work / "fail").touch()
        await job.until_phase("RUNNING", generation=generation + 1)

    await fail(1)
    await order("retry", "faulty", "--reason", PLANTED["retry"])
    await job.until_phase("RUNNING", generation=3)
    change = ("policy", "change", "faulty", "--set", "max_restarts=50")
    await order(*change, "--reason", PLANTED["policy change"])
    await world.worker.end(signal.SIGTERM)
    # This server asks for no API key, and gets one all the same.
    world.environment |= {"TEMPORAL_API_KEY": API_KEY, "TEMPORAL_TLS": "false"}
    if rotate:
        world.environment["RELAUNCH_ENCRYPTION_KEY"] = "second"
    await world.worker.start()
    await fail(3)
    await fail(4)
    incidents = str(await job.incidents())
    assert not any(text in incidents for text in SECRETS)
    assert "[redacted TOKEN] [redacted FILED]" in incidents
    fleet = ("--fleet", FLEET, "--reason")
    await order("nodes", "quarantine", "n3", *fleet, PLANTED["quarantine"])
    await order("nodes", "release", "n3", *fleet, PLANTED["release"])
    await order("nodes", "pause", *fleet, PLANTED["pause"])
    await order("nodes", "resume", *fleet, PLANTED["resume"])
    for text in (*SECRETS, *keys):
        allowed = API_KEY if text == API_KEY else ""
        assert [one for one in find_in_processes(text) if not is_worker(one, allowed)] == []
    await order("nodes", "repair", "n4", "--reboot", *fleet, PLANTED["repair"])
    for page in ("show", "history", "report", "next"):
        await order(page, "faulty", "--json")
    output = await order("logs", "faulty")
    assert PLANTED["log line"] in output
    await order("nodes", "list", "--fleet", FLEET, "--json")
    assert "[redacted TOKEN] [redacted FILED]" in output
    await order("cancel", "faulty", "--reason", PLANTED["cancel"])
    await job.until_phase("CANCELLED")
    await order("history", "faulty")
    # What people get of a job that failed for good.
    (work / "fail").touch()
    await world.submit(
        name="doomed",
        nodes=1,
        policy=chaos_policy(max_restarts=0),
        command=[world.python, "-S", "train.py"],
        workdir=str(work),
        env_file=str(filed),
        secrets={"TOKEN": {"file": str(secret)}},
        redact=["FILED"],
    )

    async def is_notified() -> bool:
        return "doomed" in str(hook.bodies) and "[redacted TOKEN]" in str(hook.bodies)

    await eventually(is_notified, "people get no notice of the failed job")
    assert not any(text in str(hook.bodies) for text in (SECRET, FILED, SIGNING, API_KEY, *keys))
    assert HOOK not in str(hook.bodies)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("RELAUNCH_", "TEMPORAL_"))]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("encrypts", [True, False])
async def test_a_database_and_its_backup_hold_nothing_that_was_planted(
    tmp_path: Path, encrypts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if encrypts:
        write_key(tmp_path / "keys", "first")
        monkeypatch.setenv("RELAUNCH_ENCRYPTION_KEYS", str(tmp_path / "keys"))
        monkeypatch.setenv("RELAUNCH_ENCRYPTION_KEY", "first")
        write_key(tmp_path / "keys", "second")
    folder = tmp_path / "world"
    with webhook() as hook:
        async with World(folder, 60 + encrypts, nodes=1, spares=3, answer_within=5.0) as world:
            await play(world, tmp_path, hook, rotate=encrypts)
            search(folder, tmp_path, encrypts)


def search(folder: Path, outer: Path, encrypts: bool) -> None:
    """Search everything that was written while the job ran."""
    state = folder / "state"
    (state / DATABASE).symlink_to(folder / "temporal.db")
    back_up(state, outer / "copy")
    database = list(folder.glob("temporal.db*"))
    copy = [path for path in (outer / "copy").rglob("*") if path.is_file()]
    everything = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.name for path in database} >= {"temporal.db", "temporal.db-wal"}
    for files in (database, copy):
        expected = set() if encrypts else set(PLANTED.values())
        assert find(PLANTED.values(), files) == expected
        assert find(STILL_SHOWN, files) == set(STILL_SHOWN)
    # Environments of jobs of `run` are in the copy; this job's file is the user's own, and so is
    # what its ranks print into their logs.
    keys = [path.read_text().strip() for path in (outer / "keys").glob("*")]
    logs = [path for path in everything if path.match("jobs/*/*/logs/rank_*.log")]
    assert find([SECRET, FILED], logs) == {SECRET, FILED}
    assert find([*SECRETS, *keys], {*everything, *copy} - {*logs}) == set()


async def test_keys_change_amid_a_fault_whose_worker_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    write_key(keys, "first")
    monkeypatch.setenv("RELAUNCH_ENCRYPTION_KEYS", str(keys))
    monkeypatch.setenv("RELAUNCH_ENCRYPTION_KEY", "first")
    in_place = [{"strategy": "RESTART_IN_PLACE", "tries": 9}]
    # A busy machine must not make a node refuse or lose what a worker comes late for.
    long = {"lease": "60s", "fence_after": "60s", "lost_after": "180s"}
    policy = chaos_policy(long, causes={"UNKNOWN": in_place}, no_progress_stop="off")
    async with World(tmp_path / "world", 63, nodes=2, spares=0, answer_within=5.0) as world:
        job = await world.submit(nodes=2, policy=policy, env={"SHOWN": PLANTED["variable"]})
        await job.until_phase("RUNNING")

        async def is_reserved() -> bool:
            return (await job.phase())[1] == 2

        async def is_prepared() -> bool:
            return 3 in (job.highest("n1", "prepared"), job.highest("n2", "prepared"))

        async def is_started() -> bool:
            return any(line["token"].endswith("/4") for line in job.starts())

        async def kill_a_rank() -> None:
            await job.until_watched()
            os.kill(job.rank_pids()[0], signal.SIGKILL)

        async def list_used() -> list[str]:
            """The keys of the job's history, in the order of their first use."""
            history = world.client.get_workflow_handle(f"job/{job.name}", run_id=job.run_id)
            events = [one.SerializeToString() async for one in history.fetch_history_events()]
            used = [key for one in events for key in re.findall(KEY_OF_PAYLOAD, one, re.DOTALL)]
            return [key.decode() for key in dict.fromkeys(used)]

        async def is_used(key: str) -> bool:
            return key in await list_used()

        # Between what a worker recorded, did and would have recorded next.
        for generation, key, is_then in (
            (2, "second", is_reserved),
            (3, "third", is_prepared),
            (4, "fourth", is_started),
        ):
            await kill_a_rank()
            await eventually(is_then, f"generation {generation} does not come", pause=0.001)
            await world.worker.end(signal.SIGKILL)
            write_key(keys, key)
            world.environment["RELAUNCH_ENCRYPTION_KEY"] = key
            await world.worker.start()
            await job.until_phase("RUNNING", generation=generation)
            # The worker that was killed may have recorded all of it: the next one says the step.
            await eventually(partial(is_used, key), f"nothing is written with key {key}")
        # Workers one after the other: one that has the new key works beside one that does not
        # encrypt with it yet, and which is killed.
        write_key(keys, "fifth")
        environment = {**world.environment, "RELAUNCH_ENCRYPTION_KEY": "fifth"}
        command, log = world.worker._command, tmp_path / "beside.log"
        beside = Process("worker beside", command, environment, log)
        world.others.append(beside)
        await beside.start()
        await kill_a_rank()
        await world.worker.end(signal.SIGKILL)
        await job.until_phase("RUNNING", generation=5)
        await world.worker.start()
        await job.until_steps()

        code, said = await world.run_starter("doctor")
        assert "with key first" in said, "what began with it needs it"
        for page in ("show", "history", "report"):
            code, said = await world.run_starter(page, job.name)
            assert code == 0, said
        job.let_end()
        await job.until_phase("SUCCEEDED")
        assert await violations(job, Expected((KILLED * 4,))) == []
        assert [str(one.cause) for one in await job.incidents()] == ["UNKNOWN"] * 4
        assert await list_used() == ["first", "second", "third", "fourth", "fifth"]
        database = list((tmp_path / "world").glob("temporal.db*"))
        assert find([PLANTED["variable"], "was killed by SIGKILL"], database) == set()


async def test_what_a_worker_cannot_read_waits_for_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, mine = tmp_path / "keys", tmp_path / "mine"
    write_key(folder, "first")
    write_key(mine, "second")
    monkeypatch.setenv("RELAUNCH_ENCRYPTION_KEYS", str(folder))
    monkeypatch.setenv("RELAUNCH_ENCRYPTION_KEY", "first")
    async with World(tmp_path / "world", 62, nodes=1, spares=1, answer_within=5.0) as world:
        # A job that was there before, written with the worker's key, is not disturbed.
        other = await world.submit(name="other", nodes=1)
        await other.until_phase("RUNNING")
        monkeypatch.setenv("RELAUNCH_ENCRYPTION_KEYS", str(mine))
        monkeypatch.setenv("RELAUNCH_ENCRYPTION_KEY", "second")
        address = world.environment["TEMPORAL_ADDRESS"]
        with pytest.raises(ConfigError, match=r"job/other cannot be read.*key 'first', which fold"):
            await connect(tmp_path, address)
        (mine / "first").touch(mode=0o600)
        (mine / "first").write_bytes((folder / "first").read_bytes())
        world.client = await connect(tmp_path, address)
        job = await world.submit(name="unreadable", nodes=1)
        incidents = ReadIncidentsInput("default", "other")
        activity = await world.client.start_activity(
            "read_incidents",
            incidents,
            id="unreadable",
            task_queue=QUEUE,
            result_type=ReadIncidentsOutput,
            start_to_close_timeout=timedelta(seconds=2),
        )

        async def is_tried_again() -> bool:
            task = (await jobs.describe(world.client, job.name)).raw_description
            again = (await activity.describe()).attempt
            return task.pending_workflow_task.attempt > 2 and again > 2

        await eventually(is_tried_again, "the tasks of a job without a key are not tried again")
        workflow = RunningWorkflow(f"job/{job.name}", job.run_id, "TrainingJob")
        reason = await read_task_failure(world.client, workflow)
        assert f"key 'second', which folder {folder} does not have" in reason
        log = world.worker.log.read_text()
        assert "an activity is left to another worker: a payload is encrypted with key 'sec" in log
        (folder / "second").touch(mode=0o600)
        (folder / "second").write_bytes((mine / "second").read_bytes())
        assert (await activity.result()).incidents == ()
        await job.until_phase("RUNNING")
        await job.until_steps()
        assert (await job.phase())[1] == (await other.phase())[1] == 1
        for one in (job, other):
            one.let_end()
            await one.until_phase("SUCCEEDED")


def test_up_keeps_keys_to_its_workers_where_they_are_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = base64.b64encode(os.urandom(32)).decode()
    folder, secret = tmp_path / "up", tmp_path / "secret"
    folder.mkdir()
    secret.touch(mode=0o600)
    secret.write_text(SECRET)
    (folder / "train.py").write_text(PROGRAM.replace('os.environ["FILED"]', '""'))
    command = ["python3", "-S", "train.py"]
    job = {"name": "kept", "command": command, "secrets": {"TOKEN": {"file": str(secret)}}}
    (folder / "job.yaml").write_text(json.dumps(job))
    monkeypatch.setenv(KEYRING_VARIABLE, f"first:{key}")
    monkeypatch.setenv("RELAUNCH_ENCRYPTION_KEY", "first")
    monkeypatch.setenv("RELAUNCH_ENCRYPTION_REQUIRED", "true")
    output = ""

    def order(*words: str) -> str:
        nonlocal output
        words = (sys.executable, str(ROOT / "starter.py"), *words)
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
        output += done.stdout + done.stderr
        assert "no such command" not in done.stderr
        return done.stdout

    def await_output(expected: str, *words: str) -> None:
        deadline = time.monotonic() + 240
        while expected not in order(*words):
            assert time.monotonic() < deadline, output
            time.sleep(0.2)

    words = [sys.executable, str(ROOT / "starter.py"), "up", "--port", "0", "--ui-port", "0"]
    with (
        (tmp_path / "up.log").open("w") as log,
        subprocess.Popen(words, cwd=folder, stdout=log, stderr=log, start_new_session=True) as up,
    ):
        try:
            await_output("no jobs", "jobs")
            order("submit", "job.yaml")
            await_output("[redacted TOKEN]", "logs", "kept")
            (folder / "fail").touch()
            await_output('"generation": 2', "show", "kept", "--json")
            await_output("[redacted TOKEN]", "history", "kept", "--json")
            found = {text: find_in_processes(text) for text in (SECRET, key)}
            assert found[SECRET] == []
            # Those of a test run have it, too: their environment is that of this process.
            others = ("relaunch-", "temporal", "session", "train.py")
            assert [one for one in found[key] if any(word in one for word in others)] == []
            order("cancel", "kept", "--reason", "done")
            await_output("CANCELLED", "jobs", "--json")
        finally:
            os.killpg(up.pid, signal.SIGTERM)
            up.wait(60)
    files = [path for path in folder.rglob("*") if path.is_file()]
    logs = [path for path in files if path.match("jobs/*/*/logs/rank_*.log")]
    assert logs and find([SECRET, key], {*files, tmp_path / "up.log"} - {*logs}) == set()
    assert find([PLANTED["exception"]], folder.rglob("temporal.db*")) == set()
    assert SECRET not in output and key not in output
