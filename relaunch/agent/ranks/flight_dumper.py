"""Write the flight record of a rank when the agent asks for it. This runs in the rank itself.

Torch dumps what NCCL did, on a time-out or on a byte in a pipe; what gloo did it dumps nowhere. The
agent copies this file into a folder of the generation, and torch (2.5 and newer) calls `begin` when
it has been imported: it is an entry point of torch's group `torch.backends`. CUDA is never touched.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import threading
import time
from typing import Any

FOLDER_VARIABLE = "RELAUNCH_FLIGHT_FOLDER"
NEW_SIZE, OLD_SIZE = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
PIPE_VARIABLE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
MIN_INTERVAL = 0.2
"""Seconds between two dumps, whoever writes into the pipe: a dump of 2,000 entries takes 11 ms."""


def begin() -> None:
    """Answer requests from now on. An exception here would make `import torch` fail."""
    try:
        _begin()
    except Exception:  # the rank trains without it, and the agent says that it found no record
        return


def _begin() -> None:
    folder, rank = os.environ.get(FOLDER_VARIABLE, ""), os.environ.get("RANK", "")
    world = os.environ.get("WORLD_SIZE", "")
    # A launcher has no rank, a rank without peers waits for none, and a container may lack the
    # folder. Helpers of a rank, such as loaders of data, are no ranks.
    is_rank = rank.isdigit() and world.isdigit() and int(world) > 1
    if not is_rank or multiprocessing.parent_process() is not None:
        return
    if not os.access(folder, os.W_OK | os.X_OK):
        return
    c10d = importlib.import_module("torch._C._distributed_c10d")
    dump = getattr(c10d, "_dump_fr_trace", None)
    if dump is None and NEW_SIZE in os.environ:
        # An older torch knows the old name only; a newer one would print a warning for it.
        os.environ.setdefault(OLD_SIZE, os.environ[NEW_SIZE])
    path = os.path.join(folder, f"rank_{rank}.{os.getpid()}.pipe")
    os.mkfifo(path, 0o600)
    # Only here, where a pipe could be made: NCCL's watchdog ends the process if it can make none.
    os.environ.setdefault(PIPE_VARIABLE, os.path.join(folder, "rank_"))
    if dump is None:
        os.unlink(path)
        return
    # For reading and writing: so it does not end when a writer closes it.
    pipe = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    atexit.register(_remove, path, os.getpid())
    threading.Thread(
        target=_serve, args=(pipe, path, dump), name="relaunch-flight", daemon=True
    ).start()


def _serve(pipe: int, path: str, dump: Any) -> None:
    target = path[: -len(".pipe")] + ".dump"
    while os.read(pipe, 4096):
        # Without stacks: the first dump with them holds the interpreter for more than a second.
        data = dump(includeCollectives=True, includeStackTraces=False, onlyActive=False)
        with open(f"{target}.new", "wb") as file:
            file.write(data)
        os.replace(f"{target}.new", target)
        time.sleep(MIN_INTERVAL)


def _remove(path: str, pid: int) -> None:
    if os.getpid() == pid:  # not in a process that the rank has forked
        try:
            os.unlink(path)
        except OSError:  # the generation's folder is gone
            return
