"""A rank that leaves a process behind, which ignores SIGTERM and writes on. Standard library only.

    stray.py KIND SUDO FOLDER

KIND  session      in another session, with the rank's environment
      clean        in another session, with an empty environment
      root         in another session, as root
      root-group   in the rank's process group, as root
      shell        nothing is left behind: the rank is a child of a shell, which its shim started
SUDO  a program that executes its arguments as root
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

RANK_PROGRAM = Path(__file__).resolve().parents[1] / "chaos" / "rank.py"
PYTHON = "/usr/bin/python3"
INTERVAL_S = 0.02
LIFETIME_S = 120.0


def write_on(path: str, token: str, rank: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    end = time.monotonic() + LIFETIME_S
    while time.monotonic() < end:
        stamp = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
        os.write(handle, f"{token} {rank} {os.uname().nodename} {stamp}\n".encode())
        time.sleep(INTERVAL_S)


def leave(words: list[str], own_session: bool, environment: dict[str, str]) -> None:
    """Start a program that is not our child any more."""
    if os.fork() == 0:
        if own_session:
            os.setsid()
        if os.fork() == 0:
            os.execve(words[0], words, environment)
        os._exit(0)
    os.wait()


def main() -> None:
    kind, sudo, folder = sys.argv[1:4]
    if kind == "write":
        write_on(*sys.argv[2:5])
        return
    os.umask(0)
    ours = [f"{folder}/writes", os.environ["RELAUNCH_TOKEN"], os.environ["RANK"]]
    words = [PYTHON, "-S", __file__, "write", *ours]
    if kind.startswith("root"):
        words = [sudo, *words]
    if kind != "shell":
        environment = {} if kind == "clean" else dict(os.environ)
        leave(words, kind != "root-group", environment)
    rank = [PYTHON, "-S", str(RANK_PROGRAM), folder, "--stand-still", "--write-on", str(INTERVAL_S)]
    if kind == "shell":
        os.execv("/bin/sh", ["sh", "-c", " ".join(rank) + "; exit $?"])
    os.execv(rank[0], rank)


if __name__ == "__main__":
    main()
