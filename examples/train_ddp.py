#!/usr/bin/env python3
"""A DistributedDataParallel training that survives being started again: gloo on CPUs, NCCL on GPUs.

    relaunch run --nodes 2 --nproc 2 --policy torchelastic -- \\
        python examples/train_ddp.py --checkpoint /tmp/ddp.pt

What makes it recoverable is marked (1) to (4); the rest is a small regression, so that it runs
anywhere torch does. It needs torch 2.x and nothing of relaunch: it reads torchrun's environment
variables, and runs under torchrun as well.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """(1) A checkpoint is whole or not there: a rank may be killed in the middle of this line."""
    partial = path.with_name(path.name + ".partial")
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, partial
    )
    os.replace(partial, path)


def load(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> int:
    """(2) Every start looks for a checkpoint first; the first one finds none."""
    if not path.exists():
        return 0
    saved = torch.load(path, map_location=device, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


def report(step: int, loss: float) -> None:
    """(3) Report progress: without it a hang looks like a long step."""
    if path := os.environ.get("RELAUNCH_PROGRESS_FILE"):
        Path(path).write_text(f'{{"step": {step}, "loss": {loss:.6f}}}')


# (4) An exception is written to TORCHELASTIC_ERROR_FILE; `history` shows the first traceback.
@record
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--checkpoint", type=Path, required=True, help="a file that all nodes can read"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint-every", type=int, default=10)
    parser.add_argument(
        "--pause", type=float, default=0.0, help="seconds a step takes longer, to have time to look"
    )
    arguments = parser.parse_args()

    cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    torch.distributed.init_process_group("nccl" if cuda else "gloo")
    rank = torch.distributed.get_rank()

    torch.manual_seed(0)
    inputs = torch.randn(4096, 32)
    data = TensorDataset(inputs, inputs @ torch.randn(32, 1))
    sampler = DistributedSampler(data, seed=0)
    batches = DataLoader(data, batch_size=64, sampler=sampler)
    inner = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=1e-3)
    step = load(arguments.checkpoint, inner, optimizer, device)
    model = DistributedDataParallel(inner, device_ids=[local_rank] if cuda else None)
    if rank == 0:
        print(
            f"training from step {step} on {torch.distributed.get_world_size()} ranks, "
            f"{device.type}",
            flush=True,
        )

    an_epoch, loss = len(batches), torch.zeros(())
    while step < arguments.steps:
        sampler.set_epoch(step // an_epoch)
        for index, (features, target) in enumerate(batches):
            if index < step % an_epoch:
                continue  # seen before the checkpoint
            loss = nn.functional.mse_loss(model(features.to(device)), target.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if rank == 0 and (step % arguments.checkpoint_every == 0 or step == arguments.steps):
                save(arguments.checkpoint, inner, optimizer, step)
            report(step, loss.item())
            if arguments.pause:
                time.sleep(arguments.pause)
            if step == arguments.steps:
                break
    if rank == 0:
        print(f"done at step {step}, loss {loss.item():.6f}", flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
