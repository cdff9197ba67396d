"""The rank of `benchmarks.warm`: torch on CPUs, whose first all-reduce ends its start.

With BENCH_CUDA its tensor is on the first GPU, which all ranks share; gloo copies it, and
BENCH_BACKEND=nccl, for a single rank, does not. With BENCH_STEP it takes a step of training (DDP,
AdamW) after that, which is no part of its start.

Beside its line in BENCH_STARTS it writes to BENCH_SPLIT, if that is set, its rank, its pid, and the
moments of its first line and after each part: import, join, CUDA, first tensor, all-reduce, step.
"""

import os
import time

from rank import STARTED, count_steps

BEGAN = STARTED / 1e9
LOCKSTEP_VARIABLE = "BENCH_LOCKSTEP"
"""With 1, each step is an all-reduce. Without, a kill is not hastened by ranks that notice it."""


def clock() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def append(path: str, text: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, text.encode())
    os.close(file)


def train(device: str) -> None:
    """Take a step, as a training script does; much of torch is imported only by its first use."""
    import torch

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256).to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 256, device=device)).square().mean().backward()
    optimizer.step()
    assert all(bool(one.isfinite().all()) for one in model.parameters())


def main() -> None:
    import torch
    import torch.distributed as dist

    moments = [BEGAN, clock()]
    dist.init_process_group(os.environ.get("BENCH_BACKEND", "gloo"))
    moments.append(clock())
    device = "cuda" if os.environ.get("BENCH_CUDA") else "cpu"
    if device == "cuda":
        torch.cuda.init()
    moments.append(clock())
    one = torch.ones(1, device=device)
    assert int(one) == 1
    moments.append(clock())
    dist.all_reduce(one)
    assert int(one) == dist.get_world_size()
    reduced = clock()
    moments.append(reduced)
    rank, pid = os.environ["RANK"], os.getpid()
    generation = (
        os.environ.get("RELAUNCH_GENERATION") or os.environ.get("TORCHELASTIC_RESTART_COUNT") or "0"
    )
    if os.environ.get("BENCH_STEP"):
        train(device)
        moments.append(clock())
    if split := os.environ.get("BENCH_SPLIT"):
        append(split, f"{rank} {pid} " + " ".join(f"{one:.4f}" for one in moments) + "\n")
    append(os.environ["BENCH_STARTS"], f"{int(reduced * 1e9)} {rank} {generation} {pid}\n")
    progress = os.environ.get("RELAUNCH_PROGRESS_FILE", "")
    if os.environ.get(LOCKSTEP_VARIABLE) != "1":
        count_steps(progress)
    step = 0
    while True:  # no rank goes on without the others
        dist.all_reduce(one)
        step += 1
        with open(progress, "w") as file:
            file.write(f'{{"step": {step}}}')
        time.sleep(0.1)


if __name__ == "__main__":
    main()
