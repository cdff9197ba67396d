"""Examining container instances by tasks on them: reports of a node, and reasons for none."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from relaunch.backends.base import Refusal, Unreachable
from relaunch.backends.ecs import examine as node_tasks_module
from relaunch.backends.ecs.occupants import node_task
from relaunch.backends.ecs.tasks import build_started_by
from relaunch.evidence.findings import Verdict
from relaunch.generation import Token
from relaunch.spec.fleet import EcsOptions
from tests.backends.ecs_site import (
    CHECKED,
    REPAIR,
    Make,
    Site,
    add_worker,
    aws,
    eventually,
    make,
    nothing_told,
    real,
)
from tests.recovery.nodes import FAULTY, PASS

__all__ = ["aws", "make", "nothing_told", "real"]


# --- what a node tells of itself


async def test_a_task_on_the_node_tells_how_it_is(make: Make) -> None:
    site = make()
    job = Token("default", "ll_m.a", 17, 3)
    site.double.script("train", after=None)
    await site.run(build_started_by(job))
    await site.run("ecs-svc/123", "train")
    await site.run("airflow", "train")
    facts = await site.probe()
    assert facts["boot_id"].endswith(f"+{site.instance.boot_id}")
    assert facts["jobs"][0] == {
        "namespace": "default",
        "job": "ll_m.a",
        "submission": 17,
        "generation": 3,
    }
    assert len(facts["jobs"]) == 2 and facts["jobs"][1]["job"].endswith(" of airflow"), (
        "services come and go with the machine"
    )
    assert (facts["held"], facts["reboots"], facts["ecs_gpus"], facts["ecs_health"]) == (
        None,
        [],
        8,
        "",
    )
    health = site.health(facts, None)
    assert (
        health.boot_id == facts["boot_id"] and "disk" in health.examined and len(health.busy) == 2
    )


def scripted(
    site: Site, answer: Any, exit_code: int | None = 0, parts: int = 1, **more: Any
) -> None:
    text = answer if isinstance(answer, str) else json.dumps(answer)
    size = -(-len(text) // parts)
    lines = [
        f"relaunch-answer {n + 1}/{parts}: {text[n * size : (n + 1) * size]}" for n in range(parts)
    ]
    site.double.script(
        "node", exit_code=exit_code, stdout=["a warning", *lines] if text else [], **more
    )


async def test_an_answer_in_parts_is_joined_and_unread_parts_stay_so(
    make: Make,
) -> None:
    site = make()
    site.instance.health("IMPAIRED")
    scripted(
        site,
        {
            "outcome": "done",
            "boot_id": "b1",
            "reboots": {"unreadable": "broken"},
            "jobs": [],
            "held": None,
        },
        parts=3,
    )
    facts = await site.probe()
    assert (facts["boot_id"], facts["jobs"], facts["reboots"]) == (
        "b1",
        [],
        {"unreadable": "broken"},
    )
    assert any("IMPAIRED" in one.reason for one in site.health(facts, None).findings)


@pytest.mark.parametrize(
    ("answer", "code", "more", "words"),
    [
        ("", 0, {}, "left no answer in log group /relaunch/node"),
        pytest.param('{"outcome": "do', 0, {}, "left no answer", marks=pytest.mark.long),
        (
            {"outcome": "refused", "reason": "the state folder belongs to uid 7"},
            3,
            {},
            "could not: the state folder belongs to uid 7",
        ),
        (
            "",
            None,
            {"stop_code": "TaskFailedToStart", "reason": "CannotPullContainerError: no such image"},
            "no such image",
        ),
    ],
)
async def test_a_probe_without_an_answer_is_no_news_about_the_node(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    answer: Any,
    code: int | None,
    more: dict[str, Any],
    words: str,
) -> None:
    monkeypatch.setattr(node_tasks_module, "LOG_TIMEOUT", 0.3)
    site = make()
    scripted(site, answer, code, **more)
    with pytest.raises(Unreachable, match=words):
        await site.probe()


@pytest.mark.long
async def test_a_repeated_call_waits_for_the_task_that_pulls_its_image(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make()
    monkeypatch.setattr(node_tasks_module, "PLACEMENT_TIMEOUT", 0.3)
    scripted(site, {"outcome": "done", "boot_id": "b1", "jobs": [], "reboots": []}, after=5.0)
    with pytest.raises(Unreachable, match="has not ended in time"):
        await site.tasks.probe(site.ec2_id, "n1", 0.2, None)
    monkeypatch.setattr(node_tasks_module, "PLACEMENT_TIMEOUT", 20.0)
    assert (await add_worker(site).probe())["boot_id"] == "b1"
    assert (
        sum(one["containerInstanceArn"] == site.instance.arn for one in site.double.tasks("node"))
        == 1
    )


async def test_a_node_that_cannot_be_asked_says_what_to_do(make: Make) -> None:
    nothing = make(EcsOptions(cluster="training"))
    with pytest.raises(Unreachable, match=r"set ecs\.node_task in the fleet file"):
        await nothing.probe()
    assert (await nothing.diagnose()).why == "cannot_start"
    away = make()
    away.instance.disconnect()
    with pytest.raises(Unreachable, match="is not connected"):
        await away.probe()
    no_log = make(EcsOptions(cluster="training", node_task="check"))
    with pytest.raises(Unreachable, match="awslogs"):
        await no_log.probe()
    with pytest.raises(Unreachable, match="no container instance of ECS cluster training is i-0"):
        await no_log.tasks.probe("i-0123456789abcdef0", "n1", 1.0, None)


# --- examinations: S1.3, S1.5


async def test_s1_3_only_the_node_that_is_asked_about_is_examined(make: Make) -> None:
    """The reference examined the node of the job's first task, whichever had failed."""
    first, failing = make(dcgmi=PASS), make(dcgmi=FAULTY, exit_code=226)
    healthy, faulty = await asyncio.gather(first.diagnose(), failing.diagnose())
    assert (healthy["stdout"], faulty["stdout"], faulty["exit_code"]) == (PASS, FAULTY, 226)
    facts = {"outcome": "done", "boot_id": faulty["boot_id"]}
    assert failing.health(facts, faulty).verdict is Verdict.UNHEALTHY
    assert [len(site.examinations()) for site in (first, failing)] == [1, 1]
    override = failing.examinations()[0]["overrides"]["containerOverrides"][0]
    assert override["resourceRequirements"] == [{"type": "GPU", "value": "8"}], (
        "no other task computes meanwhile"
    )


async def test_s1_3_an_examination_waits_for_gpus_of_stopping_ranks(
    make: Make,
) -> None:
    """The reference started it right after StopTask, logged RESOURCE:GPU, and waited for ever."""
    site = make(CHECKED)
    site.double.script("train", after=None, stubborn=True)
    site.double.script("check", exit_code=0)
    rank = await site.run(build_started_by(Token("default", "j", 1, 1)), gpus=8)
    await eventually(
        lambda: any(one["taskArn"] == rank for one in site.double.tasks(status="RUNNING"))
    )
    await site.cluster.stop(rank, "relaunch: default/j/1/1")
    assert (await site.diagnose())["contract"] == "healthy"
    assert site.count_requests("StopTask") == 0 and len(site.examinations()) == 1


async def test_s1_3_gpus_that_are_never_free_are_called_busy_in_time(make: Make) -> None:
    site = make(CHECKED)
    site.double.script("train", after=None)
    await site.run("airflow", gpus=1)
    answer = await site.diagnose(within=0.5)
    assert isinstance(answer, Refusal) and answer.why == "busy" and "RESOURCE:GPU" in answer.reason


async def test_s1_6_an_examination_of_a_dead_worker_is_found_untagged(
    make: Make,
) -> None:
    """The reference lost what it had started.

    It asked for its tags, and they go with StopTask.
    """
    site = make(CHECKED)
    site.double.script("check", after=3.0, exit_code=1)  # it goes on while three ask about it
    dead = add_worker(site)
    dead.cluster.stop = _nothing  # type: ignore[assignment]
    working = asyncio.create_task(dead.diagnose())
    await eventually(site.examinations)
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    other = add_worker(site)
    same, another, facts = await asyncio.gather(
        other.diagnose(), other.diagnose(id="repair/other"), other.probe()
    )
    assert (same["contract"], another.why, another.held_by) == ("faulty", "held", REPAIR)
    assert facts["held"] == {"by": "diagnose", "id": REPAIR}
    assert len(site.examinations()) == 1


async def _nothing(*_: Any) -> None:
    """A worker that is killed stops nothing."""


async def test_an_examination_that_is_not_wanted_any_more_is_stopped(make: Make) -> None:
    site = make(CHECKED)
    site.double.script("check", after=None)
    working = asyncio.create_task(site.diagnose())
    await eventually(lambda: any(one["lastStatus"] == "RUNNING" for one in site.examinations()))
    # It has its answer to RunTask, and waits for the end.
    looks = site.double.calls["DescribeTasks"]
    await eventually(lambda: site.double.calls["DescribeTasks"] > looks)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    await eventually(lambda: site.examinations()[0]["lastStatus"] == "STOPPED")
    late = make(CHECKED)
    answer = await late.diagnose(within=0.6)
    assert answer["contract"] == "inconclusive" and "within 0.6 s" in answer["reason"]
    await eventually(lambda: late.examinations()[0]["lastStatus"] == "STOPPED")


@pytest.mark.parametrize(
    ("code", "verdict", "why"),
    [
        (0, Verdict.HEALTHY, "its health check: nothing found"),
        (1, Verdict.UNHEALTHY, "exit code 1"),
        (226, Verdict.UNKNOWN, "exit code 226"),
        (None, Verdict.UNKNOWN, "no such image"),
    ],
)
async def test_s1_5_a_users_own_health_check_is_judged_by_exit_code(
    make: Make, code: int | None, verdict: Verdict, why: str
) -> None:
    site = make(CHECKED)
    failed = (
        {"stop_code": "TaskFailedToStart", "reason": "CannotPullContainerError: no such image"}
        if code is None
        else {}
    )
    site.double.script("check", exit_code=code, **failed)
    facts, diag = await asyncio.gather(site.probe(), site.diagnose())
    health = site.health(facts, diag, gpus=8)
    assert (health.verdict, why in health.reason) == (verdict, True), health.reason
    assert (health.busy, health.working) == ((), 8) or health.held == REPAIR


@pytest.mark.parametrize(
    ("code", "verdict"),
    [(0, Verdict.HEALTHY), (1, Verdict.UNKNOWN), (3, Verdict.UNKNOWN)],
)
async def test_s1_5_a_fault_of_the_agents_task_needs_its_answer(
    make: Make, monkeypatch: pytest.MonkeyPatch, code: int, verdict: Verdict
) -> None:
    """Python ends with 1 where the agent crashes, which says nothing about the GPUs."""
    monkeypatch.setattr(node_tasks_module, "LOG_TIMEOUT", 0.3)
    site = make()
    facts = await site.probe()
    site.double.script("node", exit_code=code, stdout=["MemoryError"])
    answer = await site.diagnose()
    assert answer["exit_code"] == code
    assert site.health(facts, answer, gpus=0).verdict is verdict


def test_the_id_of_an_examination_is_in_startedby_if_it_fits() -> None:
    assert (
        node_task("diagnose", "repair/a_b/n.1/7d4e")
        == "relaunch-node/diagnose/repair/a__b/n_d1/7d4e"
    )
    for odd in ("r" * 200, "with a space"):
        assert len(node_task("diagnose", odd)) <= 128 and node_task("diagnose", odd) == node_task(
            "diagnose", odd
        ) != node_task("diagnose", "r")
