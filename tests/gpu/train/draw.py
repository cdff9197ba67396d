"""Says what a rank draws at random, without a seed and with one; its first generation is killed.

It writes that to `drawn-<generation>-<rank>.json` in the working folder. In the first generation
rank 0 is killed once the folder has a file `go`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

AHEAD = "torch" in sys.modules

import numpy  # noqa: E402
import torch  # noqa: E402
from torch.nn.functional import dropout  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

GENERATION, RANK = (int(os.environ[name]) for name in ("RELAUNCH_GENERATION", "RANK"))


def draw() -> dict[str, object]:
    shuffled = DataLoader(TensorDataset(torch.arange(64)), batch_size=64, shuffle=True)
    return {
        "random": random.random(),
        "numpy": numpy.random.rand(),
        "torch.rand": torch.rand(2).tolist(),
        "torch.rand on the GPU": torch.rand(2, device="cuda").tolist(),
        "dropout on the GPU": dropout(torch.ones(64, device="cuda")).nonzero().flatten().tolist(),
        "shuffled by a DataLoader": next(iter(shuffled))[0].tolist(),
        "torch.initial_seed": torch.initial_seed(),
        "torch.cuda.initial_seed": torch.cuda.initial_seed(),
    }


def draw_by_cupy() -> float:
    import cupy

    return float(cupy.random.rand())


def main() -> None:
    unseeded = draw()
    if os.environ.get("CUPY"):
        unseeded["cupy"] = draw_by_cupy()
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    result = {"forked": AHEAD, "unseeded": unseeded, "seeded": draw()}
    partial = Path(f"drawn-{RANK}.partial")
    partial.write_text(json.dumps(result))
    partial.replace(f"drawn-{GENERATION}-{RANK}.json")
    step = 0
    while GENERATION == 1:
        step += 1
        print(f"step {step}: loss 1.0", flush=True)
        time.sleep(0.5)
        if Path("go").exists() and RANK == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    Path("outcome.txt").write_text("done\n")


if __name__ == "__main__":
    main()
