"""A node that imports ahead for a job that has not come to it yet."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from real_node import Node, expect_done, is_alive, read_name, refusal, token, wait_for
from test_warm import COMMAND, SCRIPT, await_ready, await_standby, begin, count_ranks

from relaunch.agent.ranks import standby

Json = dict[str, Any]


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAUNCH_WARM_DELAY", "0")


@pytest.fixture
def job(tmp_path: Path) -> Json:
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    return {
        "workdir": str(folder),
        "env": {"A": "1"},
        "rank_env": [{"RANK": "0"}, {"RANK": "1"}],
        "warm": ["json", "decimal"],
    }


def warm(node: Node, job: Json, generation: int = 1, **more: Any) -> Json | None:
    given = {"token": token(generation), "command": COMMAND, "keep": 60.0, **job, **more}
    return node.order("warm", **given)


def has_ended(waiting: Json) -> bool:
    return not is_alive(waiting["pid"]) and not is_alive(waiting["python"])


def list_folders(node: Node) -> list[str]:
    return [path.name for path in (node.state / "jobs").glob("*")]


def test_the_first_generation_on_a_spare_is_forked(node: Node, job: Json) -> None:
    assert expect_done(warm(node, job))["state"] in ("waiting", "importing")
    waiting = await_standby(node)
    again = warm(node, job, generation=6, keep=3000.0)  # longer than a test waits
    assert expect_done(again)["state"] == "ready"
    assert await_standby(node)["pid"] == waiting["pid"]
    [listed] = expect_done(node.order("list"))["warm"]
    assert (listed["job"], listed["modules"]) == ("j", ["json", "decimal"])
    assert listed["bytes"] > 1 << 20
    assert expect_done(node.order("list"))["jobs"] == [], "it is no generation"
    assert count_ranks(node) == 1  # its command line is that of the ranks
    seventh = begin(node, 7, COMMAND, **job)
    assert seventh["warm"] == {"forked": True, "reason": ""}
    wait_for(lambda: "True ran" in node.log(0, 7) and "True ran" in node.log(1, 7))
    assert node.pid("shim", 7) == waiting["pid"]
    # it is the generation's from now on: a late order, and a repeated one, change nothing
    after = await_standby(node)
    for generation in (6, 7):
        assert refusal(warm(node, job, generation)) == "not_above"
    assert is_alive(after["pid"])
    os.kill(node.pid("shim", 7), signal.SIGKILL)
    wait_for(lambda: has_ended(after), "an order of before keeps it alive")


def test_a_spare_that_is_not_asked_again_forgets_the_job(node: Node, job: Json) -> None:
    expect_done(warm(node, job))
    waiting = await_standby(node)
    expect_done(warm(node, job, keep=0.001))
    wait_for(lambda: has_ended(waiting))
    wait_for(lambda: list_folders(node) == [])
    assert expect_done(node.order("list"))["warm"] == []


@pytest.mark.long
def test_whatever_a_node_is_used_for_comes_first(node: Node, job: Json) -> None:
    expect_done(warm(node, job))
    waiting = await_standby(node)
    other = {"token": {**token(1), "job": "other"}}
    prepared = expect_done(node.prepare(1, **other))
    begun = node.start(1, ["sleep", "1000"], prepared=prepared["stamp"], **other)
    pids = expect_done(begun)["pids"]
    assert refusal(warm(node, job)) == "busy"
    wait_for(lambda: has_ended(waiting))
    assert all(map(is_alive, pids.values()))
    expect_done(node.stop(1, **other))
    expect_done(warm(node, job))
    wait_for(lambda: expect_done(node.order("list"))["warm"][0]["state"] == "ready")


@pytest.mark.long
def test_a_spare_is_examined_without_it(
    node: Node, job: Json, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one whose standby is busy with a Python that does not start."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "dcgmi").write_text(f"#!/bin/sh\nwhile [ ! -e {tools}/go ]; do sleep 0.01; done\n")
    (tools / "python3").write_text("#!/bin/sh\nexec sleep 1000\n")
    for path in tools.iterdir():
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    expect_done(warm(node, job, command=[str(tools / "python3"), "train.py"]))
    examining = node.begin("diagnose", id="d1", level=1, within=60.0)
    wait_for(lambda: expect_done(node.order("list"))["held"] is not None)
    wait_for(lambda: "relaunch-warm" not in map(read_name, node.list_leftovers()))
    assert not (tools / "go").exists(), "it ended with the examination"
    assert refusal(warm(node, job)) == "held"
    (tools / "go").touch()
    examining.read_rest()
    expect_done(warm(node, job))
    await_standby(node)


@pytest.mark.long
def test_a_spare_has_few_of_them(node: Node, job: Json) -> None:
    for number in range(standby.MAX_ON_SPARE):
        expect_done(warm(node, job, token={**token(1), "job": f"j{number}"}))
    refused = warm(node, job)
    assert refusal(refused) == "busy"
    assert "j0, j1, j2, j3" in str(refused)
    expect_done(warm(node, job, token={**token(1), "job": "j1"}))


@pytest.mark.long
def test_what_cannot_be_imported_is_not_tried_again(node: Node, job: Json) -> None:
    more = {**job, "warm": ["no_such_module"]}
    expect_done(warm(node, more))
    cold = await_standby(node, "cold")
    answer = expect_done(warm(node, more))
    assert answer["state"] == "cold"
    assert "no_such_module cannot be imported" in answer["reason"]
    assert await_standby(node, "cold")["pid"] == cold["pid"]
    first = begin(node, 1, COMMAND, **more)
    assert "no_such_module cannot be imported" in first["warm"]["reason"]
    wait_for(lambda: not is_alive(cold["pid"]))


def test_a_spare_pauses_after_a_python_that_was_killed(node: Node, job: Json) -> None:
    """Orders come every 30 s; a launch starts another at once."""
    folder = Path(job["workdir"])
    (folder / "large.py").write_text(
        "import os\nif not os.path.exists('go'):\n    os.kill(os.getpid(), 9)\n"
    )
    more = {**job, "env": {"PYTHONPATH": str(folder)}, "warm": ["large"]}
    expect_done(warm(node, more))
    ended = await_standby(node, "ended")
    answer = expect_done(warm(node, more))
    assert answer["state"] == "ended"
    assert answer["reason"] == "its Python was killed by SIGKILL"
    assert await_standby(node, "ended")["pid"] == ended["pid"]
    assert is_alive(ended["pid"])
    (folder / "go").touch()
    assert not begin(node, 1, COMMAND, **more)["warm"]["forked"]
    await_ready(node)
    assert not is_alive(ended["pid"])
    assert begin(node, 2, COMMAND, **more)["warm"]["forked"]


def test_a_spare_tells_no_value_of_a_secret(node: Node, job: Json) -> None:
    (Path(job["workdir"]) / "logs_in.py").write_text(
        "import os\nraise RuntimeError(os.environ['TOKEN'])\n"
    )
    env = {"TOKEN": "t0ken-0123456789", "PYTHONPATH": job["workdir"]}
    more = {**job, "env": env, "warm": ["logs_in"]}
    expected = "logs_in cannot be imported (RuntimeError: [redacted TOKEN])"
    expect_done(warm(node, more))
    assert "t0ken-0123456789" in await_standby(node, "cold")["reason"]
    assert expect_done(warm(node, more, redact=["TOKEN"]))["reason"] == expected


@pytest.mark.long
def test_a_job_that_imports_nothing_ahead_any_more_starts_cold(node: Node, job: Json) -> None:
    expect_done(warm(node, job))
    await_standby(node)
    first = begin(node, 1, COMMAND, **{**job, "warm": []})
    assert first["warm"]["reason"] == "the modules to import ahead are others now"
    wait_for(lambda: "False ran" in node.log(0) and "False ran" in node.log(1))


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("victim", ["python", "pid"])
def test_a_spare_whose_standby_fails_starts_from_nothing(
    node: Node, job: Json, victim: str, number: signal.Signals
) -> None:
    expect_done(warm(node, job))
    waiting = await_standby(node)
    os.kill(waiting[victim], number)
    first = begin(node, 1, COMMAND, **job)
    assert not first.get("warm", {"forked": False})["forked"]
    wait_for(lambda: "ran" in node.log(0, 1) and "ran" in node.log(1, 1))
    assert node.log(0, 1).count("ran") == node.log(1, 1).count("ran") == 1
    wait_for(lambda: not is_alive(waiting[victim]))


@pytest.mark.long
@pytest.mark.parametrize(
    "point", ["warm.wanted", "standby.recorded", "prepare.reserved", "prepare.taken", "warm.forked"]
)
def test_an_agent_killed_on_the_way_leaves_no_rank_twice(node: Node, job: Json, point: str) -> None:
    if point in ("warm.wanted", "standby.recorded"):
        node.set_failpoint(point)
    warm(node, job)
    if not (node.state / "failpoints" / point).exists():
        wait_for(lambda: not (node.state / "failpoints" / point).exists())
    if point in ("prepare.reserved", "prepare.taken", "warm.forked"):
        await_standby(node)
        node.set_failpoint(point)
    with contextlib.suppress(AssertionError):
        begin(node, 1, COMMAND, **job)
    began = begin(node, 2, COMMAND, **job)
    wait_for(lambda: "ran" in node.log(0, 2) and "ran" in node.log(1, 2))
    assert node.log(0, 2).count("ran") == node.log(1, 2).count("ran") == 1
    assert all(map(is_alive, began["pids"].values()))
    waiting = await_standby(node)
    wait_for(lambda: count_ranks(node) == 3)  # two ranks, and the Python for the next ones
    expect_done(node.stop(2))
    wait_for(lambda: count_ranks(node) <= 1)
    assert waiting["pid"] not in began["pids"].values()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"warm": []}, "warm and rank_env are to have at least one entry each"),
        ({"command": []}, "command is []; expected a program and its arguments"),
        ({"keep": -1}, "keep is -1; expected a number of at least 0.001"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused(
    node: Node, job: Json, change: Json, expected: str
) -> None:
    refused = warm(node, job, **change)
    assert refusal(refused) == "bad_order"
    assert refused is not None
    assert refused["reason"] == expected
    assert list_folders(node) == []
