"""What a simulated node reports of ranks that a launcher starts there.

The launcher's process stands for all of them.
"""

from __future__ import annotations

from typing import Any

from relaunch.backends.base import BelowLauncher
from tests.fakes.nodes.script import Exit


def first_failed(launched: BelowLauncher, exit: Exit) -> int:
    """The rank that a script lets fail; where it means all, the first."""
    return launched.ranks[0] if exit.rank is None else exit.rank


def report_failure(
    launched: BelowLauncher, launcher_pid: int, exit: Exit | None, printed: list[str]
) -> dict[str, Any]:
    """What the launcher logs of the failed rank, and what each rank left.

    As torch 2.13.0 has it, ChildFailedError.format_msg.
    """
    if exit is None or exit.exit_code == 0:
        return {"launched": [], "log_tail": []}
    failed = first_failed(launched, exit)
    pids = {rank: launcher_pid * 1000 + index for index, rank in enumerate(launched.ranks)}
    code = exit.exit_code if exit.signal is None else -exit.signal
    block = [
        "Failures:",
        "  <NO_OTHER_FAILURES>",
        "Root Cause (first observed failure):",
        "[0]:",
        f"  rank      : {failed} (local_rank: {launched.ranks.index(failed)})",
        f"  exitcode  : {code} (pid: {pids[failed]})",
    ]
    left = [
        {
            "rank": rank,
            "local_rank": local_rank,
            "pid": pids[rank],
            "error": exit.error if rank == failed else None,
            "log_tail": (list(exit.log_tail) or printed) if rank == failed else [],
        }
        for local_rank, rank in enumerate(launched.ranks)
    ]
    return {"launched": left, "log_tail": block}
