"""Run the worker of this checkout with the agent of a release on its nodes.

    python -m tests.upgrade.agent_of FOLDER

FOLDER holds the package `relaunch` of that release. A worker brings its own agent to local and SSH
nodes, so no service is like this; an image of a container may be.
"""

from __future__ import annotations

import sys
from pathlib import Path

from relaunch.backends import artifact
from relaunch.worker_main import run

if __name__ == "__main__":
    artifact._PACKAGE = Path(sys.argv.pop(1), "relaunch")
    run()
