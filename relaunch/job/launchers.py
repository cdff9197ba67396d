"""Build the commands of a job's launcher (torchrun, ft_launcher) and parse its failure reports.

The launcher starts a node's ranks only once. `decide` decides whether they are restarted; a
launcher that restarted ranks itself would hide the fault.

Sources: torch 2.13.0, torch/distributed/run.py and
torch/distributed/elastic/multiprocessing/errors/__init__.py;
nvidia-resiliency-ext 0.4.1, nvidia_resiliency_ext/fault_tolerance/launcher.py and its copy of
torch's multiprocessing/api.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from relaunch.spec.job import MODULES, PYTHON

if TYPE_CHECKING:
    from relaunch.spec.job import JobSpec


MONITOR_INTERVAL = 0.1
"""Seconds between two checks of a launcher on its ranks.

The present default of both launchers; torchrun's was 5 s until torch 2.4.
"""


@dataclass(frozen=True, slots=True)
class LauncherCommand:
    """The command line of one node's launcher, in two parts."""

    launcher: tuple[str, ...]
    """The launcher with its flags. The node appends the wrapper of each rank, and then `rank`."""
    rank: tuple[str, ...]
    """The job's command, escaped so that the launcher passes it on unchanged."""


def launcher_command(
    spec: JobSpec, group_rank: int, nodes: int, master: tuple[str, int], address: str, run_id: str
) -> LauncherCommand:
    """Return the command that starts the launcher of one node.

    Args:
        spec: The spec of a job that has a launcher.
        group_rank: The node's group rank.
        nodes: The number of nodes of the generation.
        master: Address and port of group rank 0, free for the launcher there to listen on.
        address: The node's own address.
        run_id: The same on all nodes, a different one for every generation.
    """
    first = spec.command[0]
    program = (
        (first, "-m", MODULES[spec.launcher])
        if PYTHON.fullmatch(PurePosixPath(first).name)
        else (spec.launcher,)
    )
    host = f"[{master[0]}]" if ":" in master[0] else master[0]
    flags = [
        f"--nnodes={nodes}",
        f"--nproc-per-node={spec.nproc_per_node}",
        f"--rdzv-id={run_id}",
        "--max-restarts=0",
        f"--monitor-interval={MONITOR_INTERVAL}",
    ]
    if spec.launcher == "torchrun":
        # Static rendezvous: the ranks are assigned here, not negotiated, and no other node joins.
        flags += [
            "--rdzv-backend=static",
            f"--rdzv-endpoint={host}:{master[1]}",
            f"--node-rank={group_rank}",
        ]
    else:
        # ft_launcher 0.4.1 accepts only the c10d backend. Without is_host it guesses from host
        # names which node serves the store.
        flags += [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={host}:{master[1]}",
            f"--rdzv-conf=is_host={'true' if group_rank == 0 else 'false'}",
            f"--local-addr={address}",
            "--ft-restart-policy=any-failed",
        ]
    # Both launchers substitute ${local_rank} in the rank's command and read $$ as $
    # (torch/distributed/elastic/utils/api.py, macros).
    rank = tuple(word.replace("$", "$$") for word in spec.command)
    return LauncherCommand((*program, *flags, "--no-python"), rank)


@dataclass(frozen=True, slots=True)
class RankFailure:
    """How one rank of a node ended, as the node's launcher reports it."""

    pid: int
    exit_code: int | None
    signal: int | None
    rank: int | None = None
    """The global rank; None where the launcher did not report it."""


FAILURES, ROOT_CAUSE = "Failures:", "Root Cause (first observed failure):"
RANK = re.compile(r"\s*rank\s*: (\d{1,10}) \(local_rank: \d{1,10}\)")
EXIT = re.compile(r"\s*exitcode\s*: (-?\d{1,10}) \(pid: (\d{1,10})\)")
FIRST = re.compile(
    r"failed \(exitcode: (-?\d{1,10})\) local_rank: \d{1,10} \(pid: (\d{1,10})\) of "
)
LISTED = re.compile(
    r"(\d{1,10}): ProcessFailure\(local_rank=\d{1,10}, pid=(\d{1,10}), exitcode=(-?\d{1,10})"
)


def parse_failures(lines: Sequence[str]) -> tuple[RankFailure, ...]:
    """Return the failed ranks in the end of a launcher's log, the one it takes for the root first.

    The launcher checks its ranks ten times a second and dates failures in whole seconds, so the
    others may have failed first. torchrun prints a block (ChildFailedError.format_msg) as its last
    output; ft_launcher logs the same failures in one line, and both log one line about the first.
    A negative exit code is a signal.
    """
    return _parse_block(lines) or _parse_lines(lines)


def _parse_block(lines: Sequence[str]) -> tuple[RankFailure, ...]:
    begin = next(
        (index for index in reversed(range(len(lines))) if lines[index].strip() == FAILURES), 0
    )
    found: list[RankFailure] = []
    root, rank = None, None
    for line in lines[begin:]:
        if ROOT_CAUSE in line:
            root = len(found)
        elif match := RANK.match(line):
            rank = int(match[1])
        elif (match := EXIT.match(line)) and rank is not None:
            found.append(_failure(match[1], match[2], rank))
            rank = None
    return () if root is None or root >= len(found) else (found[root], *found[:root])


def _parse_lines(lines: Sequence[str]) -> tuple[RankFailure, ...]:
    # Take the first match: a launcher checks its ranks again while it stops them.
    first = next((match for line in lines if (match := FIRST.search(line))), None)
    if first is None:
        return ()
    listed = {
        match[2]: _failure(match[3], match[2], int(match[1]))
        for line in lines
        for match in LISTED.finditer(line)
    }
    root = listed.pop(first[2], None) or _failure(first[1], first[2], None)
    return (root, *listed.values())


def _failure(exit_code: str, pid: str, rank: int | None) -> RankFailure:
    code = int(exit_code)
    return RankFailure(int(pid), code if code >= 0 else None, -code if code < 0 else None, rank)
