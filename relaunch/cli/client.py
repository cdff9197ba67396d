"""The command line's identity towards the Temporal server, and the names it uses for jobs there."""

from __future__ import annotations

import getpass
import os
import socket
from datetime import timedelta

from temporalio.common import (
    SearchAttributeKey,
)

WORKFLOW = "TrainingJob"


TASK_TIMEOUT = timedelta(seconds=10)
"""Time after which another worker takes over a workflow task from one that died. On a worker that
starts with fifty jobs, tasks took longer than 3 s, and were done again."""


PHASE = SearchAttributeKey.for_keyword("Phase")


GENERATION = SearchAttributeKey.for_int("Generation")


def whoami() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # a container's user may have no name
        return f"{os.getuid()}@{socket.gethostname()}"
