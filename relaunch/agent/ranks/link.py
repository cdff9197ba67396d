"""The keeper's line to a helper, its supervisor or its guard: forks one, replaces it when it dies or freezes.

What is said over it is the keeper's and the helper's business.
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

SILENCE = 10.0
"""A helper says something every 2 s; one that is silent for five times that is frozen, and is replaced."""
RESTART_PAUSE = 0.5
"""A helper that dies as soon as it is born must not eat a core."""
BIRTH_PAUSE = 0.01
"""The first is forked a moment after the keeper is up: the answer to `prepare` goes out first, on every node of the gang."""


class ChildLink:
    def __init__(
        self,
        loop: Loop,
        generation: Generation,
        name: str,
        become: Callable[[int], None],
        hear: Callable[[Json], None],
    ) -> None:
        """`become` is what the forked process does with its end of the line; `hear` gets what it says.

        `name` is what the state folder calls it.
        """
        self.name = name
        self.loop = loop
        self.generation = generation
        self.become = become
        self.hear = hear
        self.pid = 0
        self.due_at = now() + BIRTH_PAUSE
        self.heard_at = 0.0
        self._channel: Channel | None = None

    @property
    def next_deadline(self) -> float:
        return self.heard_at + SILENCE if self.pid else self.due_at

    def send(self, news: Json) -> None:
        if self._channel is not None:
            self._channel.send(news)

    def hear_pending(self) -> None:
        """Hear now what the helper has said already."""
        if self._channel is not None:
            self._channel.hear_pending()

    def tick(self) -> bool:
        """Do what is due; return whether another helper was born."""
        if self.pid and now() > self.heard_at + SILENCE:
            os.kill(self.pid, signal.SIGKILL)
            self.heard_at = now()
        if self.pid or now() < self.due_at:
            return False
        self._fork()
        return True

    def reaped(self, pid: int) -> bool:
        """Whether the child that ended was this helper."""
        if pid != self.pid:
            return False
        self.pid = 0
        return True

    def kill(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)

    def _fork(self) -> None:
        if self._channel is not None:
            self._channel.drop()
        ours, theirs = socket.socketpair()
        end = theirs.detach()
        self.heard_at, self.due_at = now(), now() + RESTART_PAUSE
        self.pid = processes.fork(lambda: self.become(end))
        os.close(end)
        self._channel = Channel(self.loop, ours.detach(), self._hear, lambda: None)
        found = processes.look(self.pid)
        if found is None:
            return
        try:
            self.generation.write_identity(self.name, self.pid, found.started)
        except OSError as error:  # a full disk, or a folder that was removed: ranks live on
            disk.log(f"{self.name}.json cannot be written: {error}")

    def _hear(self, told: Json) -> None:
        self.heard_at = now()
        self.hear(told)
