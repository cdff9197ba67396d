"""Train a small network by data parallelism on CPUs (gloo), in steps of some 50 ms.

A process beside each rank loads its data; rank 0 prints the steps and saves a checkpoint now and
then. With LOOP=ddp gradients are added by DistributedDataParallel, else by `all_reduce`. What goes
wrong is in `hang.py`.
"""

from __future__ import annotations

import contextlib
import os
import time
from datetime import timedelta
from pathlib import Path

import hang
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

STEPS = int(os.environ.get("STEPS", "300"))
STEP_SECONDS = float(os.environ.get("STEP_SECONDS", "0.04"))
"""How long the computation of a step takes; what torch and the collective take comes on top."""
SAVE_EVERY = 50
LOADERS = int(os.environ.get("LOADERS", "1"))
CHECKPOINT = Path("checkpoint.pt")
RANK = int(os.environ["RANK"])


class Samples(IterableDataset):
    """Batches that follow from the step alone."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __iter__(self):
        for step in range(self.first, STEPS + 1):
            hang.loading(step)
            generator = torch.Generator().manual_seed(1000 * step + RANK)
            x = torch.randn(16, 32, generator=generator)
            yield x, x.sum(dim=1, keepdim=True)


def monitor():
    """Return what sends a heartbeat of each step, where ft_launcher has started the ranks."""
    if "FT_RANK_MONITOR_IPC_SOCKET" not in os.environ:
        return lambda: None
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

    client = RankMonitorClient()
    client.init_workload_monitoring()
    return client.send_heartbeat


def main() -> None:
    torch.set_num_threads(1)
    options = {}
    if "COLLECTIVE_TIMEOUT_S" in os.environ:
        options["timeout"] = timedelta(seconds=float(os.environ["COLLECTIVE_TIMEOUT_S"]))
    if hang.NETWORK:
        # The address of torch's own store is in another network.
        store = Path(f"store.{hang.RESTART}").resolve()
        options |= {"init_method": f"file://{store}", "rank": RANK}
        options |= {"world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group("gloo", **options)
    beat = monitor()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    step = 0
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT)
        model.load_state_dict(saved["model"])
        step = saved["step"]
    with_ddp = os.environ.get("LOOP") == "ddp"
    trained = DistributedDataParallel(model) if with_ddp else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = iter(DataLoader(Samples(step + 1), batch_size=None, num_workers=LOADERS))
    print(f"rank {RANK} starts at step {step}", flush=True)
    while step < STEPS:
        step += 1
        x, y = next(batches)
        hang.before_step(step)
        time.sleep(hang.stretch(step, STEP_SECONDS))
        loss = nn.functional.mse_loss(trained(x), y)
        hang.in_collective(step, dist, torch.zeros(32))
        optimizer.zero_grad()
        loss.backward()
        if not with_ddp:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        optimizer.step()
        beat()
        if RANK == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
            if step % SAVE_EVERY == 0:
                partial = CHECKPOINT.with_suffix(".partial")
                torch.save({"model": model.state_dict(), "step": step}, partial)
                partial.replace(CHECKPOINT)
        hang.saving(step, dist, {"model": model.state_dict()}, torch.save)
        hang.evaluating(step, dist, lambda: evaluate(model))
    print(f"rank {RANK} is done", flush=True)
    with contextlib.suppress(RuntimeError):  # a peer that was faster has closed its connections
        dist.barrier()
    dist.destroy_process_group()


@torch.no_grad()
def evaluate(model: nn.Module) -> None:
    model.eval()
    for _ in range(20):
        model(torch.randn(256, 32))
    time.sleep(0.05)
    model.train()


if __name__ == "__main__":
    main()
