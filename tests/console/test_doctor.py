"""What `relaunch doctor` says of workers: their fleet files, and the dead man's switches."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from relaunch.builds import Build, Builds, RunningWorkflow
from relaunch.cli import doctor, worker_status
from relaunch.cli.doctor import (
    examine_files,
    examine_heartbeats,
    examine_routes,
    examine_rules,
)
from relaunch.cli.upgrade import PendingTask
from relaunch.config import Settings
from relaunch.messages.workers import HeartbeatStatus, UnusableFile, WorkerStatus
from relaunch.worker import make_fleets

NOW = datetime(2026, 11, 26, 3, 12, tzinfo=UTC)
RUNS = {"fleet/lab"}
REASON = "lab.yaml:9: nodes.2.gpus: expected a number (got 'x')"


class Server:
    """Two workers that poll; each question is answered by the next of those in `answers`."""

    namespace = "default"

    def __init__(self, *answers: str | Exception) -> None:
        self.answers, self.asked = answers, 0
        self.workflow_service = self

    async def describe_task_queue(self, request: Any) -> Any:
        seen = Timestamp()
        seen.FromDatetime(datetime.now(UTC))
        return SimpleNamespace(
            pollers=[SimpleNamespace(identity=one, last_access_time=seen) for one in ("1@a", "1@b")]
        )

    async def execute_activity(self, name: str, **options: Any) -> WorkerStatus:
        answer = self.answers[self.asked % len(self.answers)]
        self.asked += 1
        if isinstance(answer, Exception):
            raise answer
        return WorkerStatus(answer)


def switch(**changes: Any) -> WorkerStatus:
    known = {"fleet": "lab", "name": "hc-ping.com", **changes}
    return WorkerStatus("1@a", heartbeats=(HeartbeatStatus(**known),))


async def ask(server: Server) -> list[str]:
    statuses = await worker_status.read_statuses(cast(Client, server), "relaunch")
    return [one.worker for one in statuses]


async def test_workers_are_asked_until_all_are_heard() -> None:
    server = Server(*["1@a"] * 8, "1@b")
    assert await ask(server) == ["1@a", "1@b"]
    assert server.asked == 16, "two rounds"
    silent = Server("1@a")
    assert await ask(silent) == ["1@a"], "a worker that has ended never answers"
    assert silent.asked == 8 * worker_status.MAX_ROUNDS


async def test_a_server_without_such_activities_asks_no_worker() -> None:
    refused = RPCError("Standalone activity is disabled", RPCStatusCode.UNIMPLEMENTED, b"")
    assert await ask(Server(refused)) == []
    with pytest.raises(RPCError):
        await ask(Server(RPCError("away", RPCStatusCode.UNAVAILABLE, b"")))


async def test_builds_are_named_in_what_a_failing_workflow_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a rollback the build before is the one that was just left."""
    week = timedelta(days=7)
    old, new = Build("0.1.0", False, NOW - week, NOW), Build("0.2.0", True, NOW, NOW)
    upgraded = Builds((old, new))
    returned = Builds((replace(old, is_current=True), replace(new, is_current=False)))

    async def advise(kind: str, build: str, builds: Builds) -> str:
        async def read_task(client: Client, workflow: RunningWorkflow) -> PendingTask:
            return PendingTask(2, NOW, build)

        async def read_failure(client: Client, workflow: RunningWorkflow) -> str:
            return "a bug"

        monkeypatch.setattr(doctor, "read_task", read_task)
        monkeypatch.setattr(doctor, "read_task_failure", read_failure)
        failing = RunningWorkflow("a/b", "r1", kind)
        check = await doctor._examine_task(cast(Client, None), failing, builds, NOW)
        assert check is not None
        return check.action

    release = "install a release that continues it"
    before = "returns to the build that was current before 0.2.0"
    back = f"`relaunch rollback 0.1.0` {before}, or {release}"
    assert await advise("TrainingJob", "0.2.0", upgraded) == f"its ranks run on unwatched; {back}"
    assert await advise("Fleet", "", upgraded) == back
    moved = f"`relaunch rollback 0.1.0` tries again to move it there from 0.2.0, or {release}"
    assert await advise("Fleet", "0.2.0", returned) == moved
    assert await advise("NodeRepair", "0.2.0", Builds((new,))) == release
    assert await advise("Notifier", "", Builds()) == release


def test_files_are_named_once_with_the_workers_concerned() -> None:
    wrong = (UnusableFile(REASON, "lab"),)
    (served,) = examine_files([WorkerStatus("1@a", wrong), WorkerStatus("1@b", wrong)])
    assert served.text.startswith(f"{REASON}; fleet lab is served by its last good content")
    assert "worker 1@a, 1@b" in served.text and "within a minute" in served.action
    (left_out,) = examine_files([WorkerStatus("1@a", (UnusableFile(REASON),))])
    assert "not served" in left_out.text and "restart" in left_out.action
    (well,) = examine_files([WorkerStatus("1@a"), WorkerStatus("1@b")])
    assert well.action == "" and "1@a, 1@b" in well.text
    (unknown,) = examine_files([])
    assert unknown.action == "" and "no worker says" in unknown.text


def test_a_dead_mans_switch_is_well_failing_or_without_a_fleet() -> None:
    (well,) = examine_heartbeats([switch(accepted_at=NOW), switch()], RUNS)
    assert (well.subject, well.action) == ("fleet/lab", "")
    assert well.text.endswith("(hc-ping.com) was last requested at 2026-11-26 03:12 UTC")
    failing = switch(
        accepted_at=NOW - timedelta(hours=1), failing_since=NOW, reason="hc-ping.com: no"
    )
    (broken,) = examine_heartbeats([switch(), failing], RUNS)
    assert "not requested since 2026-11-26 03:12 UTC: hc-ping.com: no" in broken.text
    assert broken.action
    (idle,) = examine_heartbeats([switch()], set())
    assert "the fleet does not run" in idle.text
    assert idle.action == "`relaunch nodes list --fleet lab` starts it"
    assert examine_heartbeats([WorkerStatus("1@a")], RUNS) == []


def test_a_worker_without_the_rules_of_a_fleet_is_named() -> None:
    old, knows = WorkerStatus("1@old"), WorkerStatus("1@a", rules={"gpus": "d1", "lab": ""})
    assert examine_rules([old, knows, WorkerStatus("1@b", rules={"gpus": "d1"})]) == []
    for other in ({}, {"gpus": ""}, {"lab": ""}):
        (found,) = examine_rules([knows, WorkerStatus("1@b", rules=other), old])
        assert found.subject == "access of gpus" and found.action
        assert "not known to worker 1@b: it takes every order" in found.text
    (found,) = examine_rules([knows, WorkerStatus("1@b", rules={"gpus": "d2"})])
    assert "differ" in found.text


def test_matters_that_no_channel_takes_are_named(tmp_path: Path) -> None:
    """Only what is critical needs an action; old workers say nothing."""
    address = "apprise: 'a://b'"
    team = f"{{{address}, jobs: ['llama-*']}}"
    channels = {
        "all": f"notify: [{{{address}}}]",
        "grave": f"notify: [{{{address}, severities: [critical, warning]}}]",
        "team": f"notify: [{team}, {{{address}, events: [breaker, quarantine], causes: [HANG]}}]",
        "later": f"notify: [{{{address}, events: [breaker]}}, {{{address}, from_reminder: 1}}]",
        "none": "",
    }
    files = []
    for name, notify in channels.items():
        files.append(tmp_path / f"{name}.yaml")
        nodes = "nodes: [{name: a, address: localhost}]"
        files[-1].write_text(f"name: {name}\nbackend: local\n{nodes}\n{notify}\n")
    untaken = make_fleets(Settings(state=tmp_path / "state", fleets=tuple(files))).list_untaken()
    found = examine_routes([WorkerStatus("1@old"), WorkerStatus("1@a", untaken=untaken)])
    grave, later, none, some = found
    names = ("grave", "later", "none", "team")
    assert [one.subject for one in found] == [f"channels of {x}" for x in names]
    assert later.action and later.text == (
        "no channel takes question, waiting before people are reminded; failed, quarantine,"
        " slow_node"
    )
    assert (grave.text, grave.action) == ("no channel takes slow_node", "")
    assert "it has none" in none.text and not none.action
    assert some.action and some.text == (
        "no channel takes question of jobs other than llama-*, and of repairs that no job has"
        " ordered; failed, waiting, slow_node of jobs other than llama-*; quarantine with a cause"
        " other than HANG"
    )


def test_a_digest_of_rules_is_that_of_their_meaning(tmp_path: Path) -> None:
    people = ("a: {role: admin}", "b: {role: operator}")
    files = []
    for number, order in enumerate((people, people[::-1], people[:1], ())):
        access = "access: {people: {" + ", ".join(order) + "}}\n" if order else ""
        files.append(tmp_path / f"{number}.yaml")
        head = f"name: f{number}\nbackend: local\nnodes: [{{name: n1, address: 127.0.0.1}}]\n"
        files[-1].write_text(head + access)
    rules = make_fleets(Settings(state=tmp_path / "state", fleets=tuple(files))).list_rules()
    assert rules["f0"] == rules["f1"] != rules["f2"] != "" == rules["f3"]
