"""Needs eight gigabytes more once the folder has a file `go`, as longer sequences do."""

from __future__ import annotations

import time
from pathlib import Path

import torch

LAST_STEP, GROWN_STEP = 20, 8
held = [torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")]
for step in range(1, LAST_STEP + 1):
    if step == GROWN_STEP:
        Path("ready").touch()
        while not Path("go").exists():
            time.sleep(0.1)
        held.append(torch.zeros(8 << 30, dtype=torch.uint8, device="cuda"))
    print(f"step {step}: loss {1 / step:.4f}", flush=True)
    time.sleep(0.2)
Path("outcome.txt").write_text("done\n")
