"""The kinds of hang, the healthy pauses beside them, and what is expected of each."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIRST_STEP = 120
"""The first step at which something happens: by then the pace of training is known."""
SPREAD = 60
"""Of the steps at which something happens, so that a checkpoint is near for some."""
LAST_STEP = 240


@dataclass(frozen=True)
class Kind:
    name: str
    what: str
    hangs: bool = True
    """Whether a rank hangs, which is to be named. Otherwise no rank may be stopped."""
    rank: int | None = None
    """The rank where it happens; None: any, by the seed."""
    needs: str = ""
    """What of this machine: `fuse` or `namespaces`."""
    happens: bool = True
    """Whether anything happens at all."""


KINDS = (
    Kind("stopped", "a rank is stopped by SIGSTOP, at once or from outside in a collective"),
    Kind("deadlock", "two threads of a rank take two locks in different order"),
    Kind("never_enters", "a rank waits for a condition or in `recv`; the others in a collective"),
    Kind("order", "a rank is in `broadcast` (waits, or comes through it), the others are not"),
    Kind("loader", "the process that loads a rank's data is blocked, on a lock or a queue"),
    Kind("busy_loop", "a rank computes for ever, in one function or in two"),
    Kind("blocked_read", "a read that is not answered: FUSE (state D), or a FIFO", needs="fuse"),
    Kind("child_lock", "a lock is held by a child that is stopped, or sleeps"),
    Kind("handler", "a signal handler does not return: it sleeps, or waits for a lock"),
    Kind("full_pipe", "a rank writes to a child that does not read: it is stopped, or sleeps"),
    Kind("partition", "all packets of a rank get lost; no connection ends", needs="namespaces"),
    Kind("slow_rank", "a rank takes ten times as long for its steps, to the end", hangs=False),
)
CONTROLS = (
    Kind("none", "nothing", hangs=False, happens=False),
    Kind("eval_rank0", "rank 0 evaluates, unannounced; the others wait", hangs=False, rank=0),
    Kind("eval_all", "all ranks evaluate, unannounced", hangs=False, rank=0),
    Kind("slow_save", "rank 0 saves to a slow reader; the others wait", hangs=False, rank=0),
    Kind("upload_child", "rank 0 waits for a child that uploads", hangs=False, rank=0),
    Kind("upload_sleep", "rank 0 sleeps before it tries again", hangs=False, rank=0),
    Kind("compile", "a rank waits for children that compute", hangs=False),
    Kind("slow_loader", "a batch takes long: much to read, or to decode", hangs=False),
)
BY_NAME = {kind.name: kind for kind in (*KINDS, *CONTROLS)}


@dataclass(frozen=True)
class Case:
    """A kind at a step and in a rank that follow from a seed."""

    kind: Kind
    seed: int
    ranks: int
    step: int
    rank: int
    variant: int
    loop: str

    @property
    def name(self) -> str:
        return f"{self.kind.name}-{self.ranks}-{self.seed}".replace("_", "-")


def make_case(kind: Kind, seed: int, ranks: int) -> Case:
    """Return a kind with its step, rank, variant and loop of training.

    Variants and loops alternate with the seed, so that four seeds have each pair once.
    """
    chance = random.Random(f"{kind.name}/{seed}")
    step, rank = FIRST_STEP + chance.randrange(SPREAD), chance.randrange(ranks)
    return Case(
        kind,
        seed,
        ranks,
        step,
        rank if kind.rank is None else kind.rank,
        variant=seed % 2,
        loop=("all_reduce", "ddp")[seed // 2 % 2],
    )


def find_obstacle(case: Case) -> str:
    """Return why this machine cannot have a case, or nothing."""
    is_root = os.geteuid() == 0
    match case.kind.needs, case.variant:
        case "namespaces", _ if not is_root or shutil.which("ip") is None:
            return "network namespaces need root and iproute2"
        case "fuse", 0 if not is_root or not Path("/dev/fuse").exists():
            return "a file system in user space needs root and /dev/fuse"
    return ""


def find_mistakes(row: dict[str, Any], kind: Kind) -> list[str]:
    """Return what a row has wrong: `not seen`, `no rank named`, `wrong rank`, `restarted`."""
    if kind.happens and not row["began"]:
        return ["did not happen"]
    if not kind.hangs:
        return ["restarted"] if row["incidents"] or row["phase"] != "SUCCEEDED" else []
    if not row["cause"]:
        return ["not seen"]
    wrong = []
    if row["early"]:
        wrong.append("restarted before it hung")
    if not row["named"]:
        wrong.append("no rank named")
    elif row["named"] != [row["rank"]]:
        wrong.append("wrong rank")
    return wrong
