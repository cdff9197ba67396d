"""Processes that a rank started by sudo are another user's.

What cannot be ended keeps the node, and crashes nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_node import Node, expect_done, is_alive, read_name, refusal, token, wait_for

from relaunch.agent.ranks import cgroup
from relaunch.backends.py_spy import find_program

USER = 65534
"""The agent's. It owns nothing."""
SYSTEM_PYTHON = "/usr/bin/python3"
"""One that every user can run."""

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a program that becomes root"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed"),
    pytest.mark.skipif(not Path(SYSTEM_PYTHON).exists(), reason=f"there is no {SYSTEM_PYTHON}"),
]


class OrdinaryNode(Node):
    """A node whose agent is not root and whose ranks can become root.

    They do so by a set-uid program, as by sudo.
    """

    sudo: str


@pytest.fixture
def ordinary(agent: Path, request: pytest.FixtureRequest) -> Iterator[OrdinaryNode]:
    """The parameter: how /proc is mounted there, as an option of mount(8)."""
    # Not tmp_path: its parents are closed to other users.
    folder = Path(tempfile.mkdtemp(prefix="relaunch-user-"))
    folder.chmod(0o755)
    sudo = folder / "sudo"
    shutil.copy(str(shutil.which("setpriv")), sudo)
    sudo.chmod(0o4755)
    shutil.copy(agent, folder / "agent.pyz")
    (folder / "agent.pyz").chmod(0o644)
    (folder / "n1").mkdir(mode=0o700)
    os.chown(folder / "n1", USER, USER)
    words = [
        shutil.which("setpriv"),
        f"--reuid={USER}",
        f"--regid={USER}",
        "--clear-groups",
        SYSTEM_PYTHON,
    ]
    wrapper, command = folder / "python", f'exec {" ".join(map(str, words))} "$@"'
    if options := getattr(request, "param", ""):
        mount = f"mount -t proc -o {options} proc /proc"
        if subprocess.run(["unshare", "-m", "sh", "-c", mount], check=False).returncode:
            pytest.skip(f"/proc cannot be mounted with {options} here")
        command = f"exec unshare -m sh -c '{mount} && {command}' sh \"$@\""
    wrapper.write_text(f"#!/bin/sh\n{command}\n")
    wrapper.chmod(0o755)
    node = OrdinaryNode(folder / "n1", folder / "agent.pyz", interpreter=str(wrapper))
    node.sudo = f"{sudo} --reuid=0 --regid=0 --clear-groups"
    yield node
    node.kill_everything()
    shutil.rmtree(folder)


@pytest.fixture
def delegated(ordinary: OrdinaryNode) -> Iterator[OrdinaryNode]:
    """The same node in a control group that is its user's, as systemd delegates one."""
    own = cgroup._find_own()
    if own is None:
        pytest.skip("cgroup v2 is not mounted here")
    # Not `relaunch-…`: any launch on this machine removes those that are empty.
    folder = own / f"user-of-a-test-{os.getpid()}"
    try:
        folder.mkdir()
        os.chown(folder, USER, USER)
        for name in ("cgroup.procs", "cgroup.subtree_control", "cgroup.threads"):
            os.chown(folder / name, USER, USER)
    except OSError:
        pytest.skip("no control group can be made here")
    wrapper = Path(ordinary.interpreter)
    first, _, rest = wrapper.read_text().partition("\n")
    wrapper.write_text(f"{first}\necho $$ > {folder}/cgroup.procs\n{rest}")
    yield ordinary
    ordinary.kill_everything()
    for below in [*folder.glob("relaunch-*"), folder]:
        wait_for(lambda path=below: remove_folder(path), f"{below} is not empty")


def remove_folder(folder: Path) -> bool:
    cgroup.remove(str(folder))
    return not folder.exists()


def run_with_root_child(node: OrdinaryNode, way: str, **more: Any) -> tuple[dict[str, int], int]:
    """Start two ranks, the first of which starts a program as root.

    Return the ranks and that program.
    """
    mark = f"1000.{os.getpid()}"
    script = f'if [ "$R" = 0 ]; then {way} {node.sudo} sleep {mark} & fi; exec sleep 1000'
    pids = node.run(1, ["sh", "-c", script], rank_env=[{"R": "0"}, {"R": "1"}], **more)

    def find() -> int | None:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    if (
                        words[:2] == [b"sleep", mark.encode()]
                        and (entry / "stat").stat().st_uid == 0
                    ):
                        return int(entry.name)
                except OSError:
                    continue
        return None

    return pids, wait_for(find, "the rank starts no program as root")


def end(stray: int) -> None:
    os.kill(stray, signal.SIGKILL)
    wait_for(lambda: not is_alive(stray))


@pytest.mark.parametrize("way", ["", "setsid"])
def test_a_stop_is_refused_as_stuck_while_a_root_process_lives(
    ordinary: OrdinaryNode, way: str
) -> None:
    node = ordinary
    pids, stray = run_with_root_child(node, way)
    try:
        watch = node.watch()
        watch.read_until("heartbeat")
        shim = node.pid("shim")
        os.kill(pids["1"], signal.SIGTERM)  # one rank fails
        assert {watch.read_observation("RankExited")["rank"] for _ in pids} == {0, 1}
        for answer in (node.stop(stuck_after=0.5), node.prepare(2, stuck_after=0.5)):
            assert refusal(answer) == "stuck"
            assert answer is not None
            assert answer["pids"] == [stray]
            assert f"pid {stray} (root, sleep)" in answer["reason"]
        assert is_alive(shim), (
            "the shim knows what is below it: without it a program of root's cannot be found"
        )
        jobs = expect_done(node.order("probe", within=5.0, kernel_since=None))["jobs"]
        assert [job["generation"] for job in jobs] == [1], "the node reads free"
    finally:
        end(stray)
    expect_done(node.prepare(2))
    wait_for(lambda: not is_alive(shim))


@pytest.mark.parametrize("ordinary", ["hidepid=1", "hidepid=2"], indirect=True)
def test_a_process_that_proc_hides_ends_no_agent(ordinary: OrdinaryNode) -> None:
    node = ordinary
    pids, stray = run_with_root_child(node, "setsid", lease=60.0)
    try:
        watch = node.watch()
        watch.read_until("heartbeat")
        helpers = {role: node.pid(role) for role in ("shim", "guard", "supervisor")}
        os.kill(pids["1"], signal.SIGTERM)  # one rank fails
        assert {watch.read_observation("RankExited")["rank"] for _ in pids} == {0, 1}
        for answer in (node.stop(stuck_after=0.5), node.prepare(2, stuck_after=0.5)):
            assert refusal(answer) == "stuck"
            assert answer is not None
            assert answer["pids"] == [stray]
        assert {role: node.pid(role) for role in helpers} == helpers
        assert all(map(is_alive, helpers.values()))
    finally:
        end(stray)
    expect_done(node.prepare(2))


def find_group(node: OrdinaryNode, stray: int) -> Path:
    """Return the control group of a generation, once this process was moved there."""
    found = json.loads((node.folder() / "started.json").read_text())["cgroup"]
    assert found is not None, "the user of the agent can make no control group"
    members = Path(found) / "cgroup.procs"
    wait_for(lambda: str(stray) in members.read_text().split())
    return Path(found)


def await_reaped(pids: dict[str, int]) -> None:
    """Wait until init has reaped these ranks: until then their groups count as left."""
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids.values()))


def kill_helpers(node: OrdinaryNode) -> None:
    """Kill what kills in place of another: nothing but a stop looks for the ranks then."""
    helpers = [node.pid(of) for of in ("supervisor", "guard", "shim")]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in helpers:
            os.kill(pid, number)


@pytest.mark.parametrize("ordinary", ["hidepid=1", "hidepid=2"], indirect=True)
def test_a_stop_kills_hidden_members_of_a_control_group(delegated: OrdinaryNode) -> None:
    _, stray = run_with_root_child(delegated, "setsid")
    try:
        find_group(delegated, stray)
        kill_helpers(delegated)
        assert is_alive(stray), "something else killed it: the test shows nothing"
        expect_done(delegated.stop())
        assert not is_alive(stray)
    finally:
        if is_alive(stray):
            end(stray)


@pytest.mark.parametrize("ordinary", ["hidepid=1", "hidepid=2"], indirect=True)
def test_hidden_members_without_cgroup_kill_are_stuck(delegated: OrdinaryNode) -> None:
    """As where the kernel is older than 5.14."""
    node = delegated
    pids, stray = run_with_root_child(node, "setsid")
    try:
        kill = find_group(node, stray) / "cgroup.kill"
        if kill.exists():
            os.chown(kill, 0, 0)
            kill.chmod(0o400)
        watch = node.watch()
        watch.read_until("heartbeat")
        os.kill(node.pid("shim"), signal.SIGKILL)
        assert f"pid {stray} " in watch.read_observation("ShimDied")["reason"]
        await_reaped(pids)
        for answer in (node.prepare(2, stuck_after=0.5), node.stop(stuck_after=0.5)):
            assert refusal(answer) == "stuck"
            assert answer is not None
            assert answer["pids"] == [stray]
            assert "as another user" in answer["reason"]
    finally:
        end(stray)
    assert expect_done(node.stop())["stopped"] == []


@pytest.mark.parametrize("ordinary", ["hidepid=1", "hidepid=2"], indirect=True)
def test_a_hidden_member_of_a_ranks_group_is_stuck(ordinary: OrdinaryNode) -> None:
    node = ordinary
    pids, stray = run_with_root_child(node, "")
    try:
        assert os.getpgid(stray) == pids["0"], "it has left the group: the test shows nothing"
        watch = node.watch()
        watch.read_until("heartbeat")
        os.kill(node.pid("shim"), signal.SIGKILL)
        assert f"pid {pids['0']} " in watch.read_observation("ShimDied")["reason"]
        await_reaped(pids)
        for answer in (node.prepare(2, stuck_after=0.5), node.stop(stuck_after=0.5)):
            assert refusal(answer) == "stuck"
            assert answer is not None
            assert answer["pids"] == [pids["0"]]
            assert f"process group {pids['0']};" in answer["reason"]
    finally:
        end(stray)
    assert expect_done(node.stop())["stopped"] == []


@pytest.mark.parametrize("ordinary", ["hidepid=1", "hidepid=2"], indirect=True)
def test_a_hidden_process_of_the_same_user_is_killed(ordinary: OrdinaryNode) -> None:
    """As ssh-agent is, which makes itself undumpable."""
    code = (
        "import ctypes, os, time; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0); "
        "print(os.getpid(), flush=True); time.sleep(1000)"
    )
    command = ["sh", "-c", f"setsid {SYSTEM_PYTHON} -c '{code}' & exec sleep 1000"]
    ordinary.run(1, command, ranks=1)
    pid = int(wait_for(ordinary.log))
    try:
        assert expect_done(ordinary.stop())["stopped"] == [[1, 1]]
        assert not is_alive(pid)
    finally:
        if is_alive(pid):
            end(pid)


@pytest.mark.parametrize("ordinary", ["hidepid=1", "hidepid=2"], indirect=True)
def test_a_rank_that_became_root_and_is_hidden_lives(ordinary: OrdinaryNode) -> None:
    node = ordinary
    expect_done(node.prepare(ranks=[0], fleet="default/lab"))
    command = [*node.sudo.split(), "sleep", "1000"]
    (pid,) = expect_done(node.start(command=command, ranks=1))["pids"].values()

    journal = node.folder() / "journal.jsonl"

    def list_alive() -> list[bool]:
        (job,) = expect_done(node.order("list"))["jobs"]
        return [rank["alive"] for each in job["generations"] for rank in each["ranks"]]

    try:
        wait_for(lambda: read_name(pid) == "sleep")
        (words,) = expect_done(node.order("last-words", token=token(1)))["ranks"]
        assert words["state"] == "running"
        watch = node.watch()
        watch.read_until("heartbeat")
        os.kill(node.pid("shim"), signal.SIGSTOP)
        beat = watch.read_until("heartbeat", lambda beat: "shim_silent" in beat)
        assert beat["alive"] == [0]
        kill_helpers(node)
        assert list_alive() == [True]
        answer = node.prepare(token=token(1, job="k"), fleet="default/other")
        assert refusal(answer) == "other_fleet"
        answer = node.prepare(2, stuck_after=0.5)
        assert refusal(answer) == "stuck"
        assert answer is not None
        assert answer["pids"] == [pid]
        exited = {"seq": 1, "kind": "RankExited", "rank": 0}
        journal.write_text(json.dumps(exited) + "\n")
        assert list_alive() == [False], "by its exit in the journal the pid is another's"
    finally:
        end(pid)
    expect_done(node.prepare(2))


def test_a_killed_shim_beside_a_root_process_holds_its_node(
    ordinary: OrdinaryNode,
) -> None:
    node = ordinary
    _, stray = run_with_root_child(node, "")
    try:
        watch = node.watch()
        watch.read_until("heartbeat")
        os.kill(node.pid("shim"), signal.SIGKILL)
        assert f"pid {stray} (root, sleep)" in watch.read_observation("ShimDied")["reason"]
        assert "end" in watch.read_rest()[-1]
        for answer in (node.prepare(2, stuck_after=0.5), node.stop(stuck_after=0.5)):
            assert refusal(answer) == "stuck"
            assert answer is not None
            assert answer["pids"] == [stray]
    finally:
        end(stray)
    assert expect_done(node.stop())["stopped"] == []


def test_a_root_process_that_ends_in_time_only_delays_a_stop(ordinary: OrdinaryNode) -> None:
    node = ordinary
    _, stray = run_with_root_child(node, "setsid")
    stopping = node.begin("stop", token=token(1), stop_grace=0.2, stuck_after=30.0)
    wait_for(node.journal)
    end(stray)
    answer = stopping.read_rest()[-1]
    assert (answer["outcome"], answer["stopped"]) == ("done", [[1, 1]])


def test_an_ordinary_user_reads_its_own_ranks_only(
    ordinary: OrdinaryNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = find_program()
    assert found is not None, "py-spy is installed with relaunch"
    program = ordinary.agent.parent / "py-spy"
    shutil.copy(found, program)
    program.chmod(0o755)
    monkeypatch.setenv("RELAUNCH_PY_SPY", str(program))
    code = "import time; print(flush=True); time.sleep(1000)"
    own = f"{SYSTEM_PYTHON} -c '{code}'"
    ordinary.run(1, ["sh", "-c", f"{own} & {ordinary.sudo} {own} & wait"], ranks=1)
    try:
        wait_for(lambda: ordinary.log().count("\n") == 2)
        (row,) = expect_done(ordinary.order("stacks", token=token(1), rank=None))["stacks"]
        shell, *below = row["processes"]
        assert shell["unreadable"] == "it is not a Python program"
        below.sort(key=lambda process: process["source"] is None)
        mine, other = below
        assert [frame[0] for frame in mine["threads"][0]["frames"]] == ["<module>"]
        assert mine["written_bytes"] is not None
        assert (other["source"], other["written_bytes"], other["rank"]) == (None, None, None)
        assert other["unreadable"].startswith("py-spy: ")
        assert (other["state"], other["command"]) == ("S", mine["command"])
    finally:
        for process in below:
            end(process["pid"])
