"""Takes steps without a GPU until the folder has a file `end`."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

for step in itertools.count(1):
    print(f"step {step}: loss 1.0", flush=True)
    time.sleep(0.5)
    if Path("end").exists():
        break
