"""What a node says of itself before it is trusted with ranks.

And whether what it started outlives the connection.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from real_node import PATIENCE, Node, expect_done, is_alive, read_name, refusal, wait_for

from relaunch.agent.folders import find_mount
from relaunch.agent.node import preflight
from relaunch.agent.state import read_boot_id

OLD_PYTHON = Path("~/.pyenv/versions/3.8.18/bin/python3.8").expanduser()
ASKED = {"within": 10.0, "listen": None, "stay": 30.0, "gpus": False}


def ask(node: Node, **more: Any) -> dict[str, Any]:
    return expect_done(node.order("preflight", **{**ASKED, **more}))


def meet(
    node: Node, left: Any = None, peer: Any = None, wait: float = 0.0, **more: Any
) -> dict[str, Any]:
    return expect_done(node.order("meet", left=left, peer=peer, wait=wait, **more))


def identity(left: dict[str, Any]) -> dict[str, Any]:
    return {name: left[name] for name in ("pid", "started")}


def place(left: dict[str, Any]) -> dict[str, Any]:
    return {name: left[name] for name in ("address", "port", "word")}


def test_a_node_says_what_it_runs_with_and_where_it_keeps_things(node: Node) -> None:
    answer = ask(node)
    assert answer["boot_id"] == read_boot_id(node.state)
    assert answer["python"] == ".".join(str(part) for part in sys.version_info[:3])
    assert answer["uid"] == os.geteuid()
    assert answer["state"]["path"] == str(node.state)
    told = subprocess.run(
        ["df", "--output=fstype", str(node.state)], capture_output=True, text=True, check=True
    ).stdout.split()
    assert answer["state"]["type"] == told[-1]
    own = socket.gethostbyname(socket.gethostname())
    assert answer["host"] == {
        "name": socket.gethostname(),
        "loopback": own if own.startswith("127.") else None,
    }
    assert (answer["left"], answer["nvidia_smi"], answer["gpu_reset"]) == (None, None, None)


def test_what_it_leaves_outlives_the_connection_and_is_found(
    node: Node,
) -> None:
    left = ask(node, listen="127.0.0.1")["left"]
    assert wait_for(lambda: read_name(left["pid"]) == "relaunch-stay")
    node.end_session()
    began = time.monotonic()
    answer = meet(node, identity(left), place(left))
    assert answer["lives"] is True
    assert 0 <= answer["met"]["took"] < time.monotonic() - began
    assert meet(node, identity(left), end=True)["lives"] is True
    wait_for(lambda: not is_alive(left["pid"]), "it got the order to end")
    assert meet(node, identity(left))["lives"] is False


def test_processes_ended_by_a_logout_are_noticed_during_the_wait(node: Node) -> None:
    left = ask(node, listen="127.0.0.1")["left"]
    asked = node.begin("meet", left=identity(left), peer=None, wait=100 * PATIENCE)
    os.kill(left["pid"], 15)
    assert expect_done(asked.read_rest()[-1])["lives"] is False


def test_what_it_leaves_behind_ends_by_itself(node: Node) -> None:
    left = ask(node, listen="127.0.0.1", stay=0.2)["left"]
    wait_for(lambda: not is_alive(left["pid"]))


def test_an_address_that_is_not_the_nodes_own_is_said(node: Node) -> None:
    # TEST-NET-1 of RFC 5737 is assigned to no host.
    left = ask(node, listen="192.0.2.1")["left"]
    assert left.keys() == {"cannot"} and "192.0.2.1" in left["cannot"]


def test_a_neighbour_without_an_answer_is_not_reached(node: Node) -> None:
    left = ask(node, listen="127.0.0.1")["left"]
    assert meet(node, identity(left), end=True)["lives"]
    wait_for(lambda: not is_alive(left["pid"]))
    assert meet(node, peer=place(left))["met"] == {
        "cannot": f"127.0.0.1 port {left['port']}: Connection refused"
    }


def test_another_node_at_the_neighbours_address_is_no_neighbour(node: Node) -> None:
    left = ask(node, listen="127.0.0.1")["left"]
    met = meet(node, peer={**place(left), "word": "another node's"})["met"]
    assert "two machines" in met["cannot"]


def test_an_order_that_makes_no_sense_is_refused(node: Node) -> None:
    assert refusal(node.order("meet", left={"pid": "x"}, peer=None, wait=0.0)) == "bad_order"
    assert (
        refusal(
            node.order(
                "meet",
                left=None,
                peer={"address": "127.0.0.1", "port": 70000, "word": "w"},
                wait=0.0,
            )
        )
        == "bad_order"
    )
    assert refusal(node.order("preflight", **{**ASKED, "gpus": "yes"})) == "bad_order"


def test_tools_are_tried_where_there_are_gpus(node: Node, programs: Path) -> None:
    (programs / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 80GB HBM3'\n")
    (programs / "dcgmi").write_text(
        "#!/bin/sh\necho 'Error: unable to establish a connection to the specified host: "
        "localhost'\nexit 1\n"
    )
    for program in programs.iterdir():
        program.chmod(0o755)
    answer = ask(node, gpus=True)
    assert answer["nvidia_smi"] == {
        "path": str(programs / "nvidia-smi"),
        "exit_code": 0,
        "said": "GPU 0: NVIDIA H100 80GB HBM3",
    }
    assert answer["dcgmi"]["exit_code"] == 1
    assert "unable to establish a connection" in answer["dcgmi"]["said"]


SUDO = """#!/bin/sh
[ "$1 $2" = "-n -l" ] || { echo "it was to be asked, not to be run: $*" >&2; exit 99; }
shift 2
case "$*" in "systemctl reboot") echo /usr/bin/systemctl reboot ;; \
*) echo "sudo: a password is required" >&2; exit 1 ;; esac
"""


def test_sudo_is_asked_what_it_would_run_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sudo").write_text(SUDO)
    (tmp_path / "sudo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    until = time.monotonic() + 60
    assert preflight._check_permission(["sudo", "-n", "systemctl", "reboot"], until) == {
        "command": "systemctl reboot",
        "sudo": True,
    }
    denied = preflight._check_permission(
        ["sudo", "-n", "/usr/bin/nvidia-smi", "--gpu-reset"], until
    )
    assert denied["cannot"].endswith("sudo: a password is required")


@pytest.mark.parametrize(
    ("allowed", "is_wide"),
    [("*--gpu-reset -i 0000:3B:00.0", False), ("*--gpu-reset*", True), ("*", False)],
)
def test_a_rule_that_also_lets_files_be_written_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: str, is_wide: bool
) -> None:
    """`*`: a user who may run everything has been given that on purpose."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 0000:3B:00.0\n")
    (tmp_path / "sudo").write_text(SUDO.replace('"systemctl reboot"', allowed.replace(" ", "\\ ")))
    for path in (program, tmp_path / "sudo"):
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("RELAUNCH_SUDO", "1")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    answer = preflight._check_gpu_reset(time.monotonic() + 60)
    assert answer["command"] == f"{program} --gpu-reset -i 0000:3B:00.0", "the node's own GPU"
    assert "cannot" not in answer
    assert ("allows" in answer) is is_wide


def test_a_missing_sudo_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert (
        preflight._check_permission(["sudo", "-n", "systemctl", "reboot"], 0.0)["missing"] == "sudo"
    )


@pytest.mark.skipif(not OLD_PYTHON.exists(), reason="no Python 3.8 here")
def test_a_preflight_on_python_3_8(make_node: Any) -> None:
    node = make_node(interpreter=str(OLD_PYTHON))
    answer = ask(node, listen="127.0.0.1", gpus=True)
    assert answer["python"] == "3.8.18"
    assert meet(node, identity(answer["left"]), place(answer["left"]), end=True)["lives"]


def test_the_longest_mount_point_above_a_folder_is_taken() -> None:
    assert find_mount(Path("/proc/self"))["type"] == "proc"
    assert find_mount(Path("/process"))["mounted"] == "/", (
        "a name that only begins alike is not below it"
    )


def test_the_session_of_a_login_is_found_in_its_cgroup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "CGROUP", str(tmp_path / "cgroup"))
    (tmp_path / "cgroup").write_text("0::/user.slice/user-1000.slice/session-12.scope\n")
    assert preflight._find_session() == "session-12.scope"
    (tmp_path / "cgroup").write_text("0::/system.slice/ssh.service\n")
    assert preflight._find_session() is None
