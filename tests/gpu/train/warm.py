"""Says what a rank finds and computes on the GPU, and is killed in its first generation.

It writes that to `found-<generation>.json` in the working folder, and is killed once the folder has
a file `go`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

AHEAD = sorted({name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names))
BEGAN = time.monotonic()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

GENERATION = int(os.environ.get("RELAUNCH_GENERATION", "1"))


def compute() -> dict[str, object]:
    """Use what breaks where CUDA had been initialised before a fork."""
    found: dict[str, object] = {
        "initialised at the start": torch.cuda.is_initialized(),
        "in a bad fork": torch.cuda._is_in_bad_fork(),
        "GPUs": torch.cuda.device_count(),
        "threads of torch": torch.get_num_threads(),
    }
    torch.manual_seed(0)
    torch.cuda.set_device(0)
    found["GPU"] = torch.cuda.get_device_name()
    found["random on the CPU"] = torch.rand(4).tolist()
    found["random on the GPU"] = torch.rand(4, device="cuda").tolist()
    left = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16)
    found["product"] = (left @ left.T).float().sum().item()
    loader = DataLoader(
        TensorDataset(torch.arange(64.0)), batch_size=8, num_workers=2, pin_memory=True
    )
    batches = [batch.cuda(non_blocking=True) for (batch,) in loader]
    found["loaded by two processes"] = torch.stack(batches).sum().item()
    graph = torch.cuda.CUDAGraph()
    held = torch.ones(8, device="cuda")
    with torch.cuda.graph(graph):
        doubled = held * 2
    graph.replay()
    torch.cuda.synchronize()
    found["CUDA graph"] = doubled.sum().item()
    dist.init_process_group("nccl")
    one = torch.ones(1, device="cuda")
    dist.all_reduce(one)
    found["all-reduce by NCCL"] = one.item()
    return found


def main() -> None:
    imported = time.monotonic()
    found = compute()
    computed = time.monotonic()
    if os.environ.get("COMPILE"):
        softmax = torch.compile(lambda x: torch.softmax(x * 2, -1))
        found["compiled"] = softmax(torch.arange(8.0, device="cuda")).tolist()
    result = {
        "modules there at the start": AHEAD,
        "seconds to import": round(imported - BEGAN, 3),
        "seconds to the all-reduce": round(computed - BEGAN, 3),
        "found": found,
    }
    partial = Path("found.partial")
    partial.write_text(json.dumps(result))
    partial.replace(f"found-{GENERATION}.json")
    step = 0
    while GENERATION == 1:
        step += 1
        print(f"step {step}: loss 1.0", flush=True)
        time.sleep(0.5)
        if Path("go").exists():
            Path("killed-at").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
    Path("outcome.txt").write_text("done\n")


if __name__ == "__main__":
    main()
