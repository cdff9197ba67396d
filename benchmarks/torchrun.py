"""torchrun as a contender on this machine: one agent with four ranks, or two with two ranks each.

torchrun is not tuned: `monitor_interval` is its default unless the contender's name has another.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.contenders import Contender, free_port

RESTARTS = 1000  # more than any benchmark has rounds: its budget must not end the run


class Torchrun(Contender):
    def __init__(self, python: str, nodes: int = 1, monitor_interval: float | None = None) -> None:
        if nodes not in (1, 2):
            raise ValueError(f"nodes={nodes}: expected 1 or 2")
        super().__init__()
        self._python, self._nodes, self._interval = python, nodes, monitor_interval
        tuned = "" if monitor_interval is None else f", --monitor-interval {monitor_interval:g}"
        self.name = f"torchrun, {nodes} node{'s' if nodes > 1 else ''}{tuned}"

    def launch(self, folder: Path) -> None:
        endpoint = f"127.0.0.1:{free_port()}"
        for node in range(self._nodes):
            command = [self._python, "-m", "torch.distributed.run"]
            command += [
                "--nnodes",
                str(self._nodes),
                "--nproc-per-node",
                str(self.ranks // self._nodes),
            ]
            command += ["--max-restarts", str(RESTARTS), "--log-dir", str(folder / f"logs-{node}")]
            if self._nodes > 1:
                command += [
                    "--rdzv-backend",
                    "c10d",
                    "--rdzv-endpoint",
                    endpoint,
                    "--rdzv-id",
                    "benchmark",
                ]
                command += ["--local-addr", "127.0.0.1"]
            else:
                command += ["--standalone"]
            if self._interval is not None:
                command += ["--monitor-interval", str(self._interval)]
            # --no-python: the ranks run under the interpreter of all contenders.
            self.spawn([*command, "--no-python", *self.command], folder / f"torchrun-{node}.log")


def version(python: str) -> str | None:
    """torch's version under that interpreter, or None where torch cannot be imported."""
    answer = subprocess.run(
        [python, "-c", "import torch; print(torch.__version__)"],
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.stdout.strip() if answer.returncode == 0 else None
