"""One fault, at one step of one rank: FAULT=kind:step:rank of the environment, nothing without it.

A fault happens once: the file `fault-happened` of the working folder keeps that, and with
FAULT_REPEATS=1 it happens again at each start. Imported by the programs beside it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

KIND, STEP, RANK = (*os.environ.get("FAULT", "none:0:0").split(":"), "0", "0")[:3]
REPEATS = os.environ.get("FAULT_REPEATS") == "1"
SECONDS = float(os.environ.get("FAULT_SECONDS", "10"))
"""How long a slow checkpoint, a slow evaluation or a rank that others wait for takes."""
COLLECTIVE_TIMEOUT = timedelta(minutes=float(os.environ.get("COLLECTIVE_TIMEOUT_MIN", "30")))
"""What the programs give to `init_process_group`: its default, and less where one is to time out.
"""
HAPPENED = Path("fault-happened")
OUT = Path(os.environ.get("OUT", "out"))
FILLER = OUT / "filler"
ROOM = 512 << 20
"""Bytes that a process may still take when it is to run out of memory: it takes more."""
loaded = itertools.count()

if KIND == "disk_full" and HAPPENED.exists():
    # As after a person has made room.
    FILLER.unlink(missing_ok=True)


def happens(kind: str, step: int) -> bool:
    if kind != KIND or step < int(STEP) or RANK not in ("any", os.environ.get("RANK", "0")):
        return False
    if REPEATS:
        return True
    try:
        os.close(os.open(HAPPENED, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def at(step: int, model: Any = None) -> None:
    """Fail after a step of training. `model` is what a silent NaN gets into."""
    if happens("kill", step):
        os.kill(os.getpid(), signal.SIGKILL)
    if happens("keyerror", step):
        batch: dict[str, int] = {"input_ids": 1}
        batch["label_ids"]
    if happens("exit0", step):
        os._exit(0)
    if happens("oom", step):
        exhaust_address_space()
    if happens("oom_cgroup", step):
        exhaust_memory_cgroup()
    if happens("nan_raised", step):
        raise FloatingPointError(f"loss is nan at step {step}")
    if happens("nan_silent", step):
        next(iter(model.parameters())).data.fill_(float("nan"))
    if happens("late", step):
        time.sleep(SECONDS)
    if happens("torn", step):
        newest = max((p for p in OUT.rglob("*") if p.is_file()), key=lambda p: p.stat().st_mtime_ns)
        # The newest checkpoint can be a folder: its largest file is what a kill would tear.
        largest = max(newest.parent.iterdir(), key=lambda p: p.stat().st_size)
        os.truncate(largest, largest.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)
    if happens("disk_full", step):
        fill_disk()


def saving(step: int) -> None:
    if happens("slow_checkpoint", step):
        time.sleep(SECONDS)


def evaluating(step: int) -> None:
    if happens("slow_evaluation", step):
        time.sleep(SECONDS)


def loading() -> None:
    """Fail in a process that loads data: samples that it has loaded stand for the step."""
    from torch.utils.data import get_worker_info

    if get_worker_info() is None:
        return
    step = next(loaded)
    if happens("loader_keyerror", step):
        sample: dict[str, int] = {"text": 1}
        sample["label_ids"]
    if happens("loader_kill", step):
        os.kill(os.getpid(), signal.SIGKILL)
    if happens("loader_hang", step):
        time.sleep(3600)


def exhaust_address_space() -> None:
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM, taken + ROOM))
    held = []
    while True:
        held.append(bytearray(64 << 20))


def exhaust_memory_cgroup() -> None:
    """Take more than the cgroup in FAULT_CGROUP allows, as a job in a container would."""
    Path(os.environ["FAULT_CGROUP"], "cgroup.procs").write_text(str(os.getpid()))
    held = []
    while True:
        held.append(bytearray(os.urandom(1 << 20) * 64))


def fill_disk() -> None:
    with contextlib.suppress(OSError), FILLER.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 10, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
