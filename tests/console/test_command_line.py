"""The command line as people use it: real processes, a real server, and a job workflow.

The workflow only remembers what it was sent.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion
from temporalio.common import SearchAttributePair, TypedSearchAttributes
from temporalio.worker import Worker

from relaunch.cli import environment, jobs
from relaunch.cli.client import PHASE
from relaunch.cli.submit import submit
from relaunch.config import ConfigError
from relaunch.messages.ids import TASK_QUEUE
from relaunch.temporal import ensure_namespace, find_running_up, read_start_time
from tests.console.commands import (
    ROOT,
    STARTER,
    Done,
    Place,
    bare_environment,
    one_sentence,
    starter,
)
from tests.console.fake_job import (
    T0,
    TRACEBACK,
    FakeTrainingJob,
    job_state,
    probe_nodes,
    read_incidents,
    read_logs,
)
from tests.pages import sections

DEADLINE = 120.0


@pytest.fixture
async def place(bare: Place) -> AsyncIterator[Place]:
    await ensure_namespace(bare.client)
    activities: list[Callable[..., Any]] = [read_logs, read_incidents, probe_nodes]
    async with Worker(
        bare.client, task_queue=TASK_QUEUE, workflows=[FakeTrainingJob], activities=activities
    ):
        yield bare


@pytest.mark.long_after(variants=4)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("submit", "job.yaml"), ("job.yaml:2: comand: ", "command")),
        (("submit", "none.yaml"), ("none.yaml",)),
        (("run", "--", "no-such-program"), ("'no-such-program'",)),
        (("run", "--nodes", "0", "--", "true"), ("--nodes: 0 ",)),
        (("run", "--name", "a/b", "--", "true"), ("--name: 'a/b'",)),
        (("run", "--policy", "harsh", "--", "true"), ("--policy: 'harsh'",)),
        (("show", "llama"), ("no server", "relaunch up")),
        (("up", "--port", "PORT"), ("port PORT", "--port")),
        (("up", "--ui-port", "PORT", "--port", "0"), ("port PORT", "--ui-port")),
        (("up", "--ip", "0.0.0.0"), ("--ip is '0.0.0.0'", "127.0.0.0/8", "TLS")),
        (("up", "--fleet", "job.yaml"), ("job.yaml:2: ", "comand")),
        (("up", "--state", "job.yaml/state"), ("state folder job.yaml/state",)),
        (("run", "--", "true"), ("state folder .relaunch/runs",)),
        (("policy", "check", "job.yaml"), ("job.yaml:1: ",)),
    ],
)
async def test_bad_input_is_one_sentence_and_nothing_starts(
    tmp_path: Path, words: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    (tmp_path / "job.yaml").write_text("name: a\ncomand: [b]\n")
    if words == ("run", "--", "true"):
        (tmp_path / ".relaunch").write_text("a file where the state folder should be")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = await starter(tmp_path, *(word.replace("PORT", port) for word in words))
        one_sentence(done, *(word.replace("PORT", port) for word in expected))
    assert not (tmp_path / ".relaunch" / "runs").exists()
    assert not list(tmp_path.rglob("temporal.db"))


async def test_a_server_that_does_not_answer_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    one_sentence(
        await starter(tmp_path, "jobs", TEMPORAL_ADDRESS=address),
        f"server at {address}",
    )


def test_any_python_starts_it(tmp_path: Path) -> None:
    outside = Path(os.path.realpath(sys.executable))
    for command in ([str(outside), STARTER], [STARTER]):
        process = subprocess.run(
            [*command, "policy", "presets"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env=bare_environment({}),
        )
        assert (process.returncode, process.stderr) == (0, "")
        assert "default" in process.stdout.split()


async def test_s5_2_a_job_is_submitted_shown_retried_and_cancelled(
    place: Place, page: SnapshotAssertion
) -> None:
    said: dict[str, str] = {}

    async def typed(*words: str) -> Done:
        done = await place.starter(*words)
        said[f"relaunch {' '.join(words)}"] = done.out + done.err
        return done

    job = place.write_job("llama")
    first = await typed("submit", job)
    assert (first.code, first.err) == (0, ""), first
    one_sentence(await place.starter("submit", job), "llama", "(RUNNING, generation 1)")

    view = json.loads((await place.starter("show", "llama", "--json")).out)
    assert (view["name"], view["phase"], view["nodes"]) == (
        "llama",
        "RUNNING",
        ["local-1", "local-2"],
    )
    next_ = json.loads((await place.starter("next", "llama", "--json")).out)
    assert next_.keys() == {"what", "at"} and next_["at"] is None
    await typed("next", "llama")

    assert (await typed("retry", "llama", "--avoid", "local-2", "--reason", "slow")).code == 0
    alive = await typed("nodes", "declare-dead", "local-2", "--reason", "unplugged")
    one_sentence(alive, "local-2", "llama", "--force")
    for reason in ("", "  "):
        one_sentence(
            await place.starter("nodes", "declare-dead", "local-2", "--reason", reason, "--force"),
            "--reason",
        )
    declared = await typed("nodes", "declare-dead", "local-2", "--reason", "unplugged", "--force")
    assert (declared.code, "llama" in declared.out) == (0, True), declared
    one_sentence(await typed("nodes", "declare-dead", "n9", "--reason", "x"), "n9")
    now = await jobs.load_job(place.client, "llama")
    assert now.state is not None
    assert (now.state.generation, now.state.notices) == (
        2,
        ("['local-2']", "local-2 dead: unplugged"),
    )

    assert (await typed("cancel", "llama", "--reason", "enough")).code == 0
    followed = await place.starter("follow", "llama")
    assert followed.code == 143, followed
    assert "job llama CANCELLED: cancelled: enough" in followed.out.splitlines()
    assert "relaunch history llama" in followed.out.splitlines()[-2]
    one_sentence(await typed("cancel", "llama"), "llama", "(CANCELLED)")
    again = await typed("retry", "llama")
    assert (again.code, "(CANCELLED)" in again.out) == (0, True)
    assert sections(said) == page
    await place.client.get_workflow_handle("job/llama").terminate()


async def test_what_follows_a_job_prints_at_once_into_a_pipe(place: Place) -> None:
    job = place.write_job("llama")
    followers = []
    for words in (("submit", job, "--follow"), ("follow", "llama")):
        follower = await asyncio.create_subprocess_exec(
            sys.executable,
            STARTER,
            *words,
            cwd=place.folder,
            env=bare_environment({"TEMPORAL_ADDRESS": place.address}),
            stdout=subprocess.PIPE,
        )
        followers.append(follower)
        assert follower.stdout is not None
        while b"RUNNING" not in (line := await follower.stdout.readline()):
            assert line, "it ended"
    await place.starter("cancel", "llama", "--reason", "enough")
    for follower in followers:
        assert b"CANCELLED" in (await follower.communicate())[0]
        assert follower.returncode == 143


async def test_letters_that_a_locale_lacks_change_no_exit_code(place: Place) -> None:
    job = place.write_job("narrow", "exit", "3")
    done = await place.starter("submit", job, "--follow", PYTHONIOENCODING="ascii")
    assert (done.code, done.err, "\\u2026" in done.out) == (3, "", True), done


async def test_names_of_nothing_and_odd_names_are_one_sentence(place: Place) -> None:
    one_sentence(await place.starter("show", "missing"), "'missing'", "namespace default")
    one_sentence(await place.starter("cancel", "../x y"), "'../x y'")
    one_sentence(await place.starter("retry", "missing", "--avoid", "a b"), "node 'a b'")


async def test_run_prints_every_rank_and_exits_as_the_job_does(
    place: Place, page: SnapshotAssertion
) -> None:
    (place.folder / "exit").write_text("#!/bin/sh\n")
    (place.folder / "exit").chmod(0o755)
    variables = {
        "TEMPORAL_ADDRESS": place.address,
        "PATH": f"{place.folder}:{os.environ['PATH']}",
    }
    done = await starter(
        place.folder, "run", "--name", "seven", "--nproc", "2", "--", "exit", "7", **variables
    )
    assert done.code == 7, done
    assert sorted(done.out.splitlines()) == [
        f"[rank {r}] g1 rank {r} {word}" for r in (0, 1) for word in ("begins", "ends")
    ]
    assert "job seven FAILED" in done.err
    assert "may be on another machine: ranks get PATH" in done.err  # its worker is not `up`'s
    assert done.err[done.err.index("job seven FAILED") :] == page
    assert (
        await starter(place.folder, "run", "--name", "zero", "--", "exit", "0", **variables)
    ).code == 0

    listed = json.loads((await place.starter("jobs", "--json")).out)
    ended = {row["name"]: row["ended"] is not None for row in listed}
    assert ended["seven"] and ended["zero"]
    entries = json.loads((await place.starter("history", "seven", "--json")).out)
    assert [entry["cause"] for entry in entries] == ["APPLICATION"]
    assert TRACEBACK.splitlines()[-1] in (await place.starter("show", "seven")).out
    printed = await place.starter("logs", "seven", "--rank", "1")
    of_rank_1 = [line for line in done.out.splitlines() if line.startswith("[rank 1]")]
    assert printed.out.splitlines() == of_rank_1, printed
    one_sentence(
        await place.starter("logs", "seven", "--generation", "2"),
        "generation 2",
    )


@pytest.mark.long
async def test_a_report_of_a_job_of_an_older_release_is_unknown(place: Place) -> None:
    """The job of these tests keeps no ledger, and its history is not that of a job."""
    await place.starter("submit", place.write_job("older", "exit", "3"), "--follow")
    done = await place.starter("report", "older", "--json")
    view = json.loads(done.out)
    assert (view["wall"], view["unknown"], view["jobs"]) == (9, 9, ["older"]), done
    (sentence,) = view["missing"]
    assert "job older was run by an older release, so its time is unknown" in sentence
    written = await place.starter("report", "older", "--html", "older.html")
    assert (written.code, written.out) == (0, ""), written
    assert "0.0 % to 100.0 % effective" in (place.folder / "older.html").read_text()


@pytest.mark.long
async def test_jobs_of_a_period_are_reported_together(place: Place) -> None:
    for name in ("first", "second"):
        await place.starter("submit", place.write_job(name, "exit", "0"), "--follow")
    view = json.loads((await place.starter("report", "--since", "9999d", "--json")).out)
    assert {"first", "second"} <= set(view["jobs"])
    # Jobs of other tests on this server may be of the period, too; all say that they ran long ago.
    assert view["wall"] >= view["unknown"] >= 9 + 9


@pytest.mark.long_after(variants=2)
@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ((), ("expected either a job", "--fleet NAME")),
        (("llama", "--fleet", "default"), ("expected either a job",)),
        (("llama", "--checkpoint-cost", "soon"), ("--checkpoint-cost", "soon", "30s")),
        (("--since", "0s"), ("--since", "0s", "above 0")),
        (("--since", "800000d"), ("--since", "'800000d'", "at most 36500d")),
        (("llama", "--checkpoint-cost", "800000d"), ("--checkpoint-cost", "at most 36500d")),
        (("--fleet", "none"), ("no job of fleet 'none'", "relaunch jobs")),
        (("no-such-job",), ("no-such-job",)),
    ],
)
async def test_a_report_of_nothing_is_one_sentence(
    place: Place, words: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    one_sentence(await place.starter("report", *words), *parts)


async def test_a_report_of_jobs_that_no_worker_reads_says_so(bare: Place) -> None:
    await ensure_namespace(bare.client)
    for name in ("first", "second"):
        await bare.client.start_workflow(
            "TrainingJob", id=f"job/left-{name}", task_queue="none", memo={"fleet": "lonely"}
        )
    one_sentence(
        await bare.starter("report", "--fleet", "lonely"),
        "job left-second is left out: no worker answers",
        "; and 1 more",
    )


async def test_ctrl_c_cancels_the_job_and_run_ends_with_it(place: Place) -> None:
    process = subprocess.Popen(  # noqa: ASYNC220 - simple signals; reads are in a thread
        [sys.executable, STARTER, "run", "--name", "long", "--", "sleep", "1000"],
        cwd=place.folder,
        env=bare_environment({"TEMPORAL_ADDRESS": place.address}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while "submitted" not in (line := await asyncio.to_thread(process.stderr.readline)):
        assert line, "run ended before the job was submitted"
    while "RUNNING" not in await asyncio.to_thread(process.stderr.readline):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = await asyncio.to_thread(process.communicate, None, DEADLINE)
    assert process.returncode == 143
    assert "cancelling job long" in err and "job long CANCELLED" in err


async def test_a_terminated_job_is_called_so_by_each_command(place: Place) -> None:
    await place.starter("submit", place.write_job("llama"))
    assert (await jobs.load_job(place.client, "llama")).phase == "RUNNING"
    await place.client.get_workflow_handle("job/llama").terminate()
    one_sentence(
        await place.starter("cancel", "llama", "--reason", "enough"), "has ended (TERMINATED)"
    )
    shown = json.loads((await place.starter("show", "llama", "--json")).out)
    assert shown["phase"] == "TERMINATED"
    assert "was terminated in phase RUNNING" in shown["reason"]
    again = await place.starter("retry", "llama", "--reason", "by mistake")
    assert (again.code, "had ended (TERMINATED)" in again.out) == (0, True), again


async def test_without_a_worker_jobs_are_shown_from_result_or_memo(
    place: Place,
) -> None:
    await place.starter("submit", place.write_job("done", "exit", "0"), "--follow")
    now = await jobs.load_job(place.client, "done")
    assert (now.source, now.open, now.phase) == ("result", False, "SUCCEEDED")
    spec = now.state.spec.model_copy(update={"name": "orphan"}) if now.state else None
    assert spec is not None and now.state is not None
    await submit(place.client, "without-worker", spec, now.state.policy, reason="try")
    shown = await place.starter("show", "orphan", "--json")
    view = json.loads(shown.out)
    assert (view["phase"], view["reason"], view["source"]) == ("QUEUED", "try", "memo")
    with pytest.raises(ConfigError, match="orphan: no worker"):
        await jobs.incidents(place.client, TASK_QUEUE, await jobs.load_job(place.client, "orphan"))


async def test_an_order_that_no_worker_takes_is_said_to_wait(bare: Place) -> None:
    await ensure_namespace(bare.client)
    state = job_state(name="orphan")
    spec = state.spec.model_copy(update={"name": "orphan"})
    await submit(bare.client, "without-worker", spec, state.policy, has_fleet=True)
    for command in ("retry", "cancel"):
        done = await bare.starter(command, "orphan")
        assert (done.code, done.err) == (0, ""), done
        assert done.out.endswith(
            ", but no worker has confirmed it: it is done when one answers, so do not repeat it\n"
        ), done


async def test_jobs_says_when_a_job_was_submitted_not_continued(bare: Place) -> None:
    """A job of many events continues as new, and each run of it has the memo of the job."""
    await ensure_namespace(bare.client)
    begins = {"of-three-days": T0, "a-stranger": "x", "from-the-future": T0.replace(year=3000)}
    for name, begin in begins.items():
        number = int(begin.timestamp() * 1000) if isinstance(begin, datetime) else begin
        await bare.client.start_workflow(
            "TrainingJob", id=f"job/{name}", task_queue="none", memo={"submission": number}
        )
    listed = json.loads((await bare.starter("jobs", "--json")).out)
    assert [row["name"] for row in listed][-1] == "of-three-days", listed
    submitted = {row["name"]: datetime.fromisoformat(row["submitted"]) for row in listed}
    assert submitted["of-three-days"] == T0
    assert submitted["a-stranger"] < submitted["from-the-future"] < datetime.now(UTC)


async def test_a_job_is_one_line_in_a_pipe_however_long(bare: Place) -> None:
    await ensure_namespace(bare.client)
    name = f"pretraining-{'x' * 40}"
    await bare.client.start_workflow(
        "TrainingJob",
        id=f"job/{name}",
        task_queue="none",
        search_attributes=TypedSearchAttributes([SearchAttributePair(PHASE, "WAITING_FOR_PERSON")]),
    )
    done = await bare.starter("jobs")
    (line,) = (line for line in done.out.splitlines() if "WAITING_FOR_PERSON" in line)
    assert line.split()[:2] == [name, "WAITING_FOR_PERSON"]


@pytest.mark.long
async def test_a_job_is_answered_and_what_is_no_answer_is_one_sentence(place: Place) -> None:
    await place.starter("submit", place.write_job("asks"))
    taken = await place.starter(
        "answer", "asks", "snooze", "--within", "2h", "--reason", "breakfast"
    )
    assert (taken.code, taken.err) == (0, "") and "snooze" in taken.out, taken
    now = await jobs.load_job(place.client, "asks")
    assert now.state is not None
    assert now.state.notices == ("snooze 2:00:00: breakfast",)
    one_sentence(
        await place.starter("answer", "asks", "deny", "--reason", "x"),
        "asks nothing",
    )
    one_sentence(
        await place.starter("answer", "asks", "maybe", "--reason", "x"),
        "'maybe'",
        "approve, deny, snooze or take-over",
    )
    one_sentence(
        await place.starter("answer", "asks", "deny", "--within", "2h", "--reason", "x"),
        "--within 2h",
        "snooze",
    )
    one_sentence(
        await place.starter("answer", "asks", "snooze", "--within", "soon", "--reason", "x"),
        "within",
        "'soon'",
    )
    one_sentence(await place.starter("answer", "missing", "deny", "--reason", "x"), "missing")
    taken = await place.starter("answer", "asks", "deny", "--node", "n2", "--reason", "evaluation")
    assert (taken.code, taken.err) == (0, "") and "deny" in taken.out, taken
    now = await jobs.load_job(place.client, "asks")
    assert now.state is not None and now.state.notices[-1] == "deny n2: evaluation"
    one_sentence(
        await place.starter("answer", "asks", "snooze", "--node", "n2", "--reason", "x"),
        "--node n2",
        "approve",
    )
    one_sentence(
        await place.starter("answer", "asks", "deny", "--node", "n 2", "--reason", "x"),
        "node",
        "'n 2'",
    )


async def test_archived_incidents_come_before_those_still_held(place: Place) -> None:
    await place.starter("submit", place.write_job("done", "exit", "1"), "--follow")
    now = await jobs.load_job(place.client, "done")
    assert now.state is not None
    held = now.state
    from dataclasses import replace

    archived = replace(now, state=replace(held, incidents_archived=1))
    entries, missing = await jobs.incidents(place.client, TASK_QUEUE, archived)
    assert missing is None
    assert [(entry.opened, entry.closed is not None) for entry in entries] == [
        (T0 - timedelta(days=1), True),
        (T0, True),
    ]


def test_up_is_found_by_its_state_folder_and_ends_its_server(
    tmp_path: Path,
) -> None:
    command = [sys.executable, STARTER, "up", "--workers", "0", "--port", "0", "--ui-port", "0"]
    up = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=bare_environment({}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    state = tmp_path / ".relaunch"
    try:
        deadline = time.monotonic() + DEADLINE
        while find_running_up(state) is None:
            assert up.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        listed = subprocess.run(
            [sys.executable, STARTER, "jobs"],
            cwd=tmp_path,
            env=bare_environment({}),
            capture_output=True,
            text=True,
        )
        assert (listed.returncode, listed.stdout, listed.stderr) == (0, "no jobs\n", "")
        second = subprocess.run(
            command, cwd=tmp_path, env=bare_environment({}), capture_output=True, text=True
        )
        assert (second.returncode, "another `relaunch up`" in second.stderr) == (2, True)
        servers = children_of(up.pid)
        assert servers
        os.kill(servers[0], signal.SIGKILL)
        while not (again := [pid for pid in children_of(up.pid) if pid not in servers]):
            assert up.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        up.kill()
        up.wait()
    while any(read_start_time(pid) for pid in again):
        assert time.monotonic() < deadline, "the server outlived the `up` that was killed"
        time.sleep(0.02)
    assert find_running_up(state) is None


def children_of(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] not in b"ZX":
            found.append(int(folder.name))
    return found


async def test_environment_files_are_kept_as_long_as_their_jobs(place: Place) -> None:
    await place.starter("submit", place.write_job("known", "exit", "1"), "--follow")
    for job in ("known", "forgotten", "about-to-start", "no job"):
        folder = environment.write_file(place.folder, job, {"A": "1"}).parent
        if job != "about-to-start":
            os.utime(folder, (0, 0))
    await environment.remove_unknown(place.folder, place.client)
    left = {folder.name for folder in (place.folder / environment.FOLDER).iterdir()}
    assert left == {"known", "about-to-start", "no job"}


def test_files_of_jobs_that_had_their_own_server_expire(tmp_path: Path) -> None:
    for run in ("old", "new"):
        folder = environment.write_file(tmp_path / run, run, {"A": "1"}).parent
        if run == "old":
            os.utime(folder, (0, 0))
    environment.remove_expired(tmp_path)
    assert [path.parent.name for path in tmp_path.glob("*/env/*/*")] == ["new"]


async def test_the_namespace_is_ensured_twice_without_harm(place: Place) -> None:
    await ensure_namespace(place.client)


def test_the_command_line_imports_no_backends_and_no_activities() -> None:
    imported = ", ".join(
        f"relaunch.cli.{name}" for name in ("app", "run", "follow", "tables", "service")
    )
    code = f"import sys, {imported}; print(*sys.modules)"
    modules: Any = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    rooms = {".".join(name.split(".")[:2]) for name in modules}
    assert "relaunch.cli" in rooms
    assert not rooms & {
        "relaunch.backends",
        "relaunch.activities",
        "relaunch.agent",
        "relaunch.worker",
        "numpy",
        "boto3",
        "paramiko",
    }
