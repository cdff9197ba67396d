"""Record what a person sees on a terminal of 160 x 40 while `relaunch run` draws bars.

    python -m tests.programs.terminal > docs/terminal.txt

Two ranks draw a bar as tqdm does; rank 1 is killed, and both start again. A terminal emulator
(pyte) keeps the screen at three moments.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pyte

COLUMNS, ROWS = 160, 40
TIMEOUT = 180.0
RELAUNCH = Path(sys.executable).with_name("relaunch")
PROGRAM = """
import os, pathlib, signal, sys, time

rank, killed = os.environ["RANK"], pathlib.Path("killed")
first = not killed.exists()
print(f"resuming from step {0 if first else 40}")
for step in range(0 if first else 40, 101):
    done = "█" * (step // 4)
    times = f"[00:{step // 20:02d}, 20.0it/s, loss=3.1]"
    sys.stderr.write(f"\\rEpoch 0: {step:3d}%|{done:<25}| {step}/100 {times}")
    sys.stderr.flush()
    time.sleep(0.05)
    if step == 60 and first and rank == "1":
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
sys.stderr.write("\\n")
print("saved checkpoint 100")
"""
PLAIN = {name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ}


class Recording:
    """A program on a terminal, and what the terminal shows."""

    def __init__(self, command: list[str], folder: Path, environment: Mapping[str, str]) -> None:
        self.screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self.screen)
        self._terminal, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)

    @property
    def text(self) -> str:
        lines = [line.rstrip() for line in self.screen.display]
        return re.sub(r"train-\d{4}-\d{6}-\d+", "train-1123-091500-4711", "\n".join(lines)).rstrip()

    def until(self, is_shown: Callable[[str], bool]) -> str:
        """Return the first screen for which `is_shown` is true.

        Raises:
            TimeoutError: There is none.
        """
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            if select.select([self._terminal], [], [], 1)[0]:
                try:
                    data = os.read(self._terminal, 4096)
                except OSError:  # EIO: the program has ended
                    data = b""
                if not data:
                    break
                self._stream.feed(data)
            if is_shown(self.text):
                return self.text
        if is_shown(self.text):
            return self.text
        raise TimeoutError(f"the terminal never showed it:\n{self.text}")

    def end(self) -> int:
        with contextlib.suppress(OSError):
            while os.read(self._terminal, 4096):
                pass
        return self._process.wait(TIMEOUT)


def record(folder: Path) -> dict[str, str]:
    """Return the screens by what has happened."""
    (folder / "train.py").write_text(PROGRAM)
    command = [str(RELAUNCH), "run", "--nproc-per-node", "2", "train.py"]
    recording = Recording(command, folder, {**PLAIN, "TERM": "xterm-256color"})
    screens = {
        "both ranks draw": recording.until(lambda text: text.count("|█████") == 2),
        "after the restart": recording.until(
            lambda text: (
                "--- generation 2" in text
                and text.partition("--- generation 2")[2].count("|█") == 2
            )
        ),
        "at the end": recording.until(lambda text: "SUCCEEDED" in text),
    }
    assert recording.end() == 0
    return screens


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="terminal-") as folder:
        for moment, text in record(Path(folder)).items():
            print(f"--- {moment}\n{text}\n")


if __name__ == "__main__":
    main()
