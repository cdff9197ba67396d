"""How a launcher of the job's own (torchrun, ft_launcher) is told to start a node's ranks, and how it tells which of them failed.

It starts them once: whether they are started again is `decide`'s, and a launcher that did so by itself would hide it.
Sources: torch 2.13.0, torch/distributed/run.py and torch/distributed/elastic/multiprocessing/errors/__init__.py;
nvidia-resiliency-ext 0.4.1, nvidia_resiliency_ext/fault_tolerance/launcher.py and its copy of torch's multiprocessing/api.py.
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
"""Seconds between two looks of a launcher at its ranks. Today's default of both; torchrun's was 5 s until torch 2.4."""


@dataclass(frozen=True, slots=True)
class LauncherCommand:
    launcher: tuple[str, ...]
    """To which the node adds what it puts before each rank, and then `rank`."""
    rank: tuple[str, ...]
    """The job's command, so written that the launcher leaves it as it is."""


def launcher_command(spec: JobSpec, group_rank: int, nodes: int, master: tuple[str, int], address: str, run_id: str) -> LauncherCommand:
    """Say how the launcher of one node is started, in a generation of so many nodes.

    Args:
        spec: of a job that has a launcher.
        group_rank: of the node.
        nodes: of the generation.
        master: address and port of group rank 0, free for the launcher there to listen on.
        address: the node's own.
        run_id: the same on all nodes, another one for every generation.
    """
    first = spec.command[0]
    program = (first, "-m", MODULES[spec.launcher]) if PYTHON.fullmatch(PurePosixPath(first).name) else (spec.launcher,)
    host = f"[{master[0]}]" if ":" in master[0] else master[0]
    flags = [
        f"--nnodes={nodes}",
        f"--nproc-per-node={spec.nproc_per_node}",
        f"--rdzv-id={run_id}",
        "--max-restarts=0",
        f"--monitor-interval={MONITOR_INTERVAL}",
    ]
    if spec.launcher == "torchrun":
        # Static: who is which rank is said here and not agreed upon, and nobody else joins.
        flags += ["--rdzv-backend=static", f"--rdzv-endpoint={host}:{master[1]}", f"--node-rank={group_rank}"]
    else:
        # ft_launcher 0.4.1 takes no other backend than c10d. Without is_host it guesses by host names who serves it.
        flags += [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={host}:{master[1]}",
            f"--rdzv-conf=is_host={'true' if group_rank == 0 else 'false'}",
            f"--local-addr={address}",
            "--ft-restart-policy=any-failed",
        ]
    # Both substitute ${local_rank} in what they pass on, and take $$ for $ (torch/distributed/elastic/utils/api.py, macros).
    rank = tuple(word.replace("$", "$$") for word in spec.command)
    return LauncherCommand((*program, *flags, "--no-python"), rank)


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank of a node ended, as the node's launcher has it."""

    pid: int
    exit_code: int | None
    signal: int | None
    rank: int | None = None
    """Global; None where the launcher did not say it."""


FAILURES, ROOT_CAUSE = "Failures:", "Root Cause (first observed failure):"
RANK = re.compile(r"\s*rank\s*: (\d+) \(local_rank: \d+\)")
EXIT = re.compile(r"\s*exitcode\s*: (-?\d+) \(pid: (\d+)\)")
FIRST = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\) of ")
LISTED = re.compile(r"(\d+): ProcessFailure\(local_rank=\d+, pid=(\d+), exitcode=(-?\d+)")


def failures(lines: Sequence[str]) -> tuple[Failure, ...]:
    """Read from the end of a launcher's log which ranks failed: first the one that it takes for the root, then the others.

    It looks at its ranks ten times a second and dates them in whole seconds, so the others may have been first.
    torchrun prints a block (ChildFailedError.format_msg) as the last thing it does; ft_launcher logs the same failures in one
    line, and both log one about the first. A negative exit code is a signal.
    """
    return _in_block(lines) or _in_lines(lines)


def _in_block(lines: Sequence[str]) -> tuple[Failure, ...]:
    begin = next((index for index in reversed(range(len(lines))) if lines[index].strip() == FAILURES), 0)
    found: list[Failure] = []
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


def _in_lines(lines: Sequence[str]) -> tuple[Failure, ...]:
    # The first, for a launcher looks at its ranks again while it stops them.
    first = next((match for line in lines if (match := FIRST.search(line))), None)
    if first is None:
        return ()
    listed = {match[2]: _failure(match[3], match[2], int(match[1])) for line in lines for match in LISTED.finditer(line)}
    root = listed.pop(first[2], None) or _failure(first[1], first[2], None)
    return (root, *listed.values())


def _failure(exit_code: str, pid: str, rank: int | None) -> Failure:
    code = int(exit_code)
    return Failure(int(pid), code if code >= 0 else None, -code if code < 0 else None, rank)
