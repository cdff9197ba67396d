"""What the command line says of itself to the server, and of the jobs there: who asks, and by which names."""

from __future__ import annotations

import getpass
import os
import socket
from datetime import timedelta

from temporalio.common import (
    SearchAttributeKey,
)

WORKFLOW = "TrainingJob"


TASK_TIMEOUT = timedelta(seconds=3)
"""After which another worker takes over from one that died with a workflow task in its hands; the default is 10 s."""


PHASE = SearchAttributeKey.for_keyword("Phase")


GENERATION = SearchAttributeKey.for_int("Generation")


def whoami() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # a container's user may have no name
        return f"{os.getuid()}@{socket.gethostname()}"
