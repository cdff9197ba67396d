"""A small training loop on one GPU, with a checkpoint every five steps.

FAULT names what happens at step 8, once in a folder. What the faults print and how they end is
CUDA's, NCCL's and torch's own.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

LAST_STEP, FAULT_STEP = 20, 8
CHECKPOINT = Path("checkpoint.pt")
FAULT = os.environ.get("FAULT", "none")

KERNELS = r"""
extern "C" __global__ void store(long long at) { *(volatile int *)at = 1; }
extern "C" __global__ void trap(long long) { __trap(); }
extern "C" __global__ void spin(long long at) { while (*(volatile int *)at == 0) { } }
"""


def launch(name: str, argument: int) -> None:
    """Launch a kernel of CUDA C, as an extension does; what it does is seen at a later call."""
    import cupy

    cupy.RawKernel(KERNELS, name)((1,), (1,), (argument,))
    print(f"launched {name}", flush=True)


def read_wrong_address() -> None:
    launch("store", 0x10)


def store_misaligned() -> None:
    launch("store", torch.zeros(8, dtype=torch.int32, device="cuda").data_ptr() + 1)


def trap() -> None:
    launch("trap", 0)


def spin() -> None:
    launch("spin", torch.zeros(1, dtype=torch.int32, device="cuda").data_ptr())


def die_computing() -> None:
    spin()
    os.kill(os.getpid(), signal.SIGKILL)


def assert_on_device() -> None:
    table = nn.Embedding(10, 8).cuda()
    print(table(torch.tensor([11], device="cuda")).sum().item())


def run_out_of_memory() -> None:
    held = []
    while True:
        held.append(torch.zeros(1 << 28, device="cuda"))


def use_missing_gpu() -> None:
    torch.cuda.set_device(torch.cuda.device_count())


def share_gpu() -> None:
    """Two ranks of NCCL on one GPU, which it refuses."""
    torch.distributed.init_process_group("nccl")
    torch.distributed.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()


FAULTS = {
    one.__name__: one
    for one in (
        read_wrong_address,
        store_misaligned,
        trap,
        spin,
        die_computing,
        assert_on_device,
        run_out_of_memory,
        use_missing_gpu,
        share_gpu,
    )
}


def main() -> None:
    torch.manual_seed(0)
    torch.cuda.set_device(0)
    print(f"training on {torch.cuda.get_device_name()}", flush=True)
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    done = 0
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
        print(f"resumed at step {done}", flush=True)
    mark = Path(f"fault-{os.environ.get('RANK', '0')}")
    for step in range(done + 1, LAST_STEP + 1):
        if step == FAULT_STEP and FAULT in FAULTS and not mark.exists():
            mark.touch()
            FAULTS[FAULT]()
        batch = torch.randn(256, 512, generator=torch.Generator().manual_seed(step)).cuda()
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
        if step % 5 == 0 and os.environ.get("RANK", "0") == "0":
            partial = CHECKPOINT.with_suffix(".partial")
            saved = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(saved, partial)
            partial.replace(CHECKPOINT)
    Path("outcome.txt").write_text(f"{loss.item():.6f}\n")


if __name__ == "__main__":
    sys.exit(main())
