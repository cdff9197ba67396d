"""The shim's socket to a helper process: its supervisor or its guard.

Forks the helper, and replaces it when it dies or stops responding. The content of the messages is
up to the shim and the helper.
"""

from __future__ import annotations

import os
import signal
import socket
from typing import Callable

from relaunch.agent import disk, processes
from relaunch.agent.loop import Channel, Loop
from relaunch.agent.protocol import Json, now
from relaunch.agent.state import Generation

SILENCE_TIMEOUT = 10.0
"""Seconds without a message after which a helper is replaced: five times its 2 s interval."""
RESTART_DELAY = 0.5
"""Seconds between two forks, so that a helper that dies at once does not keep a core busy."""
FIRST_FORK_DELAY = 0.01
"""Seconds from the start of the shim to the first fork of a helper.

The answer to `prepare` is sent first, because every node of the gang waits for it.
"""


class ChildLink:
    def __init__(
        self,
        loop: Loop,
        generation: Generation,
        name: str,
        become: Callable[[int], None],
        handle_message: Callable[[Json], None],
    ) -> None:
        """Create the link; `tick` forks the helper, and `record` writes who it is.

        Args:
            loop: The event loop of the shim.
            generation: The generation of the shim.
            name: The name of the helper in the state folder.
            become: Runs in the forked process, with its end of the socket.
            handle_message: Is called with each message from the helper.
        """
        self.name = name
        self.loop = loop
        self.generation = generation
        self.become = become
        self.handle_message = handle_message
        self.pid = 0
        self.due_at = now() + FIRST_FORK_DELAY
        self.heard_at = 0.0
        self.is_excused = False
        self.gone_at = now()
        """While there is no helper: since when."""
        self.obstacle = ""
        """Why the last fork of the helper failed; empty: it did not."""
        self._channel: Channel | None = None

    @property
    def next_deadline(self) -> float:
        return self.heard_at + SILENCE_TIMEOUT if self.pid else self.due_at

    def send(self, news: Json) -> None:
        if self._channel is not None:
            self._channel.send(news)

    def read_pending(self) -> None:
        """Handle the messages that the helper has already sent."""
        if self._channel is not None:
            self._channel.read_pending()

    def tick(self) -> bool:
        """Kill a helper that is silent, fork one if due; return whether one was forked.

        The caller then calls `record`, after what must not wait for the disk.
        """
        if self.pid and now() > self.heard_at + SILENCE_TIMEOUT:
            os.kill(self.pid, signal.SIGKILL)
            self.heard_at = now()
        if self.pid or now() < self.due_at:
            return False
        self.due_at = now() + RESTART_DELAY
        try:
            self._fork()
        except OSError as error:  # no process or descriptor is left: ranks go on meanwhile
            self.obstacle = str(error.strerror)
            disk.log(f"the {self.name} cannot be started, which is tried again: {error}")
            return False
        self.obstacle = ""
        return True

    def record(self) -> None:
        """Write who the helper is."""
        process = processes.read_process(self.pid)
        if process is None:
            return
        try:
            self.generation.write_identity(self.name, self.pid, process.started)
        except OSError as error:  # disk full or folder removed: the ranks keep running
            disk.log(f"{self.name}.json cannot be written: {error}")

    def excuse_silence(self) -> None:
        """Begin to wait for the next message of the helper again: this process did not run.

        Only once for each message. Else a helper that hangs would never be replaced where this
        process hangs again and again.
        """
        if self.pid and not self.is_excused:
            self.is_excused = True
            self.heard_at = now()

    def handle_exit(self, pid: int) -> bool:
        """Return whether the child that ended was this helper; if so, mark it as gone."""
        if pid != self.pid:
            return False
        self.pid = 0
        self.gone_at = now()
        return True

    def kill(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)

    def _fork(self) -> None:
        if self._channel is not None:
            self._channel.drop()
        ours, theirs = socket.socketpair()
        end = theirs.detach()
        try:
            self.pid = processes.fork(lambda: self.become(end))
        except OSError:
            ours.close()
            raise
        finally:
            os.close(end)
        self.heard_at, self.is_excused = now(), False
        self._channel = Channel(self.loop, ours.detach(), self._handle_message, lambda: None)

    def _handle_message(self, message: Json) -> None:
        self.heard_at, self.is_excused = now(), False
        self.handle_message(message)
