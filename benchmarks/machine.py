"""What a result says of the machine that it was measured on."""

from __future__ import annotations

import os
import platform
from typing import Any


def describe_machine() -> dict[str, Any]:
    """Return its cores, kernel, Python, and load (1, 5 and 15 minutes) when it is asked."""
    return {
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": os.getloadavg(),
    }
