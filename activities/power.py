"""Runs the command that cycles a node's power, on the worker's machine.

The caller checks before whether it may run; the node shows afterwards whether it worked.

A command is never started a second time, and continues when the worker ends: half a power cycle
could leave the node without power.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import PurePath
from typing import IO

from relaunch.repair.state import NoAnswer, OrderDone, RepairEvent
from relaunch.spec.fleet import Power

MAX_OUTPUT_BYTES = 2048
"""Bytes of its output that are kept: they go into the workflow history."""
POLL_INTERVAL_S = 0.05


async def cycle_power(node: str, power: Power | None, within: float) -> RepairEvent:
    """Run the power command once.

    A command that exceeds `within` seconds is killed, and its effect is unknown.
    """
    if power is None:
        return OrderDone(
            {
                "outcome": "done",
                "missing": f"the fleet file has no power command for {node} any more",
            }
        )
    # The other arguments may contain a password: none of them goes into a message.
    program = PurePath(power.cycle[0]).name
    # Use a file, not a pipe: a command that prints after this worker has died must not be killed by
    # that.
    with tempfile.TemporaryFile() as output:
        try:
            running = _start_command(power.cycle, output)
        except OSError as error:
            return OrderDone(
                {
                    "outcome": "done",
                    "missing": f"{program} cannot be run by the worker: {error.strerror}",
                }
            )
        began = time.monotonic()
        # The command belongs to no event loop: it may outlive this one.
        while running.poll() is None and time.monotonic() - began < within:  # noqa: ASYNC110
            await asyncio.sleep(POLL_INTERVAL_S)
        if running.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
            return NoAnswer(f"{program} did not end within {within:g} s")
        answer = {
            "program": program,
            "exit_code": running.returncode,
            "output": _read_tail(output),
            "took": time.monotonic() - began,
        }
        return OrderDone({"outcome": "done", **answer})


def _start_command(words: Sequence[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start the command in a separate session.

    asyncio is not used: it would kill the command at the end of its loop.
    """
    env = _environment()
    return subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=env,
        start_new_session=True,
    )


def _environment() -> dict[str, str]:
    """Return the worker's environment without relaunch's own variables.

    It may hold passwords that such commands need.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RELAUNCH_", "TEMPORAL_"))
    }


def _read_tail(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - MAX_OUTPUT_BYTES))
    return output.read(MAX_OUTPUT_BYTES).decode(errors="replace")
