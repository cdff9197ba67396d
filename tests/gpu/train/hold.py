"""Holds nearly all of the GPU's memory and computes nothing, as a notebook that was forgotten."""

from __future__ import annotations

import time

import torch

held = None
for spared in (64, 128, 256, 512):
    # The largest piece is smaller than what is free.
    free, _ = torch.cuda.mem_get_info()
    try:
        held = torch.zeros(free - (spared << 20), dtype=torch.uint8, device="cuda")
        break
    except RuntimeError as error:
        print(error, flush=True)
assert held is not None
print(f"holds {held.numel()} bytes", flush=True)
time.sleep(600)
