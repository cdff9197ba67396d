"""Ranks that a daemon runs: they end with a stop, a fence and their client, or are named.

The engine is a double (tests/doubles/engine.py); docs/testing.md has the results of a real one.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from real_node import Node, expect_done, is_alive, refusal, token, wait_for
from test_guard import frozen, hold_stopped, is_frozen

from relaunch.agent.ranks import clients
from tests.doubles import engine

HANDED_OVER = ("-e", "RELAUNCH_TOKEN", "-e", "RELAUNCH_NODE_STATE")
SLEEP = ("sleep", "1000")


class Engine:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.client = str(folder / "docker")

    def list_containers(self) -> list[int]:
        path = self.folder / "containers"
        return [int(text) for text in path.read_text().split()] if path.exists() else []

    def await_container(self, number: int = 1) -> int:
        wait_for(lambda: len(self.list_containers()) >= number)
        return self.list_containers()[number - 1]

    def run(self, *options: str, program: tuple[str, ...] = SLEEP) -> list[str]:
        return [self.client, "run", *options, *program]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Engine]:
    """An engine that is no descendant of a node's agent."""
    folder = tmp_path / "engine"
    folder.mkdir()
    source = Path(engine.__file__)
    client = folder / "docker"
    client.write_text(f"#!{sys.executable} -S\n{source.read_text()}")
    client.chmod(0o755)
    process = subprocess.Popen([sys.executable, "-S", str(source), str(folder)])
    wait_for((folder / "engine.sock").exists)
    found = Engine(folder)
    yield found
    process.kill()
    process.wait()
    for pid in found.list_containers():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def test_a_stop_ends_the_container_that_ignores_sigterm(node: Node, daemon: Engine) -> None:
    node.run(1, daemon.run(*HANDED_OVER), ranks=1)
    container = daemon.await_container()
    expect_done(node.stop())
    assert not is_alive(container), "the stop counts as proven beside a container that runs"


def test_a_next_generation_is_prepared_after_the_container(node: Node, daemon: Engine) -> None:
    node.run(1, daemon.run(*HANDED_OVER), ranks=1)
    container = daemon.await_container()
    expect_done(node.prepare(2, [0]))
    assert not is_alive(container)


def test_a_container_ends_after_its_client_was_killed(node: Node, daemon: Engine) -> None:
    pids = node.run(1, daemon.run(*HANDED_OVER), ranks=1)
    container = daemon.await_container()
    os.kill(pids["0"], signal.SIGKILL)
    wait_for(lambda: not is_alive(container), "it outlives the client")
    assert [seen["kind"] for seen in node.journal()] == ["RankExited"]


def test_a_container_below_a_shell_is_found_by_its_client(node: Node, daemon: Engine) -> None:
    script = daemon.folder / "train.sh"
    script.write_text(f"{' '.join(daemon.run(*HANDED_OVER))}\n")
    node.run(1, ["sh", str(script)], ranks=1)
    container = daemon.await_container()
    expect_done(node.stop())
    assert not is_alive(container)


def test_a_container_ends_at_the_fence(node: Node, daemon: Engine) -> None:
    node.run(1, daemon.run(*HANDED_OVER), ranks=1, lease=0.6, fence_after=0.6, stop_grace=0.5)
    container = daemon.await_container()
    node.watch().renew()
    wait_for(lambda: not is_alive(container), "it outlives the fence")


def test_a_container_ends_at_the_fence_of_a_stopped_shim(node: Node, daemon: Engine) -> None:
    node.run(1, daemon.run(*HANDED_OVER), ranks=1, lease=3.0, fence_after=0.6, stop_grace=0.5)
    container = daemon.await_container()
    node.pid("guard")
    shim = node.pid("shim")
    os.kill(shim, signal.SIGSTOP)
    wait_for(lambda: not is_alive(container), "it outlives the fence")
    os.kill(shim, signal.SIGCONT)


def test_a_new_guard_searches_in_place_of_a_killed_one(node: Node, daemon: Engine) -> None:
    node.run(1, daemon.run(*HANDED_OVER), ranks=1)
    container = daemon.await_container()
    stopping = node.begin("stop", token=token(1), stop_grace=1.0, stuck_after=30.0)
    os.kill(node.pid("guard"), signal.SIGKILL)
    expect_done(stopping.read_rest()[-1])
    assert not is_alive(container)


def test_what_exec_leaves_gets_sigterm_before_it_is_killed(node: Node, daemon: Engine) -> None:
    note = daemon.folder / "note"
    program = ("sh", "-c", f"trap 'echo saved > {note}; exit 0' TERM; while :; do sleep 0.1; done")
    node.run(1, [daemon.client, "exec", *HANDED_OVER, *program], ranks=1)
    container = daemon.await_container()
    expect_done(node.stop(stop_grace=30.0))
    assert not is_alive(container)
    assert note.read_text() == "saved\n"


def test_a_container_that_begins_late_is_ended_too(node: Node, daemon: Engine) -> None:
    pids = node.run(1, daemon.run(*HANDED_OVER, "--delay", "0.2"), ranks=1)
    wait_for((daemon.folder / "asked").exists)
    os.kill(pids["0"], signal.SIGKILL)
    expect_done(node.stop())
    assert not is_alive(daemon.await_container())


def test_a_container_that_does_not_end_is_named(node: Node, daemon: Engine, disk: Path) -> None:
    writes = f"while :; do echo >> {disk}/steps; sleep 0.01; done"
    node.run(1, daemon.run(*HANDED_OVER, program=("sh", "-c", writes)), ranks=1)
    container = daemon.await_container()
    with frozen(disk):
        wait_for(lambda: is_frozen(container), "it does not wait for the disk")
        answer = node.stop(stuck_after=1.0)
    assert refusal(answer) == "stuck"
    assert answer is not None
    assert answer["pids"] == [container]
    expect_done(node.stop())
    assert not is_alive(container)


def test_a_container_that_was_named_and_ended_is_not_stuck(
    node: Node, daemon: Engine, disk: Path
) -> None:
    writes = f"while :; do echo >> {disk}/steps; sleep 0.01; done"
    node.run(1, daemon.run(*HANDED_OVER, program=("sh", "-c", writes)), ranks=1)
    container = daemon.await_container()
    with ExitStack() as held:
        with frozen(disk):
            wait_for(lambda: is_frozen(container), "it does not wait for the disk")
            assert refusal(node.stop(stuck_after=1.0)) == "stuck"
            held.enter_context(hold_stopped(node.pid("guard")))
        wait_for(lambda: not is_alive(container))
        expect_done(node.stop(stuck_after=30.0))


def test_a_stop_searches_where_the_guard_gives_no_answer(node: Node, daemon: Engine) -> None:
    node.run(1, daemon.run(*HANDED_OVER), ranks=1)
    container = daemon.await_container()
    with hold_stopped(node.pid("guard")):
        expect_done(node.stop())
        assert not is_alive(container)


def test_a_client_is_found_in_a_command_and_among_processes() -> None:
    found = clients.find_in_command(["bash", "-c", "cd /x && exec /usr/bin/docker run a"])
    assert found == {"docker"}
    others = ["python", "docker.py", "--docker", "/var/run/docker.sock", "/data/docker/set"]
    assert clients.find_in_command(others) == set()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("bash -c 'cd /x && exec /usr/bin/docker run a'", "docker"),
        ("docker --context x container run a", "docker"),
        ("docker compose -f x.yaml up trainer", "docker"),
        ("docker-compose up trainer", "docker-compose"),
        ("unknown-wrapper --quiet docker exec box python train.py", "docker"),
        ("bash -c 'docker \"$@\"' bash run a", "docker"),
        ("bash -c 'if true; then X=$(nerdctl run a); fi'", "nerdctl"),
        ("bash -c '# once\ndocker \\\n  run a'", "docker"),
        ("podman run a", "podman"),
        ("sudo -u alice -n srun python train.py", "srun"),
        ("flock /tmp/lock timeout 30m srun python train.py", "srun"),
        ("bash -lc srun", "srun"),
        ("srun python train.py --scope full", "srun"),
        ('systemd-run --wait sh -c "y --scope"', "systemd-run"),
        ("bash -c 'cd /x;srun python train.py'", "srun"),
        ("env A=1 systemd-run --wait python train.py", "systemd-run"),
        ("python train.py --launcher srun", None),
        ("env A=1 /usr/bin/python /x/train.py --launcher srun", None),
        ("bash -c '# no docker run here\npython train.py'", None),
        ("""python -c "x='docker'" """, None),
        ("""python -c "x = 'srun'" """, None),
        ("bash -c 'docker pull a; python train.py run'", None),
        ("docker ps", None),
        ("podman ps", None),
        ("systemd-run --scope python train.py", None),
        ("python docker.py --docker /var/run/docker.sock /data/docker/set run", None),
        ("python train.py --data docker", None),
    ],
)
def test_a_client_is_found_where_a_command_runs_it(line: str, found: str | None) -> None:
    assert clients.find_in_command(shlex.split(line)) == ({found} - {None})


@pytest.mark.parametrize("command", [SLEEP, ("docker", "run", "image")])
def test_only_ranks_with_a_client_wait_for_a_search(
    node: Node, programs: Path, command: tuple[str, ...]
) -> None:
    (programs / "docker").write_text("#!/bin/sh\nsleep 1000\n")
    (programs / "docker").chmod(0o755)
    node.run(1, list(command), ranks=1)
    begun = time.monotonic()
    expect_done(node.stop())
    assert (time.monotonic() - begun >= clients.SETTLE_TIME) == (command != SLEEP)
