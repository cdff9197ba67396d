"""One hang, or one long but healthy pause, at one step of one rank.

HANG=kind:step:rank:variant of the environment says which; a variant is another way to the same
kind. It happens once: the file `began.json` of the working folder keeps that, with the moment. The
training program beside this file imports it.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

KIND, STEP, RANK, VARIANT = (*os.environ.get("HANG", "none").split(":"), "0", "0", "0")[:4]
PAUSE = float(os.environ.get("PAUSE", "60"))
"""Seconds of a healthy pause."""
SLOWER = 10
"""How many times as long a slow rank takes."""
BEGAN = Path("began.json")
MY_RANK = os.environ.get("RANK", "0")
FOREVER = 10**7
RESTART = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
NETWORK = os.environ.get("RANK_NETWORK")
CLONE_NEWNET = 0x40000000

with Path("starts.jsonl").open("a") as starts:
    started = {"at": time.time(), "rank": int(MY_RANK), "restart": RESTART}
    starts.write(json.dumps(started) + "\n")

if NETWORK:
    # As in a container. Threads that torch starts follow, those of before would not.
    handle = os.open(f"/run/netns/{NETWORK}r{MY_RANK}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(handle, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"setns to the network of rank {MY_RANK}")
    os.close(handle)
    os.environ["GLOO_SOCKET_IFNAME"] = "training"


def happens(kind: str, step: int, rank: str | None = None) -> bool:
    """Return whether this rank is now to do what a kind says; True only once, with its mark."""
    if kind != KIND or step != int(STEP) or (rank or RANK) != MY_RANK:
        return False
    try:
        file = os.open(BEGAN, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return False
    mark = {
        "at": time.time(),
        "kind": kind,
        "step": step,
        "rank": int(MY_RANK),
        "node": os.environ.get("RELAUNCH_NODE", ""),
        "pid": os.getpid(),
    }
    os.write(file, json.dumps(mark).encode())
    os.close(file)
    return True


def second() -> bool:
    return VARIANT == "1"


def before_step(step: int) -> None:
    """Hang between two steps, as a bug of the program or by what the machine does to it."""
    for kind, hang in IN_THE_LOOP.items():
        if happens(kind, step):
            hang()


def stop() -> None:
    """Be stopped, at once or by another process in the middle of a step or a collective."""
    if second():
        subprocess.Popen(["sh", "-c", f"sleep 0.07; kill -STOP {os.getpid()}"])
    else:
        os.kill(os.getpid(), signal.SIGSTOP)


def deadlock() -> None:
    """Take two locks in the other order than another thread, which has the second already."""
    model, metrics = threading.Lock(), threading.Lock()
    both = threading.Barrier(2)

    def write_metrics() -> None:
        with metrics:
            both.wait()
            with model:
                pass

    threading.Thread(target=write_metrics, name="metrics", daemon=True).start()
    with model:
        both.wait()
        with metrics:
            pass


def loop_forever() -> None:
    """Burn CPU: in one function, or in a search that calls another one."""
    x, n = 3, 0

    def square(value: int) -> int:
        return value * value % 1_000_003

    while x != -1:
        x = square(x) + 1 if second() else x * x % 1_000_003
        n += 1


def read_blocked() -> None:
    """Read a shard of data from a file system whose server does not answer, or from a pipe."""
    with Path(os.environ["BLOCKED_FILE"]).open("rb", buffering=0) as shard:
        while shard.read(1 << 16):
            pass


def wait_for_child() -> None:
    """Wait for a lock that a child holds, which is stopped or waits itself."""
    context = multiprocessing.get_context("fork")
    lock, held = context.Lock(), context.Event()

    def keep() -> None:
        with lock:
            held.set()
            if second():
                time.sleep(FOREVER)
            os.kill(os.getpid(), signal.SIGSTOP)

    context.Process(target=keep, daemon=True).start()
    held.wait()
    with lock:
        pass


def handle_forever() -> None:
    """Receive a signal whose handler sleeps for ever, or waits for a lock."""
    log_lock = threading.Lock()

    def on_signal(_number: int, _frame: Any) -> None:
        if second():
            log_lock.acquire()
            log_lock.acquire()
        while True:
            time.sleep(30)

    signal.signal(signal.SIGUSR1, on_signal)
    os.kill(os.getpid(), signal.SIGUSR1)


def fill_pipe() -> None:
    """Write metrics to a child that does not read them: it is stopped, or sleeps."""
    reader = subprocess.Popen(["sleep", str(FOREVER)], stdin=subprocess.PIPE)
    if not second():
        reader.send_signal(signal.SIGSTOP)
    assert reader.stdin is not None
    while True:
        reader.stdin.write(b"loss 0.25\n" * 1000)


def sleep_in_upload() -> None:
    """Wait as before a second attempt to upload: no CPU, no I/O, one stack."""
    time.sleep(PAUSE)


def upload_by_child() -> None:
    """Wait for a child that sends a checkpoint, some kilobytes a second."""
    send = (
        "import os, sys, time\n"
        "until = time.monotonic() + float(sys.argv[1])\n"
        "with open(os.devnull, 'wb', buffering=0) as bucket:\n"
        "    while time.monotonic() < until:\n"
        "        bucket.write(bytes(4096)); time.sleep(0.25)\n"
    )
    subprocess.run([sys.executable, "-c", send, str(PAUSE)], check=True)


def compile_kernels() -> None:
    """Wait for two children that compute, as a compiler's do."""
    work = (
        "import sys, time\n"
        "until = time.monotonic() + float(sys.argv[1])\n"
        "while time.monotonic() < until:\n"
        "    sum(n * n for n in range(10000))\n"
    )
    children = [subprocess.Popen([sys.executable, "-c", work, str(PAUSE)]) for _ in range(2)]
    for child in children:
        child.wait()


IN_THE_LOOP: dict[str, Callable[[], None]] = {
    "stopped": stop,
    "deadlock": deadlock,
    "busy_loop": loop_forever,
    "blocked_read": read_blocked,
    "child_lock": wait_for_child,
    "handler": handle_forever,
    "full_pipe": fill_pipe,
    # Its network is cut from outside, once the mark is there.
    "partition": lambda: None,
    "upload_sleep": sleep_in_upload,
    "upload_child": upload_by_child,
    "compile": compile_kernels,
}


def in_collective(step: int, dist: Any, tensor: Any) -> None:
    """Do something else than the collective that the other ranks enter now."""
    world = dist.get_world_size()
    peer = (int(MY_RANK) + 1) % world
    if happens("never_enters", step):
        if second():
            dist.recv(tensor, src=peer)
        is_ready = threading.Condition()
        with is_ready:
            is_ready.wait_for(lambda: False)
    if happens("order", step):
        # As the root it comes back from the broadcast, and enters the collective one too late.
        dist.broadcast(tensor, src=int(MY_RANK) if second() else peer)


def stretch(step: int, seconds: float) -> float:
    """Return how long the computation of a step takes: on a slow rank, many times as long."""
    if happens("slow_rank", step):
        return SLOWER * seconds
    if KIND == "slow_rank" and MY_RANK == RANK and step > int(STEP):
        return SLOWER * seconds
    return seconds


def loading(step: int) -> None:
    """Block the process that loads data for a rank, or have it take long and work."""
    if happens("loader", step):
        if second():
            multiprocessing.get_context("fork").Queue().get()
        lock = multiprocessing.get_context("fork").Lock()
        lock.acquire()
        lock.acquire()
    if happens("slow_loader", step):
        until = time.monotonic() + PAUSE
        with Path(sys.executable).open("rb") as source:
            while time.monotonic() < until:
                if second():
                    sum(n * n for n in range(50_000))
                elif not source.read(1 << 14):
                    source.seek(0)
                time.sleep(0.1)


def evaluating(step: int, dist: Any, evaluate: Callable[[], Any]) -> None:
    """Evaluate and say nothing: rank 0 while the others wait in a barrier, or all ranks."""
    alone = happens("eval_rank0", step, rank="0")
    everywhere = KIND == "eval_all" and step == int(STEP)
    if alone or everywhere:
        if everywhere:
            happens("eval_all", step, rank="0")
        until = time.monotonic() + PAUSE
        while time.monotonic() < until:
            evaluate()
    if step == int(STEP) and KIND in ("eval_rank0", "eval_all"):
        dist.barrier()


def saving(step: int, dist: Any, state: Any, save: Callable[[Any, Any], None]) -> None:
    """Save a checkpoint through a pipe whose reader is slow; the other ranks wait in a barrier."""
    if happens("slow_save", step, rank="0"):
        pieces = 40
        copy = (
            "import sys, time\n"
            "while sys.stdin.buffer.read(65536):\n"
            "    time.sleep(float(sys.argv[1]))\n"
        )
        command = [sys.executable, "-c", copy, str(PAUSE / pieces)]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as slow:
            assert slow.stdin is not None
            for _ in range(pieces):
                save(state, slow.stdin)
                slow.stdin.write(pickle.dumps(os.urandom(1 << 16)))
            slow.stdin.close()
    if step == int(STEP) and KIND == "slow_save":
        dist.barrier()
