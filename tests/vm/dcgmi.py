#!/usr/bin/python3
"""A double of dcgmi whose GPU is sick until a reboot heals it.

It is sick as long as that boot lasts whose id is in the file `sick` of the caller.
"""

import json
import os
import sys
import time
from pathlib import Path

boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
named = Path.home() / "sick"
sick = named.exists() and named.read_text().strip() == boot
with open(Path.home() / "dcgmi.calls", "a") as calls:
    calls.write(
        json.dumps(
            {
                "at": time.time(),
                "arguments": sys.argv[1:],
                "boot": boot,
                "sick": sick,
                "uid": os.geteuid(),
            }
        )
        + "\n"
    )
said = json.loads(Path("/opt/doubles", "sick.json" if sick else "healthy.json").read_text())
sys.stdout.write(said["stdout"])
sys.exit(said["exit_code"])
