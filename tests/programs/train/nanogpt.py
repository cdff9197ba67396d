"""A character-level GPT as nanoGPT trains it: DDP, `iter` lines, `ckpt.pt`, resumed if it is there.

After Andrej Karpathy's nanoGPT (MIT): its loop, its output and its checkpoint, on a model that a
CPU trains in seconds.
"""

import math
import os
import time
from pathlib import Path

import fault
import outcome
import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

# -----------------------------------------------------------------------------
out_dir = "out"
max_iters = 20
eval_interval = 5
eval_iters = 2
batch_size = 4
block_size = 16
n_embd = 32
n_head = 2
learning_rate = 1e-3
text = Path(__file__).read_text()
# -----------------------------------------------------------------------------
init_process_group(backend="gloo", timeout=fault.COLLECTIVE_TIMEOUT)
ddp_rank = int(os.environ["RANK"])
ddp_world_size = int(os.environ["WORLD_SIZE"])
master_process = ddp_rank == 0
torch.manual_seed(1337 + ddp_rank)
torch.set_num_threads(1)
if master_process:
    os.makedirs(out_dir, exist_ok=True)

chars = sorted(set(text))
data = torch.tensor([chars.index(c) for c in text])


def get_batch(split, it):
    # nanoGPT takes the next numbers of one generator; here they follow from the iteration, so that
    # a resumed run sees the batches of an uninterrupted one.
    generator = torch.Generator().manual_seed(it * ddp_world_size + ddp_rank)
    part = data[: len(data) * 9 // 10] if split == "train" else data[len(data) * 9 // 10 :]
    ix = torch.randint(len(part) - block_size, (batch_size,), generator=generator)
    x = torch.stack([part[i : i + block_size] for i in ix])
    y = torch.stack([part[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd)
        )

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(n_embd, dim=2)
        q, k, v = (t.view(B, T, n_head, C // n_head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(len(chars), n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(n_embd, len(chars), bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(x)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


torch.manual_seed(1337)
model = GPT()
print(f"number of parameters: {sum(p.numel() for p in model.parameters()) / 1e3:.2f}K")
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
iter_num = 0
ckpt_path = os.path.join(out_dir, "ckpt.pt")
if os.path.exists(ckpt_path):
    print(f"Resuming training from {out_dir}")
    checkpoint = torch.load(ckpt_path, map_location="cpu")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num = checkpoint["iter_num"]
else:
    print("Initializing a new model from scratch")
model = DDP(model)
raw_model = model.module


@torch.no_grad()
def estimate_loss():
    raw_model.eval()
    fault.evaluating(iter_num)
    out = {
        split: torch.stack(
            [raw_model(*get_batch(split, 10_000 + k)) for k in range(eval_iters)]
        ).mean()
        for split in ("train", "val")
    }
    raw_model.train()
    return out


def get_lr(it):
    return learning_rate * 0.5 * (1.0 + math.cos(math.pi * it / max_iters))


t0 = time.time()
while True:
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0 and master_process:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if iter_num > 0:
            checkpoint = {
                "model": raw_model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "iter_num": iter_num,
            }
            print(f"saving checkpoint to {out_dir}")
            fault.saving(iter_num)
            torch.save(checkpoint, os.path.join(out_dir, "ckpt.pt"))
    loss = model(*get_batch("train", iter_num))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    time.sleep(0.1)
    t1 = time.time()
    dt, t0 = t1 - t0, t1
    if master_process:
        print(f"iter {iter_num}: loss {loss.item():.4f}, time {dt * 1000:.2f}ms, mfu 0.00%")
    iter_num += 1
    fault.at(iter_num, raw_model)
    if iter_num > max_iters:
        break
outcome.write_model(raw_model, loss.item())
destroy_process_group()
