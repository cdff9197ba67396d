"""What a probe, DCGM and nvidia-smi say of a simulated node with H100s.

As docs/reference/agent-protocol.md, `probe`, has it.

Invents no symptom: a node of which the script says nothing is healthy.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tests.fakes.nodes.script import Sick

_BUSES = (0x1B, 0x43, 0x52, 0x61, 0x9D, 0xC3, 0xD1, 0xDF)
"""Where an HGX H100 board has its eight GPUs."""
_MEMORY = 85520809984
"""Bytes that NVML tells of an H100 with 80 GB: 81559 MiB."""
_GIB = 1 << 30
_DRIVER, _NVML, _DCGM = "570.148.08", "13.570.148.08", "4.6.0"

NO_NVML = "libnvidia-ml.so.1 is not on this node"
NO_DCGMI = "dcgmi is not on this node's PATH"
NO_NVIDIA_SMI = "nvidia-smi is not on this node's PATH"
GPU_IS_LOST = 15
"""Exit code of nvidia-smi, and what NVML answers, for a GPU that has fallen off the bus."""
NOT_FOUND = 6
"""Exit code of nvidia-smi where there is no such GPU."""
_REMAP_PENDING, _REMAP_FAILED, _FALLEN_OFF = 85, 80, 120
"""Error ids of NVIDIA/DCGM dcgmlib/dcgm_errors.h, v4.6.0."""
_ISOLATE, _RESET = 2, 6
"""Its severities."""
_ISOLATE_EXIT, _ERROR_EXIT = 205, 226
"""How dcgmi ends: an error asks for isolation; any other error."""
_TESTS = (
    (1, "Deployment", ("software",)),
    (2, "Hardware", ("memory",)),
    (2, "Integration", ("pcie",)),
    (3, "Hardware", ("diagnostic",)),
    (3, "Stress", ("targeted_stress", "targeted_power")),
)
"""From which level of `dcgmi diag -r` on each category runs which tests (DCGM v4.6.0)."""


def bus_id(gpu: int) -> str:
    return f"00000000:{_BUSES[gpu % 8] + gpu // 8:02X}:00.0"


def condition(sick: Sequence[Sick]) -> dict[str, Any]:
    """Return what a probe tells of everything but GPUs."""
    read_only = any(one.disk_read_only for one in sick)
    reason = {"reason": "it is mounted read-only"} if read_only else {}
    disk = {"free": 612 * _GIB, "inodes_free": 58_000_000, "writable": not read_only, **reason}
    return {
        "load": 0.5,
        "memory": {"total": 2048 * _GIB, "available": 1990 * _GIB},
        "disks": [
            {"path": "/var/tmp/relaunch", "total": 879 * _GIB, **disk},
            {
                "path": "/dev/shm",
                "total": 1024 * _GIB,
                "free": 1024 * _GIB,
                "inodes_free": 258_000_000,
                "writable": True,
            },
        ],
    }


Process = Mapping[str, Any]


def gpus(
    node: str, count: int, sick: Sequence[Sick], used: Mapping[int, Sequence[Process]]
) -> dict[str, Any]:
    """Return what NVML tells of the GPUs.

    Args:
        node: Its name.
        count: How many it has.
        sick: What is wrong with it.
        used: Processes by GPU.
    """
    if count == 0:
        return {"unreadable": NO_NVML}
    for one in sick:
        if one.nvml_unreadable is not None:
            return {"unreadable": one.nvml_unreadable}
    return {
        "driver": _DRIVER,
        "nvml": _NVML,
        "gpus": [_gpu(node, index, sick, used.get(index, ())) for index in range(count)],
    }


def inventory(
    node: str, count: int, sick: Sequence[Sick], used: Mapping[int, Sequence[Process]]
) -> dict[str, Any]:
    """Return the part of it that a look at the node asks for."""
    known = gpus(node, count, sick, used)
    if "gpus" not in known:
        return known
    names = ("index", "uuid", "bus_id", "name", "memory", "processes", "lost")
    names += ("remapped", "retired_pending", "recovery_action")
    return {
        **known,
        "gpus": [{name: gpu[name] for name in names if name in gpu} for gpu in known["gpus"]],
    }


def _gpu(
    node: str, index: int, sick: Sequence[Sick], processes: Sequence[Process]
) -> dict[str, Any]:
    if any(one.gpu_lost == index for one in sick):
        return {"index": index, "lost": "GPU_IS_LOST", "bus_id": bus_id(index)}
    pending = any(one.remap_pending == index for one in sick)
    failed = any(one.remap_failed == index for one in sick)
    actions = [
        one.recovery_action[1]
        for one in sick
        if one.recovery_action is not None and one.recovery_action[0] == index
    ]
    errors = int(pending or failed)
    return {
        "index": index,
        "uuid": f"GPU-{node}-{index}",
        "bus_id": bus_id(index),
        "name": "NVIDIA H100 80GB HBM3",
        "memory": {"total": _MEMORY, "used": len(processes) * _GIB},
        "processes": [{**process, "used": _GIB} for process in processes],
        "ecc": {"volatile_uncorrected": errors, "aggregate_uncorrected": errors},
        "remapped": {
            "correctable": 0,
            "uncorrectable": errors,
            "pending": pending,
            "failed": failed,
        },
        "retired_pending": {"unreadable": "NOT_SUPPORTED"},  # rows are remapped since Ampere
        "recovery_action": max(actions, default=0),
        "throttle": 0 if processes else 1,  # idle
        "nvlink_errors": {"crc": 0, "replay": 0, "recovery": 0},
        "nvlink_inactive": [],
        "temperature": 62 if processes else 31,
        "pcie_replays": 0,
    }


def diagnosed(count: int, level: int, sick: Sequence[Sick]) -> tuple[int, str]:
    """Return how `dcgmi diag -r LEVEL -j` ends, and the document that it prints."""
    errors = {index: list(_errors(index, sick)) for index in range(count)}
    isolates = any(
        error["error_severity"] == _ISOLATE for found in errors.values() for error in found
    )
    fails = any(errors.values())
    categories: dict[str, list[dict[str, Any]]] = {}
    for since, category, names in _TESTS:
        # Once the deployment checks have failed, DCGM runs no more.
        if since <= level and (since == 1 or not fails):
            categories.setdefault(category, []).extend(_test(name, errors) for name in names)
    document = {
        "DCGM Diagnostic": {
            "test_categories": [
                {"category": name, "tests": tests} for name, tests in categories.items()
            ]
        },
        "entity_groups": [
            {
                "entities": [{"device_id": "2330", "entity_id": index} for index in range(count)],
                "entity_group": "GPU",
                "entity_group_id": 1,
            }
        ],
        "metadata": {"Driver Version Detected": _DRIVER, "version": _DCGM},
    }
    return _ISOLATE_EXIT if isolates else _ERROR_EXIT if fails else 0, json.dumps(
        document, indent=1
    )


def _test(name: str, errors: Mapping[int, list[dict[str, Any]]]) -> dict[str, Any]:
    results = []
    for index, found in errors.items():
        warnings = {"warnings": found} if found else {}
        of = {"entity_group": "GPU", "entity_group_id": 1, "entity_id": index}
        results.append({**of, "status": "Fail" if found else "Pass", **warnings})
    return {
        "name": name,
        "results": results,
        "test_summary": {"status": "Fail" if any(errors.values()) else "Pass"},
    }


def _errors(index: int, sick: Iterable[Sick]) -> Iterator[dict[str, Any]]:
    for one in sick:
        if one.gpu_lost == index:
            yield _error(_FALLEN_OFF, _ISOLATE, f"GPU {index} has fallen off the bus.")
        if one.remap_pending == index:
            yield _error(
                _REMAP_PENDING,
                _RESET,
                f"GPU {index} had memory errors and row remappings are pending Reset GPU.",
            )
        if one.remap_failed == index:
            yield _error(
                _REMAP_FAILED,
                _RESET,
                f"GPU {index} had uncorrectable memory errors and row remapping failed.",
            )
        if one.dcgm_error is not None and one.dcgm_error[0] == index:
            yield _error(one.dcgm_error[1], _RESET, f"GPU {index} has what the script says.")


def _error(code: int, severity: int, text: str) -> dict[str, Any]:
    return {"error_category": 10, "error_id": code, "error_severity": severity, "warning": text}


def reset(
    count: int, named: Sequence[str], sick: Sequence[Sick]
) -> tuple[int, str, tuple[int, ...]]:
    """Return how `nvidia-smi --gpu-reset` ends, its output, and the GPUs that it has reset."""
    known = {bus_id(index): index for index in range(count)}
    done: list[int] = []
    lines: list[str] = []
    for name in named or known:
        index = known.get(name)
        if index is None:
            return NOT_FOUND, "\n".join([*lines, f"No devices were found with {name}"]), tuple(done)
        if any(one.gpu_lost == index and one.until != "reset" for one in sick):
            lost = (
                f"Unable to determine the device handle for GPU{index}: {name}: GPU is lost. "
                "Reboot the system to recover this GPU"
            )
            return GPU_IS_LOST, "\n".join([*lines, lost]), tuple(done)
        done.append(index)
        lines.append(f"GPU {name} was successfully reset.")
    return 0, "\n".join([*lines, "All done."]), tuple(done)


def of_gpu(sick: Sick) -> int | None:
    """Return the GPU that it is about; None: the whole node."""
    for index in (sick.gpu_lost, sick.remap_pending, sick.remap_failed):
        if index is not None:
            return index
    for pair in (sick.recovery_action, sick.dcgm_error):
        if pair is not None:
            return pair[0]
    return None
