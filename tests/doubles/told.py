"""A double of dcgmi and nvidia-smi, installed under such a name.

It does what `<name>.json` beside it says and notes how it was called.

stdout, stderr, exit_code   what it prints and how it ends
repeat                      how often it prints stdout
seconds                     how long it takes first
until                       a file without which it does not go on
stubborn                    it ignores SIGTERM
children                    how many stubborn processes it forks into its group, which live on
then                        files that it writes at its end, by path: what a reset, say, changes
about the GPUs
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

own = Path(sys.argv[0])
with open(own.with_name(f"{own.name}.calls"), "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\n")
told = json.loads(own.with_name(f"{own.name}.json").read_text())
if told.get("stubborn"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range(told.get("children", 0)):
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
        os._exit(0)
    with open(own.with_name(f"{own.name}.pids"), "a") as file:
        file.write(f"{pid}\n")
with open(own.with_name(f"{own.name}.pids"), "a") as file:
    file.write(f"{os.getpid()}\n")
time.sleep(told.get("seconds", 0))
while "until" in told and not Path(told["until"]).exists():
    time.sleep(0.02)
for _ in range(told.get("repeat", 1)):
    sys.stdout.write(told.get("stdout", ""))
sys.stderr.write(told.get("stderr", ""))
for path, text in told.get("then", {}).items():
    Path(path).write_text(text)
sys.exit(told.get("exit_code", 0))
