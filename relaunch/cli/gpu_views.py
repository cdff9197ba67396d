"""Formats the GPU inventory of a node as a table cell, remarks, lines and JSON.

Pure: values in, text out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from relaunch.cli.job_views import age
from relaunch.pool.inventory import UNKNOWN, Inventory, describe_uses
from relaunch.pool.nodes import INVENTORY_INTERVAL
from relaunch.pool.state import NodeRecord, NodeStatus


def model(inventory: Inventory | None) -> str:
    """Return the GPU model, such as `H100 80GB HBM3`."""
    return (
        ", ".join(name.removeprefix("NVIDIA ") for name in inventory.model.split(", "))
        if inventory
        else ""
    )


def cell(record: NodeRecord, used: int) -> str:
    """Return the table cell, such as `2/8 x H100 80GB HBM3`."""
    if not record.spec.gpus:
        return "-"
    kind = model(record.inventory)
    return f"{used}/{record.spec.gpus}" + (f" x {kind}" if kind else "")


def remarks(record: NodeRecord) -> list[str]:
    """Return why some GPUs of the node are not given to jobs, one remark per reason."""
    if record.inventory is None or not record.spec.gpus:
        return []
    # A suspect node has this as its reason already.
    told = record.remarks if record.status is NodeStatus.IN_SERVICE else ()
    if record.inventory.unreadable and not record.fault:
        told = (*told, f"GPUs unreadable: {record.inventory.unreadable}")
    return [part for part in (*told, describe_uses(record.foreign_processes)) if part]


def as_json(record: NodeRecord, iso: str | None) -> dict[str, Any] | None:
    """Return the value of the JSON key `inventory`; `iso` is the time of the reading."""
    found = record.inventory
    if found is None:
        return None
    return {
        "model": found.model,
        "answering": found.count,
        "memory": found.memory,
        "memory_used": [None if used == UNKNOWN else used << 20 for used in found.memory_used],
        "driver": found.driver,
        "nvml": found.nvml,
        "used": [{"gpus": list(use.gpus), "who": use.who} for use in found.used],
        "lost": list(found.lost),
        "fault": found.fault or None,
        "reset_wanted": found.reset_wanted or None,
        "unreadable": found.unreadable or None,
        "read_at": iso,
    }


def lines(record: NodeRecord, jobs: Mapping[int, Sequence[str]], now: datetime) -> list[str]:
    """Return the lines for `nodes show`; `jobs` has the jobs that have claimed each GPU."""
    found = record.inventory
    if found is None or not record.spec.gpus:
        return []
    if record.inventory_at is None:
        when = "read before the last action on the node"
    elif (since := now - record.inventory_at) >= 2 * INVENTORY_INTERVAL and not jobs:
        when = f"no change for {age(since)}"  # those of a node that jobs have are not read again
    else:
        when = f"read {age(since)} ago"
    if found.unreadable:
        return [f"gpus        GPUs unreadable: {found.unreadable}; {when}"]
    versions = f"driver {found.driver or 'unknown'}, NVML {found.nvml or 'unknown'}"
    told = [
        f"gpus        {found.count} x {model(found) or 'unknown'}, {found.memory >> 20} MiB each; "
        f"{versions}; {when}"
    ]
    told += [f"lost        {lost}" for lost in found.lost]
    for index, used in enumerate(found.memory_used):
        if used != UNKNOWN:
            who = [
                *(f"job {job}" for job in jobs.get(index, ())),
                *(use.who for use in found.used if index in use.gpus),
            ]
            told.append(
                f"gpu {index:<7} {used} of {found.memory >> 20} MiB used"
                + (f"; {', '.join(who)}" if who else "")
            )
    return told
