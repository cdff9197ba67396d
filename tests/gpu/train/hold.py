"""Holds nearly all of the GPU's memory and computes nothing, as a notebook that was forgotten."""

from __future__ import annotations

import time

import torch

PIECE, SPARED = 1 << 30, 64 << 20
"""Bytes. A program that starts needs some hundred MB before its first tensor."""
torch.zeros(1, device="cuda").item()  # loads what needs memory itself, while there is some
held: list[torch.Tensor] = []
size = PIECE
while size > SPARED:
    try:
        held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    except RuntimeError:  # less is left than the driver says is free
        size //= 2
print(f"holds {sum(one.numel() for one in held)} bytes", flush=True)
time.sleep(600)
