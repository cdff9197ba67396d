"""One decision for the largest gang: every rank of 2,048 nodes fails at once.

    python -m benchmarks.decisions [--nodes 2048]

In production the watch sends only the few failures that may be the root, and counts the rest; here
the decision gets all of them. Times are processor time of one core, the best of five; memory is
the peak of what `diagnose` allocates.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from relaunch.evidence.observations import RankError, RankExited
from relaunch.job.diagnose import diagnose
from relaunch.job.events import FaultObserved
from relaunch.job.state import JobState, Phase, Slot
from relaunch.job.step import step
from relaunch.spec.job import JobSpec
from relaunch.spec.policy import preset

RANKS_PER_NODE = 8
AT = datetime(2026, 11, 21, 3, tzinfo=UTC)
BOOM = (
    "RuntimeError: boom in the forward pass of layer 17, "
    "shape mismatch [8, 4096, 128] vs [8, 4096, 64]"
)
ECHO = (
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, "
    "remote process exited or there was a network error, NCCL version 2.27.5\n"
    "ncclRemoteError: A call failed possibly due to a network error "
    "or a remote process exiting prematurely."
)
CHATTER = tuple(
    f"2026-11-21 03:00:00,{n:03d} INFO trainer.py:512 "
    f"step {n} loss 2.3451 lr 3.0e-04 tokens/s 41234"
    for n in range(17)
)
XID = (
    "[  {0}.000000] NVRM: Xid (PCI:0000:05:00): 94, pid=4711, name=python, "
    "Contained: SM (0x1). Physical address 0x{0:x}"
)
KINDS = ("exceptions", "echoes of one", "with 20 Xids each")


def rank(number: int, ranks: int, kind: str) -> RankExited:
    message = ECHO if kind == "echoes of one" and number != ranks - 1 else BOOM
    return RankExited(
        node=f"n{number // RANKS_PER_NODE}",
        rank=number,
        local_rank=number % RANKS_PER_NODE,
        exit_code=1,
        signal=None,
        at=AT + timedelta(milliseconds=number % 300),
        error=RankError(
            message,
            f"Traceback (most recent call last):\n{message}",
            AT.timestamp() - 1 + number / 1e6,
        ),
        log_tail=(
            *(f"[rank{number}]: {line}" for line in CHATTER),
            "Traceback (most recent call last):",
            message.splitlines()[0],
        ),
        kernel=tuple(XID.format(100 + n) for n in range(20)) if kind == "with 20 Xids each" else (),
        pid=1000 + number,
    )


def best_ms(act: Callable[[], object], times: int = 5) -> float:
    best = float("inf")
    for _ in range(times):
        begun = time.process_time()
        act()
        best = min(best, time.process_time() - begun)
    return round(best * 1000, 1)


def measure_decisions(nodes: int) -> list[dict[str, object]]:
    spec = JobSpec.model_validate(
        {"name": "llama", "command": ["train"], "nodes": nodes, "nproc_per_node": RANKS_PER_NODE}
    )
    job = JobState("default", "llama", 1000, spec, preset("default"), "ada", AT)
    slots = tuple(Slot(f"n{n}", f"10.0.{n >> 8}.{n & 255}", 1, 1) for n in range(nodes))
    job = replace(job, generation=1, phase=Phase.RUNNING, slots=slots)
    results: list[dict[str, object]] = []
    for kind in KINDS:
        ranks = nodes * RANKS_PER_NODE
        fault = FaultObserved(1, tuple(rank(n, ranks, kind) for n in range(ranks)), 0, AT)
        found = diagnose(job, fault)
        result = {
            "nodes": nodes,
            "ranks": ranks,
            "kind": kind,
            "cause": found.cause.value,
            "diagnose_ms": best_ms(lambda fault=fault: diagnose(job, fault)),  # type: ignore[misc]
            "step_ms": best_ms(lambda fault=fault: step(job, fault, AT)),  # type: ignore[misc]
        }
        tracemalloc.start()
        diagnose(job, fault)
        result["diagnose_peak_kib"] = tracemalloc.get_traced_memory()[1] // 1024
        tracemalloc.stop()
        results.append(result)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--nodes", type=int, default=2048)
    print(json.dumps(measure_decisions(parser.parse_args().nodes), indent=1))


if __name__ == "__main__":
    main()
