"""Diagnosing a real node and resetting its GPUs: alone on it, and never under ranks.

The tools are doubles.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from real_node import TIMES, Node, expect_done, is_alive, refusal, token, wait_for

from relaunch.agent import processes
from relaunch.agent.node import hold, reboots, repairs
from relaunch.agent.protocol import Refusal
from relaunch.agent.state import read_boot_id
from relaunch.backends import local_power
from relaunch.backends.session import ANSWER_TIMEOUT
from tests.doubles.install import HEALTHY, calls, install_nvml, install_tool, pids

OLD_PYTHON = Path("~/.pyenv/versions/3.8.18/bin/python3.8").expanduser()


def diagnosis(**more: Any) -> dict[str, Any]:
    return {"id": "r1", "level": 2, "within": 20.0, **more}


def read_holder(node: Node) -> Any:
    return expect_done(node.order("list"))["held"]


# --- diagnose -------------------------------------------------------------------------------------


def test_a_diagnosis_is_what_dcgmi_printed(node: Node, programs: Path) -> None:
    install_tool(programs, "dcgmi", stdout='{"DCGM": 1}', stderr="a warning", exit_code=226)
    began = time.monotonic()
    answer = expect_done(node.order("diagnose", **diagnosis()))
    assert 0 <= answer["took"] < time.monotonic() - began
    assert calls(programs, "dcgmi") == [["diag", "-r", "2", "-j"]]
    assert answer["boot_id"] == read_boot_id(node.state)
    assert (answer["exit_code"], answer["stdout"], answer["stderr"]) == (
        226,
        '{"DCGM": 1}',
        "a warning",
    )
    assert "cut" not in answer
    assert read_holder(node) is None
    assert not (node.state / "held.json").exists()


def test_a_node_without_dcgmi_says_so(
    node: Node, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(programs))
    missing = expect_done(node.order("diagnose", **diagnosis()))["missing"]
    assert missing.startswith("dcgmi ")


def test_a_dcgmi_that_cannot_be_run_is_refused(node: Node, programs: Path) -> None:
    (programs / "dcgmi").write_text("#!/no/such/interpreter\n")
    (programs / "dcgmi").chmod(0o755)
    assert refusal(node.order("diagnose", **diagnosis())) == "cannot_start"
    assert read_holder(node) is None


def test_output_without_end_is_cut_and_said_to_be(node: Node, programs: Path) -> None:
    install_tool(programs, "dcgmi", stdout="x" * 65536, repeat=40, stderr="e" * 9000 + "last")
    answer = expect_done(node.order("diagnose", **diagnosis()))
    assert (len(answer["stdout"]), answer["cut"]) == (1024 * 1024, True)
    assert len(answer["stderr"]) == 4096
    assert answer["stderr"].endswith("last")


def test_bytes_that_are_no_text_are_reported_as_text(node: Node, programs: Path) -> None:
    (programs / "dcgmi").write_text("#!/bin/sh\nprintf '\\377\\376garbage'\n")
    (programs / "dcgmi").chmod(0o755)
    assert expect_done(node.order("diagnose", **diagnosis()))["stdout"] == "��garbage"


def test_a_diagnosis_that_hangs_is_killed_in_time_with_its_forks(
    node: Node, programs: Path
) -> None:
    install_tool(programs, "dcgmi", stdout="never", seconds=1000, stubborn=True, children=2)
    began = time.monotonic()
    answer = expect_done(node.order("diagnose", **diagnosis(within=2.0)))
    assert 1.0 < time.monotonic() - began < 30
    assert (answer["exit_code"], answer["stdout"]) == (None, "")
    assert len(pids(programs, "dcgmi")) == 3
    wait_for(lambda: not any(map(is_alive, pids(programs, "dcgmi"))))
    assert read_holder(node) is None
    assert expect_done(node.prepare(1))


def test_what_a_diagnosis_leaves_in_its_group_ends_with_it(node: Node, programs: Path) -> None:
    install_tool(programs, "dcgmi", stdout="{}", children=1)
    assert expect_done(node.order("diagnose", **diagnosis()))["exit_code"] == 0
    wait_for(lambda: not any(map(is_alive, pids(programs, "dcgmi"))))


def hanging(node: Node, programs: Path) -> list[int]:
    """Have a diagnosis under way that does not end; return the pids of the tool."""
    install_tool(programs, "dcgmi", seconds=1000, stubborn=True, children=1)
    node.begin("diagnose", **diagnosis(within=1000.0))
    return list(wait_for(lambda: len(found := pids(programs, "dcgmi")) == 2 and found))


def test_a_node_under_examination_takes_no_launch_and_no_repair(node: Node, programs: Path) -> None:
    hanging(node, programs)
    holder = read_holder(node)
    assert (holder["by"], holder["id"]) == ("diagnose", "r1")
    refused = node.prepare(1)
    assert refused is not None
    assert refused["why"] == "held" and "(diagnose, r1)" in refused["reason"]
    assert not (node.folder() / "order.json").exists()
    assert refusal(node.order("reboot", **node.make_reboot_order())) == "held"
    assert (
        refusal(
            node.order("reset-gpus", id="r2", boot_id=read_boot_id(node.state), gpus=[], within=5.0)
        )
        == "held"
    )
    assert expect_done(node.order("probe", within=10.0, kernel_since=None))["held"] == holder
    assert reboots.list_newest(node.state) == []


def test_a_killed_holder_holds_nothing_and_its_tool_dies_too(node: Node, programs: Path) -> None:
    tool = hanging(node, programs)
    [holder] = node.list_commands()
    assert refusal(node.prepare(1)) == "held"
    os.kill(holder, signal.SIGKILL)
    answer = expect_done(node.prepare(1))
    assert not any(map(is_alive, tool)), "a launch that was answered has the GPUs for itself"
    assert answer["outcome"] == "done"
    assert not (node.state / "held.json").exists()
    assert read_holder(node) is None


def test_a_holder_killed_before_its_tool_runs_holds_nothing(node: Node, programs: Path) -> None:
    install_tool(programs, "dcgmi", stdout="{}")
    node.set_failpoint("diagnose.held")
    assert node.order("diagnose", **diagnosis()) is None
    assert read_holder(node) is None
    assert calls(programs, "dcgmi") == []
    assert expect_done(node.order("diagnose", **diagnosis()))["exit_code"] == 0
    assert expect_done(node.prepare(1))


def test_a_diagnosis_ends_with_the_session_that_asked_for_it(node: Node, programs: Path) -> None:
    tool = hanging(node, programs)
    node.end_session()
    wait_for(lambda: not any(map(is_alive, tool)))
    install_tool(programs, "dcgmi", stdout="again")
    assert expect_done(node.order("diagnose", **diagnosis()))["stdout"] == "again"


def test_a_diagnosis_waits_for_no_launch_under_way_and_says_so(
    node: Node, programs: Path, tmp_path: Path
) -> None:
    """The older generation's ranks take their time to stop, with the hold shared by the launch."""
    install_tool(programs, "dcgmi", stdout="{}")
    end, grace = tmp_path / "end", 120.0
    waits = f"trap '' TERM; until [ -e {end} ]; do sleep 0.1; done"
    node.run(1, ["sh", "-c", waits], ranks=1, stop_grace=grace)
    launch = node.begin(
        "prepare", token=token(2), address="127.0.0.1", ranks=[0], **{**TIMES, "stop_grace": grace}
    )
    wait_for(
        lambda: (
            "2" in str(json.loads((node.folder().parent / "highest.json").read_text())["prepared"])
        )
    )
    refused = node.order("diagnose", **diagnosis())
    assert refused is not None
    assert refused["why"] == "held" and "launch" in refused["reason"]
    end.touch()
    assert expect_done(launch.read_next())["stopped"] == [[1, 1]]


@pytest.mark.long_after(variants=3)
@pytest.mark.parametrize("command", ["diagnose", "reset-gpus", "reboot"])
@pytest.mark.parametrize("launched", ["prepared", "running"])
def test_nothing_touches_a_node_with_living_or_starting_ranks(
    node: Node, programs: Path, command: str, launched: str
) -> None:
    for tool in ("dcgmi", "nvidia-smi"):
        install_tool(programs, tool)
    ranks: list[int] = []
    if launched == "running":
        ranks = list(node.run(1).values())
    else:
        node.prepare(1)
    orders = {"diagnose": diagnosis(), "reboot": node.make_reboot_order()}
    order = orders.get(
        command, {"id": "r1", "boot_id": read_boot_id(node.state), "gpus": [], "within": 5.0}
    )
    answer = node.order(command, **order)
    assert answer is not None
    assert refusal(answer) == "busy"
    assert answer["reason"].startswith("job j generation 1")
    assert answer["jobs"] == [token(1)]
    assert answer["pids"] == sorted(ranks)
    assert all(map(is_alive, ranks))
    assert [calls(programs, tool) for tool in ("dcgmi", "nvidia-smi")] == [[], []]
    assert not (node.state / "rebooting.json").exists()
    assert reboots.list_newest(node.state) == []
    expect_done(node.stop())
    if command != "reboot":
        assert wait_for(
            lambda: (again := node.order(command, **order)) and again["outcome"] == "done" and again
        )


def test_a_process_of_another_user_on_a_gpu_blocks_a_reset(
    node: Node, programs: Path, tmp_path: Path, nvml_built: Path
) -> None:
    for tool in ("dcgmi", "nvidia-smi"):
        install_tool(programs, tool)
    install_nvml(tmp_path / "libraries", nvml_built, HEALTHY + f"process 1 {os.getpid()} 5\n")
    answers = [
        node.order("diagnose", **diagnosis()),
        node.order(
            "reset-gpus",
            id="r1",
            boot_id=read_boot_id(node.state),
            gpus=["00000000:05:00.0"],
            within=20.0,
        ),
        node.order("reboot", **node.make_reboot_order()),
    ]
    for answer in answers:
        assert answer is not None
        assert refusal(answer) == "busy"
        assert answer["reason"].startswith(f"pid {os.getpid()} ")
        assert answer["reason"].endswith(" 00000000:06:00.0")
        assert answer["pids"] == [os.getpid()]
    assert calls(programs, "nvidia-smi") == []


def reboot(node: Node) -> None:
    """Have a local node reboot itself, which may kill the agent before it has answered."""
    before = read_boot_id(node.state)
    answer = node.order("reboot", **node.make_reboot_order())
    assert answer is None or expect_done(answer)["boot_id"] == before
    wait_for(lambda: read_boot_id(node.state) != before)


def test_a_pid_left_over_in_the_driver_blocks_no_reboot(
    node: Node, programs: Path, tmp_path: Path, nvml_built: Path
) -> None:
    install_nvml(tmp_path / "libraries", nvml_built, HEALTHY + "process 1 4194303 5\n")
    reboot(node)


def test_nvml_that_hangs_is_in_the_way_of_no_reboot(
    node: Node, programs: Path, tmp_path: Path, nvml_built: Path
) -> None:
    install_nvml(tmp_path / "libraries", nvml_built, HEALTHY + "hang nvmlInitWithFlags\n")
    reboot(node)
    # The controller waits twice its timeout for the answer.
    assert hold.HOLD_TIMEOUT + repairs.REBOOT_NVML_TIMEOUT < 2 * ANSWER_TIMEOUT


# --- reset ----------------------------------------------------------------------------------------


def test_a_reset_names_its_gpus_and_tells_how_it_went(
    node: Node, programs: Path, tmp_path: Path, nvml_built: Path
) -> None:
    libraries = tmp_path / "libraries"
    install_nvml(libraries, nvml_built, HEALTHY + "remapped 0 0 1 1 0\n")
    install_tool(
        programs, "nvidia-smi", stdout="All done.\n", then={str(libraries / "nvml.txt"): HEALTHY}
    )
    order = {
        "id": "r1",
        "boot_id": read_boot_id(node.state),
        "gpus": ["00000000:06:00.0", "00000000:05:00.0"],
        "within": 20.0,
    }
    answer = expect_done(node.order("reset-gpus", **order))
    assert (answer["exit_code"], answer["output"]) == (0, "All done.")
    assert calls(programs, "nvidia-smi") == [
        ["--gpu-reset", "-i", "00000000:05:00.0,00000000:06:00.0"]
    ]
    gpus = expect_done(node.order("probe", within=20.0, kernel_since=None))["gpus"]["gpus"]
    assert [gpu["remapped"]["pending"] for gpu in gpus] == [False, False]


def test_a_reset_of_all_names_none_and_quotes_a_failure(node: Node, programs: Path) -> None:
    install_tool(programs, "nvidia-smi", stderr="GPU is in use by another client\n", exit_code=19)
    answer = expect_done(
        node.order("reset-gpus", id="r1", boot_id=read_boot_id(node.state), gpus=[], within=5.0)
    )
    assert (answer["exit_code"], answer["output"]) == (19, "GPU is in use by another client")
    assert calls(programs, "nvidia-smi") == [["--gpu-reset"]]


def test_a_reset_decided_on_another_boot_is_refused_with_ours(node: Node, programs: Path) -> None:
    install_tool(programs, "nvidia-smi")
    answer = node.order("reset-gpus", id="r1", boot_id="of yesterday", gpus=[], within=5.0)
    assert answer is not None
    assert (refusal(answer), answer["boot_id"]) == ("boot_changed", read_boot_id(node.state))
    assert calls(programs, "nvidia-smi") == []


def test_a_reset_goes_on_when_the_session_that_ordered_it_ends(
    node: Node, programs: Path, tmp_path: Path
) -> None:
    install_tool(programs, "nvidia-smi", seconds=1.0, then={str(tmp_path / "finished"): "yes"})
    node.begin("reset-gpus", id="r1", boot_id=read_boot_id(node.state), gpus=[], within=20.0)
    wait_for(lambda: pids(programs, "nvidia-smi"))
    node.end_session()
    wait_for((tmp_path / "finished").exists)


def test_a_node_without_nvidia_smi_says_so(
    node: Node, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(programs))
    answer = expect_done(
        node.order("reset-gpus", id="r1", boot_id=read_boot_id(node.state), gpus=[], within=5.0)
    )
    assert answer["missing"].startswith("nvidia-smi ")


@pytest.mark.skipif(not OLD_PYTHON.exists(), reason="no Python 3.8 here")
def test_a_repair_on_python_3_8(
    make_node: Any, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = make_node("old", interpreter=str(OLD_PYTHON))
    monkeypatch.setenv("RELAUNCH_REBOOT_COMMAND", json.dumps(local_power.command(old.state)))
    install_tool(programs, "dcgmi", stdout="{}", seconds=1000)
    assert expect_done(old.order("diagnose", **diagnosis(within=1.0)))["exit_code"] is None
    reboot(old)
    old.await_session_end()
    assert [
        entry["id"]
        for entry in expect_done(old.order("probe", within=20.0, kernel_since=60))["reboots"]
    ] == ["r1"]


# --- sudo -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uid", "allowed", "reboots_by", "resets_by"),
    [
        (0, None, ["systemctl", "reboot"], []),
        (0, "1", ["systemctl", "reboot"], []),
        (1000, "1", ["sudo", "-n", "systemctl", "reboot"], ["sudo", "-n"]),
        (1000, None, None, []),
        (1000, "yes", None, []),
    ],
)
def test_sudo_is_used_only_where_the_fleet_file_allows_it(
    monkeypatch: pytest.MonkeyPatch,
    uid: int,
    allowed: str | None,
    reboots_by: list[str] | None,
    resets_by: list[str],
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.delenv("RELAUNCH_REBOOT_COMMAND", raising=False)
    monkeypatch.delenv("RELAUNCH_SUDO", raising=False)
    if allowed is not None:
        monkeypatch.setenv("RELAUNCH_SUDO", allowed)
    assert repairs.choose_root_prefix() == resets_by
    if reboots_by is not None:
        assert repairs.reboot_command() == reboots_by
        return
    with pytest.raises(Refusal) as refused:
        repairs.reboot_command()
    assert refused.value.answer["why"] == "cannot_reboot"
    assert all(word in refused.value.answer["reason"] for word in ("uid 1000", "sudo: true"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_program_of_root_that_cannot_be_killed_is_no_error() -> None:
    program = subprocess.Popen(["sleep", "1000"], start_new_session=True)

    def kill_as_other_user() -> None:
        os.setuid(65534)
        processes.kill_group(program.pid, signal.SIGKILL)

    child = processes.fork(kill_as_other_user)
    _, status = os.waitpid(child, 0)
    assert (os.waitstatus_to_exitcode(status), program.poll()) == (0, None)
    program.kill()
    program.wait()
