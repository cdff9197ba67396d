"""Children that begin as forks (relaunch.cli.forks), where Python or the kernel has no pidfds.

Real processes: each program runs apart, because only a process with one thread may fork.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT_THOSE_OF_PYTHON = "import os, signal; del os.pidfd_open, signal.pidfd_send_signal\n"
WITHOUT_THOSE_OF_THE_KERNEL = """
import ctypes, errno, struct

def refuse(call, code):
    # Load the number of the system call; compare it; return an error, or allow it.
    words = ((0x20, 0, 0, 0), (0x15, 0, 1, call), (6, 0, 0, 0x50000 | code), (6, 0, 0, 0x7FFF0000))
    rules = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in words))
    program = ctypes.create_string_buffer(struct.pack("HP", len(words), ctypes.addressof(rules)))
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value, pointer in ((38, 1, 0), (22, 2, ctypes.addressof(program))):
        if libc.prctl(option, value, ctypes.c_void_p(pointer), 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")

refuse(434, errno.ENOSYS)
"""
"""As a kernel before 5.3, or a container whose seccomp filter does not know pidfd_open."""
AWAIT = """
import asyncio, os, signal, subprocess, sys, time
from pathlib import Path
from relaunch.cli.forks import fork

def sleep():
    time.sleep(1000)
    return 0

log = Path(sys.argv[1])
assert fork("short", log, lambda: 3, is_attended=False).wait(60.0) == 3
child = fork("long", log, sleep, is_attended=False)
try:
    child.wait(0.01)
except subprocess.TimeoutExpired:
    child.terminate()
assert asyncio.run(child.wait_async()) == -signal.SIGTERM
child.kill()
print("all ended")
"""


@pytest.mark.parametrize(
    "without",
    [
        WITHOUT_THOSE_OF_PYTHON,
        WITHOUT_THOSE_OF_THE_KERNEL,
        WITHOUT_THOSE_OF_PYTHON + WITHOUT_THOSE_OF_THE_KERNEL,
    ],
    ids=["python", "kernel", "both"],
)
def test_a_child_is_awaited_without_pidfds(tmp_path: Path, without: str) -> None:
    command = [sys.executable, "-c", without + AWAIT, str(tmp_path / "log")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.stderr) == ("all ended\n", "")


AWAIT_TWICE = """
import asyncio, signal, sys, time
from pathlib import Path
from relaunch.cli.forks import fork

def sleep():
    time.sleep(1000)
    return 0

async def wait():
    before, after = (asyncio.create_task(child.wait_async()) for _ in range(2))
    await asyncio.sleep(0)  # both wait
    before.cancel()
    await asyncio.wait({before})
    child.terminate()
    return await asyncio.wait_for(after, 30)

child = fork("long", Path(sys.argv[1]), sleep, is_attended=False)
try:
    assert asyncio.run(wait()) == -signal.SIGTERM
finally:
    child.kill()
print("it ended")
"""


def test_a_cancelled_wait_leaves_the_other_waits_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", AWAIT_TWICE, str(tmp_path / "log")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.stderr) == ("it ended\n", "")
