"""Any single process is killed with -9.

Ranks go on with their exits still known, or are dead within a second.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from real_node import (
    PATIENCE,
    Node,
    expect_done,
    is_alive,
    python_command,
    read_name,
    token,
    wait_for,
)

from relaunch.agent.session import MAX_SPARES

STUBBORN = (
    "import signal,time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); "
    "time.sleep(1000)"
)
AWAY = """import subprocess, time
subprocess.Popen(['setsid', 'setsid', 'sleep', '1000'])
print('up', flush=True)
time.sleep(1000)"""


def test_a_killed_rank_is_reported_and_takes_the_others_along(node: Node) -> None:
    pids = node.run(1)
    watch = node.watch()
    watch.read_until("heartbeat")
    os.kill(pids["1"], signal.SIGKILL)
    first = watch.read_observation("RankExited")
    second = watch.read_observation("RankExited")
    assert (first["rank"], first["signal"], first["exit_code"], first["stopped"]) == (
        1,
        9,
        None,
        False,
    )
    assert (second["rank"], second["signal"], second["stopped"], second["log_tail"]) == (
        0,
        15,
        True,
        [],
    )
    assert [first["seq"], second["seq"]] == [1, 2]
    wait_for(lambda: watch.read_until("heartbeat")["alive"] == [])


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(node: Node) -> None:
    pids = node.run(
        1,
        [
            "sh",
            "-c",
            'if [ "$R" = 0 ]; then exec "$@"; fi; sleep 1000',
            "sh",
            *python_command(STUBBORN),
        ],
        rank_env=[{"R": "0"}, {"R": "1"}],
        stop_grace=0.3,
    )
    wait_for(lambda: "up" in node.log())
    began = time.monotonic()
    os.kill(pids["1"], signal.SIGKILL)
    watch = node.watch()
    assert watch.read_observation("RankExited")["rank"] == 1
    assert watch.read_observation("RankExited")["signal"] == 9
    assert time.monotonic() - began >= 0.3


def test_a_rank_that_ends_well_leaves_the_others_running(node: Node) -> None:
    pids = node.run(1, ["sh", "-c", "exec sleep $S"], rank_env=[{"S": "0"}, {"S": "1000"}])
    watch = node.watch()
    seen = watch.read_observation("RankExited")
    assert (seen["rank"], seen["exit_code"], seen["signal"]) == (0, 0, None)
    wait_for(lambda: watch.read_until("heartbeat")["alive"] == [1])
    assert is_alive(pids["1"])


def test_exit_codes_are_distinguished_from_signals(node: Node) -> None:
    node.run(1, ["sh", "-c", "exit 93"], ranks=1)
    seen = node.watch().read_observation("RankExited")
    assert (seen["exit_code"], seen["signal"], seen["stopped"]) == (93, None, False)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_supervisor_is_replaced_and_nothing_else_is(node: Node, number: int) -> None:
    pids = node.run(1)
    watch = node.watch()
    watch.read_until("heartbeat")
    old = node.pid("supervisor")
    os.kill(old, number)
    wait_for(lambda: node.pid("supervisor") != old)
    hellos = [line for line in watch.seen if "hello" in line]
    assert watch.read_until("heartbeat")["alive"] == [0, 1]
    assert len(hellos) == 1
    watch.renew()
    os.kill(pids["0"], signal.SIGKILL)
    assert watch.read_observation("RankExited")["rank"] == 0
    assert watch.read_observation("RankExited")["rank"] == 1


@contextmanager
def limit_descriptors(pid: int, limit: int) -> Iterator[None]:
    """Let a process open none whose number is not below a limit."""
    usual = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, usual[1]))
    yield
    resource.prlimit(pid, resource.RLIMIT_NOFILE, usual)


def test_a_session_goes_on_without_processes_for_later_orders(node: Node) -> None:
    node.run(1)
    node.end_session()
    session = node.session()  # one in which no order has been given
    wait_for(lambda: len(list_idle(session.pid)) == MAX_SPARES)
    open_numbers = set(map(int, os.listdir(f"/proc/{session.pid}/fd")))
    free = [number for number in range(1024) if number not in open_numbers]
    with limit_descriptors(session.pid, free[1]):  # leave one: a pipe has two
        watch = node.watch()
        began = watch.read_until("heartbeat")["stamp"]
        # Some ten times as long as a session waits before it forks.
        watch.read_until("heartbeat", lambda beat: beat["stamp"] > began + 0.5)
        assert expect_done(node.order("list"))["jobs"]
        assert session.poll() is None


def list_idle(session: int) -> list[int]:
    """The processes of a session that wait for an order."""
    children = Path(f"/proc/{session}/task/{session}/children").read_text().split()
    return [int(pid) for pid in children if read_name(int(pid)) == "relaunch-idle"]


def test_ranks_go_on_while_no_helper_can_be_started(node: Node) -> None:
    """As with a limit of descriptors, or of processes, that data loaders have used up."""
    pids = node.run(1)
    shim, old = node.pid("shim"), node.pid("supervisor")
    node.pid("guard")
    log = node.folder() / "shim.log"
    # Whatever it closes meanwhile has a higher number, and it polls fewer than that.
    with limit_descriptors(shim, 8):
        os.kill(old, signal.SIGKILL)
        wait_for(lambda: "supervisor cannot be started" in log.read_text() or not is_alive(shim))
        assert is_alive(shim), log.read_text()
    wait_for(lambda: node.pid("supervisor") != old)
    assert node.watch().read_until("heartbeat")["alive"] == [0, 1]
    assert all(map(is_alive, pids.values()))


def test_ranks_go_on_while_their_processes_cannot_be_listed(node: Node) -> None:
    pids = node.run(1)
    shim = node.pid("shim")
    node.pid("supervisor")
    node.pid("guard")
    log = node.folder() / "shim.log"
    with limit_descriptors(shim, 8):
        wait_for(lambda: "cannot be listed" in log.read_text() or not is_alive(shim))
        assert is_alive(shim), log.read_text()
    assert all(map(is_alive, pids.values()))
    expect_done(node.stop())


def test_a_killed_shim_takes_its_ranks_and_their_children_along(node: Node) -> None:
    # No lease or fence ends them within the patience of this test.
    node.run(1, python_command(AWAY), lease=100 * PATIENCE, fence_after=100 * PATIENCE)
    wait_for(lambda: "up" in node.log(0) and "up" in node.log(1))
    watch = node.watch()
    watch.read_until("heartbeat")
    shim, others = node.pid("shim"), set(node.list_processes())
    os.kill(shim, signal.SIGKILL)
    shims = {shim, node.pid("supervisor"), node.session().pid}
    own = {pid for pid in others - shims if b"RELAUNCH_TOKEN" in _environment(pid)}
    wait_for(lambda: not any(map(is_alive, own)))
    reason = watch.read_observation("ShimDied")["reason"]
    assert "[0, 1]" in reason
    assert "end" in watch.read_rest()[-1]
    again = node.watch()
    assert again.read_until("hello")["state"] == "gone"
    assert [line["observation"]["kind"] for line in again.read_rest() if "observation" in line] == [
        "ShimDied"
    ]
    answer = node.prepare(2)
    assert answer is not None
    assert answer["outcome"] == "done"


def _environment(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read()
    except OSError:
        return b""


@pytest.mark.parametrize("is_rank", [True, False], ids=["a rank", "a stranger"])
def test_a_lock_that_outlives_its_shim_is_freed_by_the_kill(node: Node, is_rank: bool) -> None:
    node.run(1)
    watch = node.watch()
    watch.read_until("heartbeat")
    os.kill(node.pid("shim"), signal.SIGKILL)
    watch.read_rest()
    os.kill(node.pid("supervisor"), signal.SIGKILL)
    node.end_session()
    wait_for(lambda: node.list_processes() == [])
    hold = (
        f"import fcntl, time; file = open({str(node.folder() / 'shim.lock')!r}); "
        "fcntl.flock(file, fcntl.LOCK_EX); print('held', flush=True); time.sleep(1000)"
    )
    own = {"RELAUNCH_TOKEN": "default/j/1/1", "RELAUNCH_NODE_STATE": str(node.state)}
    environment = {**os.environ, **(own if is_rank else {})}
    holder = subprocess.Popen(python_command(hold), env=environment, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    with holder, holder.stdout:
        try:
            assert holder.stdout.readline() == b"held\n"
            answer = node.stop()
            assert answer is not None
            # A process that no search finds may be the shim, seen from another container.
            assert answer["outcome"] == ("done" if is_rank else "refused"), answer
            assert is_rank or "the shim of generation 1 does not die" in answer["reason"]
            assert is_alive(holder.pid) is not is_rank
        finally:
            holder.kill()


def test_shim_and_supervisor_killed_together_leave_no_rank(
    node: Node,
) -> None:
    pids = node.run(1)
    supervisor, shim = node.pid("supervisor"), node.pid("shim")
    os.kill(supervisor, signal.SIGSTOP)
    os.kill(shim, signal.SIGKILL)
    os.kill(supervisor, signal.SIGKILL)
    wait_for(lambda: not any(map(is_alive, pids.values())))
    for _ in range(2):
        lines = node.watch().read_rest()
        assert [next(iter(line)) for line in lines] == ["hello", "observation", "end"]
        assert lines[1]["observation"]["kind"] == "RanksVanished"
        assert lines[1]["observation"]["rebooted"] is False


def test_a_killed_session_changes_nothing(node: Node) -> None:
    pids = node.run(1)
    node.watch().read_until("heartbeat")
    node.session().kill()
    node.await_session_end()
    assert node.watch().read_until("heartbeat")["alive"] == [0, 1]
    assert all(map(is_alive, pids.values()))


def test_an_order_under_way_is_finished_when_the_connection_ends(node: Node) -> None:
    node.run(1, python_command(STUBBORN))
    wait_for(lambda: "up" in node.log(0) and "up" in node.log(1))
    node.begin("stop", token=token(1), stop_grace=0.5, stuck_after=3.0)
    node.watch()
    node.end_session()
    assert not [pid for pid in node.list_processes() if b"RELAUNCH_TOKEN" in _environment(pid)]
    wait_for(lambda: node.list_processes() == [])
    assert json.loads((node.folder().parent / "highest.json").read_text())["stopped"] == [1, 1]


def test_a_generation_prepared_before_a_reboot_is_not_redone(node: Node) -> None:
    """started.json is written without fsync.

    After a power loss nothing says that it was not launched.
    """
    node.run()
    node.kill_everything()
    (node.state / "boot_id").write_text("second")
    (node.folder() / "started.json").unlink()
    answer = node.prepare()
    assert answer is not None
    assert (answer["outcome"], answer["why"]) == ("refused", "not_above")


@pytest.mark.parametrize("lost", [["started.json"], ["started.json", "shim.json"]])
def test_a_reboot_is_reported_without_a_record_of_the_launch(node: Node, lost: list[str]) -> None:
    node.run()
    node.kill_everything()
    (node.state / "boot_id").write_text("second")
    for name in lost:
        (node.folder() / name).unlink()
    for _ in range(2):
        lines = node.watch().read_rest()
        assert [next(iter(line)) for line in lines] == ["hello", "observation", "end"]
        seen = lines[1]["observation"]
        assert (seen["seq"], seen["kind"], seen["rebooted"]) == (1, "RanksVanished", True)


def test_a_generation_that_was_only_prepared_has_lost_no_ranks(node: Node) -> None:
    node.prepare()
    node.kill_everything()
    assert [next(iter(line)) for line in node.watch().read_rest()] == ["hello", "end"]


def test_a_reboot_is_detected_by_the_boot_id(node: Node) -> None:
    node.run(1)
    node.prepare(2)
    node.start(2)
    node.kill_everything()
    (node.state / "boot_id").write_text("second")
    lines = node.watch(2).read_rest()
    assert lines[0]["hello"]["state"] == "gone"
    assert lines[0]["hello"]["boot_id"].endswith("second")
    seen = lines[1]["observation"]
    assert (seen["kind"], seen["rebooted"]) == ("RanksVanished", True)
    assert "rebooted" in seen["reason"]
    assert expect_done(node.stop(2))["stopped"] == []
    answer = node.prepare(3)
    assert answer is not None
    assert answer["outcome"] == "done"


@pytest.mark.parametrize("frozen", ["shim", "supervisor", "rank"])
def test_what_is_frozen_can_still_be_stopped(node: Node, frozen: str) -> None:
    pids = node.run(1)
    os.kill(pids["0"] if frozen == "rank" else node.pid(frozen), signal.SIGSTOP)
    answer = node.stop()
    assert expect_done(answer)["stopped"] == [[1, 1]]
    wait_for(lambda: not node.list_leftovers())


def test_a_process_that_left_its_session_is_found_by_its_token(node: Node) -> None:
    pids = node.run(1, python_command(AWAY), ranks=1)
    wait_for(lambda: "up" in node.log())
    os.kill(node.pid("supervisor"), signal.SIGKILL)
    os.kill(node.pid("shim"), signal.SIGKILL)
    wait_for(lambda: not is_alive(pids["0"]))
    answer = node.stop()
    assert answer is not None
    assert answer["outcome"] == "done"
    wait_for(lambda: not node.list_leftovers())


def test_children_of_a_failed_rank_are_ended(node: Node) -> None:
    workers = """import subprocess, sys
subprocess.Popen(['sleep', '1000'])
subprocess.Popen(['setsid', 'sleep', '1000'])
sys.exit(1)"""
    node.run(1, python_command(workers), ranks=1)
    assert node.watch().read_observation("RankExited")["exit_code"] == 1
    wait_for(
        lambda: (
            len([pid for pid in node.list_processes() if b"RELAUNCH_TOKEN" in _environment(pid)])
            == 0
        )
    )


def test_a_pid_that_was_given_to_another_is_left_alone(node: Node) -> None:
    node.run(1, ["true"], lease=0.2)
    wait_for(lambda: not is_alive(node.pid("shim")))
    bystander = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    try:
        for name in ("shim", "supervisor"):
            record = json.loads((node.folder() / f"{name}.json").read_text())
            (node.folder() / f"{name}.json").write_text(
                json.dumps({**record, "pid": bystander.pid})
            )
        launch = json.loads((node.folder() / "started.json").read_text())
        launch["pids"] = {
            rank: [bystander.pid, started] for rank, (_, started) in launch["pids"].items()
        }
        (node.folder() / "started.json").write_text(json.dumps(launch))
        assert expect_done(node.stop())["stopped"] == []
        listed = node.order("list")
        assert listed is not None
        assert not any(rank["alive"] for rank in listed["jobs"][0]["generations"][0]["ranks"])
        assert is_alive(bystander.pid)
    finally:
        bystander.kill()
        bystander.wait()
