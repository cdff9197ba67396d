"""A loop with Accelerate as its examples write it: `save_state` each five steps, a tqdm bar."""

import os
import time

import fault
import outcome
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

torch.set_num_threads(1)


class Rows(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(0)
        self.features = torch.randn(size, 8, generator=generator)
        self.targets = self.features @ torch.randn(8, 1, generator=generator)

    def __len__(self):
        return len(self.features)

    def __getitem__(self, index):
        fault.loading()
        return self.features[index], self.targets[index]


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(42)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(Rows(128), batch_size=8, num_workers=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    num_epochs, overall_step, loss = 3, 0, torch.zeros(())
    resume_step, starting_epoch = None, 0
    if accelerator.is_main_process:
        os.makedirs("out", exist_ok=True)
    saved = [f.path for f in os.scandir("out") if f.is_dir()] if os.path.isdir("out") else []
    if saved:
        path = max(saved, key=os.path.getctime)
        accelerator.print(f"Resumed from checkpoint: {path}")
        accelerator.load_state(path)
        overall_step = resume_step = int(os.path.basename(path).replace("step_", ""))
        starting_epoch = resume_step // len(loader)
        resume_step -= starting_epoch * len(loader)
    bar = tqdm(
        range(num_epochs * len(loader)),
        initial=overall_step,
        disable=not accelerator.is_local_main_process,
    )
    for epoch in range(starting_epoch, num_epochs):
        model.train()
        active = loader
        if epoch == starting_epoch and resume_step:
            active = accelerator.skip_first_batches(loader, resume_step)
        for features, targets in active:
            loss = torch.nn.functional.mse_loss(model(features), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            overall_step += 1
            bar.update(1)
            time.sleep(0.1)
            if overall_step % 5 == 0:
                fault.saving(overall_step)
                accelerator.save_state(f"out/step_{overall_step}")
            fault.at(overall_step, accelerator.unwrap_model(model))
        accelerator.print(f"epoch {epoch}: loss {loss.item():.6f}")
    outcome.write_model(accelerator.unwrap_model(model), loss.item())
    accelerator.end_training()


if __name__ == "__main__":
    main()
