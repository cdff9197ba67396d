"""Record the samples in this folder: run this with a Python that has torch.

It starts three real gloo ranks for each kind of hang, and keeps what each of them has recorded.
Recorded with torch 2.13 on CPUs. Tensors of different sizes are not among them: gloo ends the
process of the smaller one at once.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

KINDS = ("healthy", "missing", "other_operation", "crossed")
FOLDER = Path(__file__).parent
RANKS = 3
AWAY = 600.0
"""Seconds for which a rank does something else."""


def run_rank(kind: str) -> None:
    """Train, so to say: five all_reduces, then what the kind says."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pairs = dist.new_group(list(range(RANKS)), group_desc="pairs")
    tensor = torch.ones(16)
    for _ in range(5):
        dist.all_reduce(tensor)
    is_odd = rank == RANKS - 1
    if kind == "missing" and is_odd:
        print("away", flush=True)
        time.sleep(AWAY)
    if kind == "other_operation" and is_odd:
        dist.barrier()
    if kind == "crossed":
        for group in (pairs, None) if is_odd else (None, pairs):
            dist.all_reduce(tensor, group=group)
    if kind != "healthy":
        dist.all_reduce(torch.ones(32))
    print("away", flush=True)
    time.sleep(AWAY)


def record(kind: str) -> None:
    """Start ranks with a thread that dumps, wait until nothing changes, and keep the dumps."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = (
        "import sys, time, threading, runpy\n"
        "import torch\n"
        "from torch._C._distributed_c10d import _dump_fr_trace\n"
        "def dump(path):\n"
        "    time.sleep(15)\n"
        "    open(path, 'wb').write(_dump_fr_trace(True, False, False))\n"
        "threading.Thread(target=dump, args=[sys.argv[1]], daemon=True).start()\n"
        "sys.argv = sys.argv[2:]\n"
        "try:\n"
        "    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except Exception as error:\n"  # gloo sees some mistakes itself
        "    print(error, flush=True)\n"
        "time.sleep(600)\n"
    )
    paths = [FOLDER / f"{kind}.rank_{rank}" for rank in range(RANKS)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(path), __file__, "rank", kind],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCH_FR_BUFFER_SIZE": "8",
            },
        )
        for rank, path in enumerate(paths)
    ]
    time.sleep(45)
    for process in ranks:
        process.kill()
        process.wait()
    for path in paths:
        print(path.name, path.stat().st_size)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        run_rank(sys.argv[2])
    else:
        for name in sys.argv[1:] or KINDS:
            record(name)
