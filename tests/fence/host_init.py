"""Process 1 of a host: makes its mounts, says `up`, and reaps the processes that are left to it.

Standard library only. `host_init.py {"name": NAME, "binds": [[SOURCE, TARGET], …]}`
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys


def run(*words: str) -> None:
    subprocess.run(words, check=True)


def main() -> None:
    given = json.loads(sys.argv[1])
    run("mount", "-t", "proc", "proc", "/proc")
    run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    os.makedirs("/run/sshd", 0o755)
    for source, target in given["binds"]:
        run("mount", "--bind", source, target)
    run("hostname", given["name"])
    run("ip", "link", "set", "lo", "up")
    print("up", flush=True)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        signal.sigtimedwait([signal.SIGCHLD], 5)


if __name__ == "__main__":
    main()
