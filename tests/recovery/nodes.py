"""Small builders for tables: what a node answers to a probe and to diagnose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.recovery.builders import T0

SAMPLES = Path(__file__).parent / "samples" / "dcgm" / "synthetic"
WALL = T0.timestamp()
UNSUPPORTED = {"unreadable": "NOT_SUPPORTED"}
NO_NVML = {"unreadable": "NVML did not answer within 10 s"}


def sample(name: str) -> str:
    return (SAMPLES / name).read_text()


PASS, FAULTY = sample("v4_r1_pass_8gpu.json"), sample("v4_r2_gpu6_faulty_memory_isolate.json")


def bus(index: int) -> str:
    return f"00000000:{index + 5:02X}:00.0"


def gpu(index: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "index": index,
        "uuid": f"GPU-{index}",
        "bus_id": bus(index),
        "name": "NVIDIA H100 80GB HBM3",
        "memory": {"total": 85520809984, "used": 0},
        "processes": [],
        "ecc": {"volatile_uncorrected": 0, "aggregate_uncorrected": 0},
        "remapped": {"correctable": 0, "uncorrectable": 0, "pending": False, "failed": False},
        "retired_pending": UNSUPPORTED,
        "recovery_action": 0,
        "throttle": 1,
        "nvlink_errors": {"crc": 0, "replay": 0, "recovery": 0},
        "nvlink_inactive": [],
        "temperature": 34,
        "pcie_replays": 0,
        **changes,
    }


def nvml(*rows: Any, count: int = 8) -> dict[str, Any]:
    """Eight healthy GPUs, the first of them as given."""
    return {
        "driver": "570.148.08",
        "nvml": "13.570",
        "gpus": [*rows, *(gpu(index) for index in range(len(rows), count))],
    }


def disk(path: str = "/var/tmp/relaunch", **changes: Any) -> dict[str, Any]:
    return {
        "path": path,
        "total": 10**12,
        "free": 6 * 10**11,
        "inodes_free": 58_000_000,
        "writable": True,
        **changes,
    }


def probe(**changes: Any) -> dict[str, Any]:
    """A healthy node that is free; a value of `...` leaves the key out."""
    facts = {
        "outcome": "done",
        "boot_id": "boot-1",
        "stamp": 1000.5,
        "wall": WALL,
        "load": 0.5,
        "memory": {"total": 2048 << 30, "available": 1990 << 30},
        "disks": [disk(), disk("/dev/shm")],
        "gpus": nvml(),
        "kernel": {"lines": []},
        "links": {"ports": []},
        "resets": [],
        "jobs": [],
        "held": None,
        "reboots": [],
        **changes,
    }
    return {key: value for key, value in facts.items() if value is not ...}


def diag(stdout: Any = PASS, exit_code: Any = 0, **changes: Any) -> dict[str, Any]:
    answer = {
        "outcome": "done",
        "boot_id": "boot-1",
        "exit_code": exit_code,
        "stdout": stdout,
        "stderr": "",
        "took": 3.0,
        **changes,
    }
    return {key: value for key, value in answer.items() if value is not ...}


def journal(*entries: tuple[float, str], boot_id: str = "boot-0") -> list[dict[str, Any]]:
    """Reboots so many seconds ago, by id."""
    return [
        {"at": WALL - ago, "id": id_, "reason": "Xid 79", "boot_id": boot_id}
        for ago, id_ in entries
    ]
