"""Read what a node reports of itself: its GPUs, the foreign processes on them, and what is wrong.

Processes that relaunch runs are not foreign. A GPU that could not be read counts as neither free
nor used, neither present nor lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relaunch.evidence.fields import MOST_GPUS, count, fields, text, unreadable
from relaunch.text import join_names

MAX_NAMED = 3
"""Users and lost GPUs that are named; the rest is counted. A fleet keeps this for 2,048 nodes, and
continues as new with less than 2 MiB."""
MAX_FAULT = 160
"""Characters of what is wrong with a node."""
MPS_SERVER = "nvidia-cuda-mps-server"
"""NVIDIA's Multi-Process Service. It stays after its clients have gone, and NVML lists the clients
beside it."""
MEMORY_STEP = 128
"""MiB to which memory in use is rounded. That of the ranks of one job is then mostly the same, and
takes no room in the compressed state of a fleet."""
UNKNOWN = -1
"""The memory in use of a GPU that did not report it."""


@dataclass(frozen=True, slots=True)
class GpuUse:
    gpus: tuple[int, ...]
    who: str
    """A user and one of the user's programs: `alice (python, pid 4242 and 7 more)`."""


@dataclass(frozen=True, slots=True)
class Inventory:
    model: str = ""
    """The model of all GPUs; every model if they differ."""
    count: int = 0
    """GPUs that answer."""
    memory: int = 0
    """Bytes of the smallest GPU; 0 if not read."""
    memory_used: tuple[int, ...] = ()
    """MiB by index, rounded up to `MEMORY_STEP`; UNKNOWN where it was not read."""
    driver: str = ""
    nvml: str = ""
    used: tuple[GpuUse, ...] = ()
    """By foreign processes; several may use one GPU."""
    lost: tuple[str, ...] = ()
    """Bus ids, or `GPU 3` where the bus id could not be read either."""
    unreadable: str = ""
    """Why nothing could be read; empty if it was."""
    fault: str = ""
    """Why the node is not fit for jobs, apart from GPUs that are lost or missing."""
    reset_wanted: str = ""
    """Why its GPUs should be reset when they are free, although they work."""


def read_inventory(answer: object, fault: str = "", reset_wanted: str = "") -> Inventory:
    """Read the `gpus` of a node's answer to `list`, or to a probe.

    Args:
        answer: It.
        fault: What `evidence.health.read_condition` found in the whole answer.
        reset_wanted: The same.
    """
    reading = fields(answer)
    rows = reading.get("gpus") if reading is not None else None
    if reading is None or not isinstance(rows, list) or len(rows) > MOST_GPUS:
        return Inventory(
            unreadable=unreadable(answer if reading is None else rows),
            fault=text(fault, MAX_FAULT),
            reset_wanted=text(reset_wanted, MAX_FAULT),
        )
    models: dict[str, None] = {}
    totals: list[int] = []
    memory_used: list[int] = []
    foreign_processes: dict[tuple[str, str], _Stranger] = {}
    lost: list[str] = []
    for index, row in enumerate(rows):
        memory_used.append(UNKNOWN)
        if not isinstance(row, Mapping) or "lost" in row:
            lost.append(_bus(row, index))
            continue
        models[text(row.get("name"), 60)] = None
        memory = fields(row.get("memory")) or {}
        total, taken = count(memory.get("total")), count(memory.get("used"))
        if total is not None and taken is not None:
            totals.append(total)
            memory_used[-1] = -(-(taken >> 20) // MEMORY_STEP) * MEMORY_STEP
        for process in _list_foreign(row.get("processes")):
            name = _name(process.get("user")), _name(process.get("program"))
            foreign_processes.setdefault(name, _Stranger()).uses(index, count(process.get("pid")))
    return Inventory(
        model=", ".join(name for name in models if name),
        count=len(rows) - len(lost),
        memory=min(totals, default=0),
        memory_used=tuple(memory_used),
        driver=text(reading.get("driver"), 40),
        nvml=text(reading.get("nvml"), 40),
        used=_uses(foreign_processes),
        lost=tuple(lost),
        fault=text(fault, MAX_FAULT),
        reset_wanted=text(reset_wanted, MAX_FAULT),
    )


def _bus(row: object, index: int) -> str:
    """Return the bus id as the kernel prints it: NVML writes the domain with eight digits."""
    bus = text(row.get("bus_id"), 40).lower() if isinstance(row, Mapping) else ""
    return (
        bus.removeprefix("0000") if len(bus) == len("00000000:05:00.0") else bus or f"GPU {index}"
    )


class _Stranger:
    """All processes of one program of one user."""

    def __init__(self) -> None:
        self.gpus: dict[int, None] = {}
        self.pids: dict[int | None, None] = {}

    def uses(self, gpu: int, pid: int | None) -> None:
        self.gpus[gpu] = None
        self.pids[pid] = None


def _list_foreign(processes: object) -> list[Mapping[str, Any]]:
    listed = processes if isinstance(processes, list) else []
    # A node that does not say whose processes they are reports no foreign ones.
    return [
        one
        for one in listed
        if isinstance(one, Mapping)
        and one.get("ours") is False
        and one.get("program") != MPS_SERVER
    ]


def _name(value: object) -> str:
    """Return a printable name: users choose the names of programs, and terminals obey control
    characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text(value, 32))


def _uses(foreign_processes: Mapping[tuple[str, str], _Stranger]) -> tuple[GpuUse, ...]:
    named = list(foreign_processes.items())
    uses = [GpuUse(tuple(one.gpus), _who(*name, one)) for name, one in named[:MAX_NAMED]]
    rest = sorted({gpu for _, one in named[MAX_NAMED:] for gpu in one.gpus})
    return (*uses, GpuUse(tuple(rest), f"{len(named) - MAX_NAMED} more")) if rest else tuple(uses)


def _who(user: str, program: str, stranger: _Stranger) -> str:
    known = [pid for pid in stranger.pids if pid is not None]
    more = f" and {len(known) - 1} more" if len(known) > 1 else ""
    what = ", ".join(part for part in (program, f"pid {known[0]}{more}" if known else "") if part)
    return f"{user or 'an unknown user'}" + (f" ({what})" if what else "")


# --- wording


def describe_foreign(answer: object, gpus: Sequence[int] = ()) -> str:
    """Return which foreign processes use a job's GPUs, those with the most memory first.

    Args:
        answer: The `gpus` of a node's answer to `list`.
        gpus: Indices of the job's GPUs; empty: all of the node.

    Such as `bob (python, pid 4711) holds 71.0 GB of GPU 0`; empty if none is known.
    """
    rows = (fields(answer) or {}).get("gpus")
    if not isinstance(rows, list) or len(rows) > MOST_GPUS:
        return ""
    found: dict[tuple[str, str, int | None], dict[int, int]] = {}
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping) or (gpus and index not in gpus):
            continue
        for process in _list_foreign(row.get("processes")):
            name = _name(process.get("user")), _name(process.get("program"))
            held = found.setdefault((*name, count(process.get("pid"))), {})
            held[index] = held.get(index, 0) + (count(process.get("used")) or 0)
    most_first = sorted(found.items(), key=lambda one: -sum(one[1].values()))
    clauses = [_describe_holder(*who, held) for who, held in most_first[:MAX_NAMED]]
    more = len(most_first) - MAX_NAMED
    return ", ".join(clauses) + (f" and {more} more" if more > 0 else "")


def _describe_holder(user: str, program: str, pid: int | None, held: Mapping[int, int]) -> str:
    """Return who holds how much of which GPUs; `held` has bytes by GPU, 0 where not known."""
    process = _Stranger()
    for gpu in held:
        process.uses(gpu, pid)
    gigabytes = sum(held.values()) / 1e9
    amount = f"holds {gigabytes:.1f} GB of" if gigabytes else "uses"
    return f"{_who(user, program, process)} {amount} GPU {', '.join(map(str, held))}"


def describe_uses(uses: Iterable[GpuUse]) -> str:
    """Return a clause such as `GPU 2, 3 are used by alice (python, pid 4242)`."""
    return ", ".join(
        f"GPU {', '.join(map(str, use.gpus))} "
        f"{'is' if len(use.gpus) == 1 else 'are'} used by {use.who}"
        for use in uses
    )


def shortage(inventory: Inventory, expected: int) -> str:
    """Return which GPUs promised by the fleet file are missing; empty if none.

    Such as `7 of 8 GPUs answer; 0000:5e:00.0 is lost`.
    """
    if inventory.unreadable or (inventory.count >= expected and not inventory.lost):
        return ""
    said = (
        f"{inventory.count} of {max(expected, inventory.count + len(inventory.lost))} GPUs answer"
    )
    lost = join_names(inventory.lost, MAX_NAMED)
    return f"{said}; {lost} {'is' if len(inventory.lost) == 1 else 'are'} lost" if lost else said
