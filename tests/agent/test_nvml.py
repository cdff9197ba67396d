"""Readings of NVML by the agent's process over a double of the library.

Values, reasons, and drivers that misbehave.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_node import Node, is_alive

from tests.doubles.install import HEALTHY, build_nvml, install_nvml

Ask = Callable[..., dict[str, Any]]
OLD_PYTHON = Path("~/.pyenv/versions/3.8.18/bin/python3.8").expanduser()


@pytest.fixture
def ask(agent: Path, tmp_path: Path, nvml_built: Path) -> Ask:
    """Read with a library that says this."""

    def ask(
        said: str = HEALTHY, built: Path = nvml_built, interpreter: str = sys.executable
    ) -> dict[str, Any]:
        install_nvml(tmp_path / "lib", built, said)
        environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path / "lib")}
        done = subprocess.run(
            [interpreter, "-S", str(agent), "nvml"],
            capture_output=True,
            env=environment,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer

    return ask


def test_a_healthy_gpu_is_read_whole(ask: Ask) -> None:
    answer = ask(HEALTHY + "process 0 4242 1000\n")
    assert (answer["driver"], answer["nvml"], len(answer["gpus"])) == ("570.124.06", "13.570.0", 2)
    assert answer["gpus"][0] == {
        "index": 0,
        "uuid": "GPU-fake-0",
        "bus_id": "00000000:05:00.0",
        "name": "NVIDIA Fake H100",
        "memory": {"total": 80 << 30, "used": 1 << 30},
        "processes": [{"pid": 4242, "used": 1000}],
        "ecc": {"volatile_uncorrected": 0, "aggregate_uncorrected": 0},
        "remapped": {"correctable": 0, "uncorrectable": 0, "pending": False, "failed": False},
        "retired_pending": False,
        "recovery_action": 0,
        "throttle": 0,
        "nvlink_errors": {"crc": 0, "replay": 0, "recovery": 0},
        "nvlink_inactive": [],
        "temperature": 41,
        "pcie_replays": 0,
    }


def test_every_fault_is_reported_for_its_gpu(ask: Ask) -> None:
    faults = (
        "remapped 1 2 3 1 0\nretired 1\nrecovery 1 7\necc 1 4 9\nthrottle 1 72\ninactive 1 0\n"
        "inactive 1 17\nnvlink 1 6\n"
        "process 1 7 5\nprocess 1 8 6\n"
    )
    first, second = ask(HEALTHY + faults)["gpus"]
    assert first["remapped"]["pending"] is False
    assert second["remapped"] == {
        "correctable": 2,
        "uncorrectable": 3,
        "pending": True,
        "failed": False,
    }
    assert (second["retired_pending"], second["recovery_action"], second["throttle"]) == (
        True,
        7,
        72,
    )
    assert second["ecc"] == {"volatile_uncorrected": 4, "aggregate_uncorrected": 9}
    assert second["nvlink_inactive"] == [0, 17]
    assert second["nvlink_errors"] == {"crc": 12, "replay": 6, "recovery": 6}
    assert second["processes"] == [{"pid": 7, "used": 5}, {"pid": 8, "used": 6}]
    assert ask(HEALTHY + "remapped 0 0 1 0 1\n")["gpus"][0]["remapped"]["failed"] is True


def test_a_gpu_without_a_handle_is_lost_and_the_others_are_read(ask: Ask) -> None:
    lost, other = ask(HEALTHY + "lost 0\n")["gpus"]
    assert lost == {"index": 0, "lost": "GPU_IS_LOST", "bus_id": None}
    assert other["recovery_action"] == 0


def test_a_gpu_lost_while_it_is_read_is_lost_by_its_bus_id(ask: Ask) -> None:
    _, lost = ask(HEALTHY + "error nvmlDeviceGetMemoryInfo 1 15\n")["gpus"]
    assert lost == {"index": 1, "lost": "GPU_IS_LOST", "bus_id": "00000000:06:00.0"}


def test_what_cannot_be_read_has_a_word_and_costs_nothing_else(ask: Ask) -> None:
    gpu = ask(
        HEALTHY
        + (
            "error nvmlDeviceGetRetiredPagesPendingStatus 0 3\n"
            "error nvmlDeviceGetTotalEccErrors 0 4242\n"
        )
    )["gpus"][0]
    assert gpu["retired_pending"] == {"unreadable": "NOT_SUPPORTED"}
    assert gpu["ecc"] == {"unreadable": "ERROR_4242"}
    assert gpu["temperature"] == 41


def test_links_are_asked_for_up_to_the_last_and_only_if_any(ask: Ask) -> None:
    assert ask(HEALTHY + "error nvmlDeviceGetNvLinkState 0 3\n")["gpus"][0]["nvlink_inactive"] == {
        "unreadable": "NOT_SUPPORTED"
    }
    assert ask(HEALTHY + "error nvmlDeviceGetNvLinkState 0 999\n")["gpus"][0][
        "nvlink_inactive"
    ] == {"unreadable": "UNKNOWN"}


def test_a_library_without_functions_is_asked_by_older_names(ask: Ask, tmp_path: Path) -> None:
    gpu = ask(HEALTHY + "throttle 0 64\n", build_nvml(tmp_path / "old", old=True))["gpus"][0]
    assert gpu["remapped"] == {"unreadable": "FUNCTION_NOT_FOUND"}
    assert gpu["recovery_action"] == {"unreadable": "INVALID_ARGUMENT"}
    assert gpu["throttle"] == 64


def test_a_driver_that_is_not_loaded_is_said(ask: Ask) -> None:
    assert ask(HEALTHY + "error nvmlInitWithFlags 0 9\n") == {
        "unreadable": "NVML: DRIVER_NOT_LOADED"
    }


def test_what_the_library_prints_is_not_taken_for_the_answer(ask: Ask) -> None:
    assert len(ask(HEALTHY + "noise\n")["gpus"]) == 2


@pytest.mark.skipif(not OLD_PYTHON.exists(), reason="no Python 3.8 here")
def test_the_bindings_serve_python_3_8(ask: Ask) -> None:
    assert ask(interpreter=str(OLD_PYTHON)) == ask()


# --- by a probe -----------------------------------------------------------------------------------


@pytest.fixture
def probe(node: Node, tmp_path: Path, nvml_built: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / "lib"))

    def probe(said: str | None, within: float = 20.0) -> dict[str, Any]:
        if said is not None:
            install_nvml(tmp_path / "lib", nvml_built, said)
        answer = node.order("probe", within=within, kernel_since=None)
        assert answer is not None
        gpus: dict[str, Any] = answer["gpus"]
        return gpus

    return probe


def test_a_probe_tells_what_nvml_said(probe: Ask) -> None:
    assert [gpu["bus_id"] for gpu in probe(HEALTHY)["gpus"]] == [
        "00000000:05:00.0",
        "00000000:06:00.0",
    ]


def test_a_node_without_nvml_says_so(probe: Ask) -> None:
    gpus = probe(None)
    assert gpus.keys() == {"unreadable"} and gpus["unreadable"].startswith("libnvidia-ml.so.1 ")


def test_a_library_that_is_none_is_not_said_to_be_missing(probe: Ask, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libnvidia-ml.so.1").write_text("garbage")
    assert probe(None)["unreadable"].startswith("libnvidia-ml.so.1 cannot")


def words(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


@pytest.mark.parametrize("function", ["nvmlInitWithFlags", "nvmlDeviceGetMemoryInfo"])
def test_nvml_that_hangs_hangs_no_probe_and_is_killed(
    probe: Ask, node: Node, function: str
) -> None:
    gpus = probe(HEALTHY + f"hang {function}\n", within=4.0)
    assert gpus["hangs"] is True and "within 2 s" in gpus["unreadable"]
    assert not [pid for pid in node.list_processes() if b"nvml" in words(pid) and is_alive(pid)]
    assert node.order("list")["held"] is None  # type: ignore[index]


def test_nvml_that_crashes_ends_its_own_process_only(probe: Ask) -> None:
    gpus = probe(HEALTHY + "crash nvmlDeviceGetName\n")
    assert gpus.keys() == {"unreadable"} and "signal 11" in gpus["unreadable"]
