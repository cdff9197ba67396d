"""The rank of `benchmarks.warm`: torch on CPUs, whose first all-reduce ends its start.

With BENCH_CUDA its tensor is on the first GPU, which all ranks share; gloo copies it.

Beside its line in BENCH_STARTS it writes what it spent that time on to BENCH_SPLIT, if that is set:
`<rank> <pid> <seconds to import> <seconds to join> <seconds of the first all-reduce>`.
"""

import os
import time

from rank import STARTED, count_steps

BEGAN = STARTED / 1e9


def clock() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def append(path: str, text: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, text.encode())
    os.close(file)


def main() -> None:
    import torch
    import torch.distributed as dist

    imported = clock()
    dist.init_process_group("gloo")
    joined = clock()
    one = torch.ones(1, device="cuda" if os.environ.get("BENCH_CUDA") else "cpu")
    dist.all_reduce(one)
    assert int(one) == dist.get_world_size()
    reduced = clock()
    rank, pid = os.environ["RANK"], os.getpid()
    generation = (
        os.environ.get("RELAUNCH_GENERATION") or os.environ.get("TORCHELASTIC_RESTART_COUNT") or "0"
    )
    if split := os.environ.get("BENCH_SPLIT"):
        parts = (BEGAN, imported, joined, reduced)
        append(split, f"{rank} {pid} " + " ".join(f"{part:.4f}" for part in parts) + "\n")
    append(os.environ["BENCH_STARTS"], f"{int(reduced * 1e9)} {rank} {generation} {pid}\n")
    count_steps(os.environ.get("RELAUNCH_PROGRESS_FILE", ""))


if __name__ == "__main__":
    main()
