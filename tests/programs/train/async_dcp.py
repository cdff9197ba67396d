"""DDP with checkpoints that `torch.distributed.checkpoint` saves while training goes on."""

import logging
import os
import time
from pathlib import Path

import fault
import outcome
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel as DDP

logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
log = logging.getLogger("train")
STEPS, EVERY, OUT = 20, 5, Path("out")


def find_latest():
    # .metadata is written last: a folder without it is one that was not finished.
    done = [int(p.parent.name.removeprefix("step-")) for p in OUT.glob("step-*/.metadata")]
    return max(done, default=None)


def main():
    dist.init_process_group("gloo", timeout=fault.COLLECTIVE_TIMEOUT)
    rank = dist.get_rank()
    # The thread that saves has collectives, which must not meet those of the gradients.
    saving = dist.new_group(backend="gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = DDP(
        torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step, loss, pending = 0, torch.zeros(()), None
    if (latest := find_latest()) is not None:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=str(OUT / f"step-{latest}"))
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        step = latest
        log.info("resumed from step %d", step)
    while step < STEPS:
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
        features = torch.randn(8, 16, generator=generator)
        loss = torch.nn.functional.mse_loss(model(features), features.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        time.sleep(0.1)
        if rank == 0:
            log.info("step %d loss %.6f", step, loss.item())
        if step % EVERY == 0:
            if pending is not None:
                pending.result()
            model_state, optimizer_state = get_state_dict(model, optimizer)
            fault.saving(step)
            pending = dcp.async_save(
                {"model": model_state, "optimizer": optimizer_state},
                checkpoint_id=str(OUT / f"step-{step}"),
                process_group=saving,
            )
        fault.at(step, model.module)
    if pending is not None:
        pending.result()
    outcome.write_model(model.module, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    os.makedirs(OUT, exist_ok=True)
    main()
