"""Causal language modelling with the Trainer of Hugging Face, resumed from the last checkpoint."""

import os
import time

import fault
import outcome
import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

torch.set_num_threads(1)


class Tokens(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(64, (size, 16), generator=generator)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        fault.loading()
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Faults(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        time.sleep(0.1)
        fault.at(state.global_step, model)
        if control.should_save:
            fault.saving(state.global_step)


def main():
    set_seed(42)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    )
    args = TrainingArguments(
        output_dir="out",
        max_steps=20,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=5,
        save_steps=5,
        save_total_limit=2,
        dataloader_num_workers=1,
        use_cpu=True,
        report_to="none",
        ddp_timeout=int(fault.COLLECTIVE_TIMEOUT.total_seconds()),
    )
    trainer = Trainer(model=model, args=args, train_dataset=Tokens(256), callbacks=[Faults()])
    last_checkpoint = get_last_checkpoint("out") if os.path.isdir("out") else None
    result = trainer.train(resume_from_checkpoint=last_checkpoint)
    print(result.metrics)
    # train_loss is the mean since the start of the process: the parameters are what is compared.
    outcome.write_model(model, 0.0)


if __name__ == "__main__":
    main()
