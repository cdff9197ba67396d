"""A LightningModule, `Trainer.fit` with DDP and `ckpt_path="last"`; `--bar tqdm` or `rich`."""

import argparse
import os
import time

import fault
import lightning as L
import outcome
import torch
from lightning.pytorch.callbacks import (
    Callback,
    ModelCheckpoint,
    RichProgressBar,
    TQDMProgressBar,
)
from torch.utils.data import DataLoader, Dataset

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


class LitModel(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
        )

    def training_step(self, batch, batch_idx):
        features, targets = batch
        loss = torch.nn.functional.mse_loss(self.net(features), targets)
        self.log("train_loss", loss, prog_bar=True)
        self.last_loss = loss.item()
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Faults(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        time.sleep(0.1)
        fault.at(trainer.global_step, module)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bar", choices=("tqdm", "rich"), default="tqdm")
    args = parser.parse_args()
    L.seed_everything(42, workers=True)
    nproc = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=nproc,
        num_nodes=int(os.environ.get("WORLD_SIZE", "1")) // nproc,
        strategy="ddp",
        max_epochs=5,
        logger=False,
        default_root_dir="out",
        callbacks=[
            ModelCheckpoint(dirpath="out", save_last=True),
            TQDMProgressBar() if args.bar == "tqdm" else RichProgressBar(),
            Faults(),
        ],
    )
    model = LitModel()
    loader = DataLoader(Rows(64), batch_size=8, num_workers=1, persistent_workers=True)
    trainer.fit(model, loader, ckpt_path="last")
    outcome.write_model(model, model.last_loss)


if __name__ == "__main__":
    main()
