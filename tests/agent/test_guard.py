"""Ranks end at their fence although their shim fails.

It is stopped, hangs in a write, or is gone together with its supervisor.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from real_node import (
    Node,
    boottime,
    expect_done,
    is_alive,
    python_command,
    read_name,
    refusal,
    send_to_shim,
    wait_for,
)
from test_lease import renewing

from relaunch.agent import processes
from relaunch.agent.protocol import Token
from relaunch.agent.ranks import guard
from relaunch.agent.state import read_json

SHORT = {"lease": 0.6, "fence_after": 0.6, "stop_grace": 0.5}
STUBBORN = (
    "import signal,time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); "
    "time.sleep(1000)"
)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def are_gone(pids: dict[str, int]) -> bool:
    return not any(map(is_alive, pids.values()))


def is_frozen(pid: int) -> bool:
    return state_of(pid) in "TD"


@contextmanager
def hold_stopped(*pids: int) -> Iterator[None]:
    """Hold processes stopped, against whatever wakes them meanwhile."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: all(state_of(pid) == "T" for pid in pids))
    try:
        yield
    finally:
        for pid in pids:
            if is_alive(pid):
                os.kill(pid, signal.SIGCONT)


def test_ranks_of_a_stopped_shim_die_at_their_fence(node: Node) -> None:
    pids = node.run(1, python_command(STUBBORN), **SHORT)
    wait_for(lambda: "up" in node.log(0) and "up" in node.log(1))
    node.watch().renew()
    shim = node.pid("shim")
    node.pid("guard")
    with hold_stopped(shim):
        wait_for(lambda: are_gone(pids), "a stopped shim keeps its ranks alive")
        assert state_of(shim) == "T"
    wait_for(lambda: "Fenced" in [seen["kind"] for seen in node.journal()])

    def list_ends() -> list[tuple[int, bool]]:
        exits = [seen for seen in node.journal() if seen["kind"] == "RankExited"]
        return [(seen["signal"], seen["stopped"]) for seen in exits]

    wait_for(lambda: len(list_ends()) == 2)  # they are recorded after it
    assert list_ends() == [(9, True), (9, True)], "the fence ended them, by shim or guard"


def test_a_renewal_after_the_guards_kill_does_not_hide_it(node: Node) -> None:
    pids = node.run(1, python_command(STUBBORN), **{**SHORT, "lease": 3.0, "fence_after": 60.0})
    wait_for(lambda: "up" in node.log(0) and "up" in node.log(1))
    watch = node.watch()
    watch.read_until("heartbeat")
    shim, supervisor = node.pid("shim"), node.pid("supervisor")
    node.pid("guard")
    with hold_stopped(shim):
        with hold_stopped(supervisor):
            wait_for(lambda: are_gone(pids), "a stopped shim keeps its ranks alive")
            watch.renew()
            renewed = boottime()
        watch.read_until("heartbeat", lambda beat: beat["stamp"] > renewed + 0.5)
        assert boottime() < renewed + 60.0, "too late to renew: the test shows nothing"
    end = watch.read_observation("RankExited")
    assert (end["signal"], end["stopped"]) == (9, True)
    assert "Fenced" in [seen["kind"] for seen in node.journal()]


@pytest.mark.parametrize("helper", ["supervisor", "guard"])
def test_ranks_of_a_stopped_shim_and_another_die_at_their_fence(node: Node, helper: str) -> None:
    pids = node.run(1, python_command(STUBBORN), **SHORT)
    wait_for(lambda: "up" in node.log(0) and "up" in node.log(1))
    node.watch().renew()
    other, shim = node.pid(helper), node.pid("shim")
    with hold_stopped(other, shim):
        wait_for(lambda: are_gone(pids), "two stopped processes keep ranks alive")
        assert state_of(shim) == "T"


def test_a_stopped_shim_does_not_end_ranks_with_renewed_leases(node: Node) -> None:
    pids = node.run(1, **SHORT)
    watch = node.watch()
    shim = node.pid("shim")
    node.pid("guard")
    with renewing(watch):
        begin = boottime()
        watch.read_until("heartbeat", lambda beat: beat["stamp"] > begin + 0.2)
        with hold_stopped(shim):
            watch.read_until("heartbeat", lambda beat: beat["stamp"] > begin + 2.2)
            assert state_of(shim) == "T", (
                "woken before the fence would have been due: the test shows nothing"
            )
            assert all(map(is_alive, pids.values()))
        watch.read_until("heartbeat", lambda beat: beat["stamp"] > begin + 3.4)
        assert all(map(is_alive, pids.values())), "a shim that woke fenced by what it had missed"
    assert watch.read_observation("Fenced")["why"] == "isolated"


def test_a_stopped_shim_is_reported_woken_and_its_dead_rank_seen(node: Node) -> None:
    pids = node.run(1)
    watch = node.watch()
    shim = node.pid("shim")
    watch.read_until("heartbeat", lambda beat: beat["alive"] == [0, 1])
    os.kill(shim, signal.SIGSTOP)
    os.kill(pids["1"], signal.SIGKILL)
    watch.read_until("heartbeat", lambda beat: beat["alive"] == [0])
    assert watch.read_until("heartbeat", lambda beat: "shim_silent" in beat)["shim_silent"] > 0
    seen = watch.read_observation("RankExited")
    assert (seen["rank"], seen["signal"], seen["stopped"]) == (1, 9, False)
    assert watch.read_observation("RankExited")["stopped"] is True


def test_a_shim_without_a_successor_leaves_no_rank_below_a_shell(node: Node) -> None:
    """The parent-death signal reaches the shell that the shim started, and not its children."""
    node.run(1, ["sh", "-c", "sleep 1000; exit $?"], ranks=1)
    supervisor, shim = node.pid("supervisor"), node.pid("shim")
    node.pid("guard")
    below = wait_for(lambda: [pid for pid in node.list_processes() if read_name(pid) == "sleep"])
    os.kill(supervisor, signal.SIGSTOP)
    os.kill(shim, signal.SIGKILL)
    os.kill(supervisor, signal.SIGKILL)
    wait_for(lambda: not any(map(is_alive, below)))
    wait_for(lambda: not node.list_leftovers(), "the guard stays although nothing is left to guard")


def test_a_killed_guard_is_replaced_by_one_that_knows_the_fence(node: Node) -> None:
    pids = node.run(1, **SHORT)
    watch = node.watch()
    with renewing(watch):
        first = node.pid("guard")
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: node.pid("guard") != first)
        begin = boottime()
        watch.read_until("heartbeat", lambda beat: beat["stamp"] > begin)
        assert all(map(is_alive, pids.values()))
        os.kill(node.pid("shim"), signal.SIGSTOP)
    with hold_stopped(node.pid("shim")):
        wait_for(lambda: are_gone(pids), "the second guard does not know when the fence is due")


@pytest.fixture
def node_without_pidfds(make_node: Callable[..., Node], tmp_path: Path, agent: Path) -> Node:
    """A node whose Python was built with headers of an old kernel, as uv's were for long."""
    script = tmp_path / "agent.py"
    script.write_text(
        "import os, signal, sys\n"
        "for module, name in ((os, 'pidfd_open'), (signal, 'pidfd_send_signal')):\n"
        "    if hasattr(module, name):\n"
        "        delattr(module, name)\n"
        f"sys.path.insert(0, {str(agent)!r})\n"
        "from relaunch.agent.__main__ import main\n"
        "os._exit(main(sys.argv[1:]))\n"
    )
    return make_node("old", agent=script)


def test_a_python_without_pidfds_stops_and_fences(node_without_pidfds: Node) -> None:
    node = node_without_pidfds
    stray = ["sh", "-c", "setsid sleep 1000 & trap '' TERM; sleep 1000; sleep 1000"]
    pids = node.run(1, stray)
    assert expect_done(node.stop(1, stop_grace=0.1))["stopped"] == [[1, 1]]
    assert are_gone(pids)
    pids = node.run(2, python_command(STUBBORN), **SHORT)
    wait_for(lambda: "up" in node.log(0, 2) and "up" in node.log(1, 2))
    node.pid("guard", 2)
    with hold_stopped(node.pid("shim", 2)):
        wait_for(lambda: are_gone(pids), "the guard of this Python kills nothing")
    pids = node.run(3, stray)
    node.pid("supervisor", 3)
    os.kill(node.pid("shim", 3), signal.SIGKILL)
    wait_for(lambda: not {"sleep", "sh"} & set(map(read_name, node.list_leftovers())))
    assert are_gone(pids)
    watch = node.watch(3)
    assert watch.read_observation("ShimDied")


@contextmanager
def frozen(folder: Path) -> Iterator[None]:
    subprocess.run(["fsfreeze", "-f", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "-u", str(folder)], check=True)


@pytest.fixture
def disk_node(disk: Path, agent: Path) -> Iterator[Node]:
    node = Node(disk / "n1", agent)
    node.state.mkdir(mode=0o700)
    yield node
    node.kill_everything()


def fence(node: Node, pids: dict[str, int]) -> None:
    """Do nothing: no renewal is sent."""


def fail(node: Node, pids: dict[str, int]) -> None:
    os.kill(pids["1"], signal.SIGKILL)


def order_to_stop(node: Node, pids: dict[str, int]) -> None:
    send_to_shim(node, {"stop": {"stop_grace": 0.5, "reason": "a test"}})


@pytest.mark.parametrize("begin", [fence, fail, order_to_stop])
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(["sleep", "1000"], marks=pytest.mark.long),
        ["sh", "-c", "trap '' TERM; while :; do sleep 1000; done"],
    ],
)
def test_a_disk_that_hangs_keeps_no_rank_alive(
    disk_node: Node, disk: Path, begin: Callable[..., Any], program: list[str]
) -> None:
    node = disk_node
    times = SHORT if begin is fence else {**SHORT, "lease": 60.0, "fence_after": 60.0}
    pids = node.run(1, program, **times)
    watch = node.watch()
    watch.read_until("heartbeat")
    watch.renew()
    node.pid("guard")
    began = boottime()
    with frozen(disk):
        begin(node, pids)
        wait_for(lambda: are_gone(pids), "ranks live on while the shim waits for its disk")
        assert boottime() - began < 30.0
        assert is_frozen(node.pid("shim")), "the shim waits for nothing: the test shows nothing"
    wait_for(lambda: [seen["kind"] for seen in node.journal()].count("RankExited") == 2)


def test_a_disk_that_hangs_starts_no_rank_later(node: Node, tmp_path: Path) -> None:
    """The controller may have begun another generation when the disk returns."""
    for generation, valid_for in enumerate((1.0, 5.0, 25.0), 1):  # a busy machine needs longer
        prepared = expect_done(node.prepare(generation, valid_for=valid_for))
        folder, shim = node.folder(generation), node.pid("shim", generation)
        node.pid("guard", generation)
        write = folder / f".started.json.{shim}"
        os.mkfifo(write)  # a write to it waits until it is read
        began = tmp_path / f"began.{generation}"
        given = {"prepared": prepared["stamp"], "command": ["touch", str(began)]}
        start = node.begin_start(generation, **given)
        wait_for(lambda late=prepared["stamp"] + valid_for: boottime() > late)
        reading = os.open(write, os.O_RDONLY | os.O_NONBLOCK)
        answer = start.read_rest()[-1]
        os.close(reading)
        assert refusal(answer) == "expired"
        assert not began.exists()
        launch = read_json(folder / "started.json")
        if launch is not None:
            break
    assert launch is not None, "the order came too late each time: the test shows nothing"
    assert launch["refused"]["why"] == "expired"


def test_a_disk_that_hangs_keeps_no_supervisor_waiting(node: Node) -> None:
    """It writes how far logs have come, and frees the beginning of those that are too long."""
    node.run(1, ["sh", "-c", "echo up; exec sleep 1000"])
    wait_for(lambda: "up" in node.log(0) and "up" in node.log(1))
    times = node.folder() / "log_times"
    times.mkdir(exist_ok=True)
    for rank in (0, 1):
        (times / f"rank_{rank}.log").unlink(missing_ok=True)
        os.mkfifo(times / f"rank_{rank}.log")  # a write to it waits until it is read
    old = node.pid("supervisor")
    os.kill(old, signal.SIGKILL)  # the next one writes at once
    wait_for(lambda: node.pid("supervisor") != old)
    watch = node.watch()
    threads = Path(f"/proc/{node.pid('supervisor')}/task")
    wait_for(lambda: len(list(threads.iterdir())) == 2, "nothing waits for the disk")
    began = boottime()
    watch.renew()
    beat = watch.read_until("heartbeat", lambda beat: beat["stamp"] > began)
    assert beat["alive"] == [0, 1]


def test_a_guard_spares_a_supervisor_its_shim_did_not_name(node: Node) -> None:
    """The shim hangs right after it has forked it: what it writes of it waits for the disk."""
    times = {**SHORT, "lease": 600.0, "fence_after": 600.0}
    pids = node.run(1, python_command(STUBBORN), **times)
    wait_for(lambda: "up" in node.log(0) and "up" in node.log(1))
    shim, old = node.pid("shim"), node.pid("supervisor")
    node.pid("guard")
    write = node.folder() / f".supervisor.json.{shim}"
    os.mkfifo(write)  # a write to it waits until it is read
    os.kill(old, signal.SIGKILL)
    wait_for(lambda: not is_alive(old))
    watch = node.watch()
    assert watch.read_until("heartbeat")["alive"] == [0, 1]
    paused = {"stamp": boottime(), "age": 2000.0}  # its clock stood still for longer than a lease
    node.send({"id": watch.number, "send": {"renew": paused}})
    wait_for(lambda: are_gone(pids), "ranks live on while the shim waits for its disk")
    watch.read_until("heartbeat", lambda beat: beat["alive"] == [] and "shim_silent" in beat)
    assert node.pid("supervisor") == old, "the shim did not wait: the test shows nothing"
    reading = os.open(write, os.O_RDONLY | os.O_NONBLOCK)
    assert watch.read_observation("RankExited")["stopped"] is True
    os.close(reading)


def test_a_guard_knows_a_supervisor_by_what_it_says_itself(node: Node) -> None:
    own = processes.identify_self()
    order = {"stop_grace": 0.0, "stuck_after": 0.1}
    news = guard.make_news("running", True, 0.0, None, 0, [], None)
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    token = Token("default", "j", 1, 1)
    begun = guard.Guard(token, order, str(node.state), own, ours.detach(), reading, news)
    with subprocess.Popen(["sleep", "1000"]) as child:
        identity = processes.read_process(child.pid)
        assert identity is not None
        try:
            # The second has the pid of a supervisor that has died.
            for started, is_spared in ((identity.started, True), (identity.started - 1, False)):
                begun.announced.clear()
                said = {"supervisor": [child.pid, started]}
                os.write(writing, json.dumps(said).encode() + b"\n")
                begun.extensions.read_pending()
                below = {process.pid for process in begun._find_below()}
                assert (child.pid not in below) is is_spared
        finally:
            child.kill()
            theirs.close()
            os.close(writing)


@pytest.mark.long
def test_a_watch_continues_a_stopped_shim_without_supervisor(node: Node) -> None:
    pids = node.run(1)
    shim, supervisor = node.pid("shim"), node.pid("supervisor")
    os.kill(shim, signal.SIGSTOP)
    os.kill(supervisor, signal.SIGKILL)
    watch = node.watch()
    assert watch.read_until("heartbeat")["alive"] == [0, 1]
    assert all(map(is_alive, pids.values()))
    assert node.pid("supervisor") != supervisor


def test_a_shim_that_hung_for_long_kills_no_rank_and_no_helper(node: Node) -> None:
    """What it reads first when it goes on are the oldest renewals of hundreds, and old pings."""
    pids = node.run(1, **{**SHORT, "lease": 6.0, "fence_after": 2.0})
    helpers = [node.pid(of) for of in ("supervisor", "guard")]
    watch = node.watch()
    write = node.folder() / f".order.json.{node.pid('shim')}"
    os.mkfifo(write)  # a write to it waits until it is read
    watch.read_until("heartbeat")
    watch.renew()
    (node.folder() / "order.json").unlink()
    silence = 0.0
    while silence < 11.0:
        for _ in range(20):
            watch.renew()
        silence = watch.read_until("heartbeat").get("shim_silent", 0.0)
    with renewing(watch):
        reading = os.open(write, os.O_RDONLY | os.O_NONBLOCK)
        woken = boottime()
        watch.read_until(
            "heartbeat",
            lambda beat: beat["stamp"] > woken + 3.0 and "shim_silent" not in beat,
        )
        os.close(reading)
        assert all(map(is_alive, [*pids.values(), *helpers]))
        assert node.journal() == []


def test_a_rank_that_ends_while_the_disk_hangs_ends_no_other(
    disk_node: Node, disk: Path, tmp_path: Path
) -> None:
    """Its exit is written for longer than a lease, which the supervisor renews meanwhile."""
    go = tmp_path / "go"
    wait = f"while [ $RANK = 0 ] && [ ! -e {go} ]; do sleep 0.05; done"
    program = ["sh", "-c", f"{wait}; [ $RANK = 0 ] || exec sleep 1000"]
    times = {**SHORT, "lease": 6.0, "fence_after": 2.0}
    pids = disk_node.run(1, program, rank_env=[{"RANK": "0"}, {"RANK": "1"}], **times)
    watch = disk_node.watch()
    watch.read_until("heartbeat")
    shim = disk_node.pid("shim")
    disk_node.pid("guard")
    with renewing(watch):
        with frozen(disk):
            go.touch()
            wait_for(lambda: not is_alive(pids["0"]) and is_frozen(shim))
            began = boottime()
            watch.read_until("heartbeat", lambda beat: beat["stamp"] > began + 10.0)
            assert is_frozen(shim), "the shim waits for nothing: the test shows nothing"
        end = watch.read_observation("RankExited")
        assert (end["rank"], end["exit_code"]) == (0, 0)
        woken = boottime()
        watch.read_until("heartbeat", lambda beat: beat["stamp"] > woken + 3.0)
        assert is_alive(pids["1"])
    assert [seen["kind"] for seen in disk_node.journal()] == ["RankExited"]


def test_what_is_below_a_process_is_never_that_below_its_parent() -> None:
    """A dead shim's children are those of init, below which every process of the machine is."""
    with subprocess.Popen(["sleep", "1000"]) as dead, subprocess.Popen(["sleep", "1000"]) as other:
        try:
            shim = processes.read_process(dead.pid)
            assert shim is not None
            assert other.pid in {
                process.pid for process in processes.list_below(processes.identify_self())
            }
            dead.kill()
            dead.wait()
            assert processes.list_below(shim) == []
            reused = shim._replace(pid=os.getpid())
            assert processes.list_below(reused) == []
            init = processes.read_process(1)
            assert init is not None
            assert processes.list_below(init) == []
        finally:
            other.kill()


def test_a_guard_starting_after_its_shim_died_kills_no_others(node: Node) -> None:
    node.prepare()
    token = Token("default", "j", 1, 1)
    order = {"stop_grace": 0.0, "stuck_after": 0.1}
    news = guard.make_news("running", True, 0.0, None, 1, [], None)
    with subprocess.Popen(["sleep", "1000"]) as dead, subprocess.Popen(["sleep", "1000"]) as other:
        shim = processes.read_process(dead.pid)
        assert shim is not None
        dead.kill()
        dead.wait()
        ours, theirs = socket.socketpair()
        reading, writing = os.pipe()
        try:
            begun = guard.Guard(token, order, str(node.state), shim, ours.detach(), reading, news)
            begun._kill()
            assert other.poll() is None
        finally:
            other.kill()
            theirs.close()
            os.close(writing)
