"""What a look at a simulated rank finds: the row of the answer to `stacks`.

CPU and bytes grow with the simulated time, as fast as the script says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.fakes.nodes.rank import Rank
from tests.fakes.nodes.script import Stack

COMMAND = "python train.py"


def read_rank(
    rank: Rank, now: float, stacks: Sequence[tuple[float, Stack]], frames: bool
) -> dict[str, Any]:
    """Return the row of one rank.

    Args:
        rank: The rank.
        now: The time.
        stacks: What was scripted for it, each with the time from which it counts; the first whose
            time has come does, and what came before it was used until then.
        frames: Whether Python's stacks are wanted.
    """
    if rank.ended is not None:
        return {"rank": rank.rank, "pid": rank.pid, "unreadable": "the rank does not run"}
    past = [entry for entry in stacks if entry[0] <= now]
    stack = past[0][1] if past else Stack()
    cpu_s, written = _sum_up(rank, now, past)
    threads = [
        {"tid": rank.pid, "name": "MainThread", "frames": [list(one) for one in stack.frames]}
    ]
    is_read = frames and stack.unreadable is None
    own = {
        "pid": rank.pid,
        "parent": 1,
        "rank": rank.rank,
        "command": COMMAND,
        "state": stack.state,
        "blocked": int(stack.state == "D"),
        "cpu_s": cpu_s,
        "read_bytes": 0,
        "written_bytes": written,
        "wchan": stack.wchan,
        "kernel": list(stack.kernel),
        "threads": threads if is_read else [],
        "source": "py-spy" if is_read else None,
        "unreadable": stack.unreadable if frames else None,
    }
    below = [
        {**own, "parent": rank.pid, "pid": rank.pid + 100_000 + number, "rank": None, **child}
        for number, child in enumerate(stack.children)
    ]
    return {
        "rank": rank.rank,
        "pid": rank.pid,
        "processes": [own, *below],
        "flight": None if stack.flight is None else dict(stack.flight),
        "network": None if stack.address is None else make_network(stack.address, stack.stuck),
    }


def make_network(address: str, stuck: Sequence[str]) -> dict[str, Any]:
    row = {"local": address, "retries": 7, "unacknowledged": 4096}
    return {"addresses": [address], "stuck": [{**row, "remote": remote} for remote in stuck]}


def _sum_up(rank: Rank, now: float, past: Sequence[tuple[float, Stack]]) -> tuple[float, int]:
    """Return the CPU seconds and the bytes written since the start, each stack at its rates."""
    cpu, written, until = 0.0, 0.0, now
    for at, stack in past:
        begin = min(at, until)
        cpu += (until - begin) * stack.cpu
        written += (until - begin) * stack.written
        until = begin
    return round(cpu + (until - rank.started) * Stack().cpu, 3), int(written)
