"""Who computes on a node's GPUs, as a look at it tells.

And the bindings for NVML, which are compiled once. The library is a double.
"""

from __future__ import annotations

import getpass
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from real_node import Node, expect_done, python_command, refusal, wait_for

from relaunch.agent.node import gpu_users
from tests.doubles.install import HEALTHY, calls, install_nvml, install_tool, tell_nvml

Look = Callable[[], dict[str, Any]]


@pytest.fixture
def look(node: Node, tmp_path: Path, nvml_built: Path, monkeypatch: pytest.MonkeyPatch) -> Look:
    """What `list` says of the GPUs of a node that has two."""
    install_nvml(tmp_path / "lib", nvml_built)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "lib"))
    return lambda: expect_done(node.order("list", gpus=True))


@pytest.fixture
def uses(tmp_path: Path) -> Callable[..., None]:
    """Have the library say that processes use GPU 1."""
    return lambda *pids: tell_nvml(
        tmp_path / "lib", HEALTHY + "".join(f"process 1 {pid} 1000\n" for pid in pids)
    )


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; time.sleep(1000)", "--password=secret"]
    ) as process:
        yield process
        process.kill()


def list_gpu_processes(look: Look, gpu: int = 1) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = look()["gpus"]["gpus"][gpu]["processes"]
    return found


def test_s2_10_a_look_reports_gpus_only_when_asked_to(look: Look, node: Node) -> None:
    answer = look()
    assert (answer["gpus"]["driver"], answer["gpus"]["nvml"]) == ("570.124.06", "13.570.0")
    assert answer["gpus"]["gpus"][1] == {
        "index": 1,
        "uuid": "GPU-fake-1",
        "bus_id": "00000000:06:00.0",
        "name": "NVIDIA Fake H100",
        "memory": {"total": 80 << 30, "used": 1 << 30},
        "processes": [],
        "remapped": {"correctable": 0, "uncorrectable": 0, "pending": False, "failed": False},
        "retired_pending": False,
        "recovery_action": 0,
    }
    (disk,) = answer["disks"]
    assert disk["writable"] is True and disk["path"] == str(node.state)
    assert "ports" in answer["links"]
    assert "gpus" not in expect_done(node.order("list"))
    assert refusal(node.order("list", gpus="yes")) == "bad_order"


def test_s2_10_a_stranger_is_reported_by_name_without_arguments(
    look: Look, uses: Callable[..., None], stranger: subprocess.Popen[bytes]
) -> None:
    uses(stranger.pid)
    program = os.path.basename(sys.executable)
    assert list_gpu_processes(look) == [
        {
            "pid": stranger.pid,
            "used": 1000,
            "ours": False,
            "user": getpass.getuser(),
            "program": program,
        }
    ]
    assert "secret" not in json.dumps(look())


def test_an_unreadable_process_is_a_stranger_without_a_name(
    look: Look, uses: Callable[..., None]
) -> None:
    uses(4194305)  # above any pid that a kernel gives
    assert list_gpu_processes(look) == [
        {"pid": 4194305, "used": 1000, "ours": False, "user": None, "program": None}
    ]


def test_a_rank_and_its_forks_are_ours_and_looks_change_nothing(
    look: Look, uses: Callable[..., None], node: Node, stranger: subprocess.Popen[bytes]
) -> None:
    (rank,) = node.run(
        1,
        python_command(
            "import subprocess, time; subprocess.Popen(['sleep', '1000']); time.sleep(1000)"
        ),
        ranks=1,
    ).values()
    child = wait_for(
        lambda: [
            pid
            for pid in node.list_processes()
            if Path(f"/proc/{pid}/comm").read_text() == "sleep\n"
        ]
    )[0]
    uses(rank, child, stranger.pid)
    assert {each["pid"]: each["ours"] for each in list_gpu_processes(look)} == {
        rank: True,
        child: True,
        stranger.pid: False,
    }
    assert [
        each["ours"]
        for each in expect_done(node.order("probe", within=10.0, kernel_since=None))["gpus"][
            "gpus"
        ][1]["processes"]
    ].count(True) == 2


def test_a_rank_that_overwrote_its_environment_has_its_session(
    look: Look, uses: Callable[..., None], node: Node
) -> None:
    (rank,) = node.run(1, ["env", "-i", "sleep", "1000"], ranks=1).values()
    wait_for(lambda: not Path(f"/proc/{rank}/environ").read_bytes())
    uses(rank)
    assert [each["ours"] for each in list_gpu_processes(look)] == [True]


def test_what_a_dead_generation_left_behind_is_a_stranger(
    look: Look, uses: Callable[..., None], node: Node
) -> None:
    """No supervisor keeps it any more, so that it is in the way of the next job."""
    environment = {
        **os.environ,
        "RELAUNCH_TOKEN": "default/llama/4/9",
        "RELAUNCH_NODE_STATE": str(node.state),
    }
    with subprocess.Popen(["sleep", "1000"], env=environment) as left:
        uses(left.pid)
        assert [each["ours"] for each in list_gpu_processes(look)] == [False]
        left.kill()


def test_a_rank_of_another_node_here_is_ours_but_no_mere_claim(
    make_node: Callable[..., Node], tmp_path: Path, stranger: subprocess.Popen[bytes]
) -> None:
    node, other = make_node("n1"), make_node("n2")
    (rank,) = other.run(1, ["sleep", "1000"], ranks=1).values()
    assert gpu_users.select_own(node.state, [rank, stranger.pid]) == [rank]
    liar = {
        **os.environ,
        "RELAUNCH_TOKEN": "default/llama/1/1",
        "RELAUNCH_NODE_STATE": "/proc/1/root",
    }
    with subprocess.Popen(["sleep", "1000"], env=liar) as process:
        try:
            wait_for(lambda: b"RELAUNCH_TOKEN" in Path(f"/proc/{process.pid}/environ").read_bytes())
            assert gpu_users.select_own(node.state, [process.pid]) == []
        finally:
            process.kill()


def test_a_tool_that_we_run_on_the_gpus_is_ours(node: Node) -> None:
    marked = {**os.environ, "RELAUNCH_HOLD": "diagnose", "RELAUNCH_NODE_STATE": str(node.state)}
    with subprocess.Popen(["sleep", "1000"], env=marked) as tool:
        try:
            # The kernel shows the environment of a new program a moment after it has begun.
            wait_for(lambda: gpu_users.select_own(node.state, [tool.pid]) == [tool.pid])
        finally:
            tool.kill()


@pytest.mark.long  # the contract of the backends has it
def test_gpus_are_not_read_while_the_node_is_held(look: Look, node: Node, programs: Path) -> None:
    install_tool(programs, "dcgmi", seconds=1000)
    node.begin("diagnose", id="r1", level=1, within=60.0)
    wait_for(lambda: calls(programs, "dcgmi"))
    answer = look()
    assert answer["held"]["by"] == "diagnose"
    assert "gpus" not in answer


# --- the bindings ---------------------------------------------------------------------------------


@pytest.fixture
def read(agent: Path, tmp_path: Path, nvml_built: Path) -> Callable[[], dict[str, Any]]:
    """Ask NVML in the process that the agent asks it in.

    `by` says which file the bindings came from.
    """
    install_nvml(tmp_path / "lib", nvml_built)
    (tmp_path / "state").mkdir(mode=0o700)
    code = (
        "import atexit, runpy, sys\n"
        "sys.argv = sys.argv[1:]\n"
        "atexit.register(lambda: sys.stderr.write(sys.modules['pynvml'].__file__ + ' ' + "
        "str(sys.modules['pynvml'].__cached__)))\n"
        "import os; os._exit = sys.exit\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )

    def read() -> dict[str, Any]:
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": str(tmp_path / "lib"),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        words = [
            sys.executable,
            "-S",
            "-c",
            code,
            str(agent),
            "nvml",
            "inventory",
            str(tmp_path / "state"),
        ]
        ran = subprocess.run(
            words,
            capture_output=True,
            env={**environment, "PYTHONPYCACHEPREFIX": str(tmp_path / "evil")},
            timeout=60,
        )
        assert ran.returncode == 0, ran.stderr
        path, cached = ran.stderr.decode().split()
        return {**json.loads(ran.stdout), "by": Path(path), "cached": Path(cached)}

    return read


def test_bindings_are_unpacked_once_and_bytecode_stays_private(
    read: Callable[[], Any], tmp_path: Path
) -> None:
    first = read()
    assert len(first["gpus"]) == 2
    assert first["by"].is_relative_to(tmp_path / "state/pynvml")
    assert first["cached"].parent.parent == first["by"].parent, (
        "whatever the environment says of caches"
    )
    written = first["cached"].stat().st_mtime_ns
    assert [
        path.stat().st_mode & 0o077
        for path in (first["by"], first["by"].parent, first["by"].parent.parent)
    ] == [0, 0, 0]
    assert read() == first
    assert first["cached"].stat().st_mtime_ns == written, "compiled once"
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    "what",
    ["place", "cache", *(pytest.param(one, marks=pytest.mark.long) for one in ("folder", "file"))],
)
def test_bindings_that_others_can_write_are_never_imported(
    read: Callable[[], Any], tmp_path: Path, agent: Path, what: str
) -> None:
    first = read()
    folder = first["by"].parent
    {
        "place": folder.parent,
        "folder": folder,
        "file": first["by"],
        "cache": first["cached"].parent,
    }[what].chmod(0o777)
    again = read()
    assert again["gpus"] == first["gpus"]
    if what == "place":
        assert again["by"].parent == agent, "who owns the place above it could exchange it"
    else:
        assert again["by"] == first["by"], "unpacked again"
        assert not folder.stat().st_mode & 0o022


@pytest.mark.long
def test_a_link_in_their_place_is_taken_away_and_not_followed(
    read: Callable[[], Any], tmp_path: Path
) -> None:
    first = read()
    folder = first["by"].parent
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert read() == first
    assert not folder.is_symlink()
    assert (tmp_path / "elsewhere").is_dir()


def test_torn_bindings_are_unpacked_again(read: Callable[[], Any]) -> None:
    first = read()
    first["by"].write_text("torn")
    assert read()["by"] == first["by"]
    first["cached"].write_bytes(first["cached"].read_bytes()[:-5000])
    assert read()["gpus"] == first["gpus"]


def test_a_node_that_cannot_keep_them_reads_all_the_same(
    read: Callable[[], Any], tmp_path: Path, agent: Path
) -> None:
    (tmp_path / "state/pynvml").write_text("a file where a folder belongs")
    again = read()
    assert (again["by"].parent, len(again["gpus"])) == (agent, 2)


@pytest.mark.long
def test_bindings_of_another_version_go_after_a_month_unread(
    read: Callable[[], Any], tmp_path: Path
) -> None:
    place = tmp_path / "state/pynvml"
    ages = {"old": 31, "young": 29}
    for name, days in ages.items():
        (place / name).mkdir(parents=True, mode=0o700)
        os.utime(place / name, (time.time() - days * 86400,) * 2)
    place.chmod(0o700)
    first = read()
    assert sorted(path.name for path in place.iterdir()) == sorted(
        [first["by"].parent.name, "young"]
    )


@pytest.mark.long
def test_two_readings_at_once_unpack_them_and_neither_minds(node: Node, look: Look) -> None:
    with subprocess.Popen(
        [sys.executable, "-S", str(node.agent), "list"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=node.environment,
    ) as other:
        assert other.stdin is not None
        other.stdin.write(json.dumps({"protocol": 1, "gpus": True}).encode())
        other.stdin.close()
        assert len(look()["gpus"]["gpus"]) == 2
        assert other.stdout is not None
        assert len(json.loads(other.stdout.read())["gpus"]["gpus"]) == 2
    assert [path.name[0] for path in (node.state / "pynvml").iterdir()] != ["."]
    assert len(list((node.state / "pynvml").iterdir())) == 1
