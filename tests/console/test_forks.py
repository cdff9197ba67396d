"""Children that begin as forks (relaunch.cli.forks), in a Python without `os.pidfd_open`.

Real processes: each program runs apart, because only a process with one thread may fork.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WITHOUT_PIDFDS = """
import asyncio, os, signal, subprocess, sys, time
from pathlib import Path
del os.pidfd_open, signal.pidfd_send_signal
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


def test_a_child_is_awaited_without_pidfds_of_python(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_PIDFDS, str(tmp_path / "log")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.stderr) == ("all ended\n", "")
