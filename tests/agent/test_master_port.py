"""MASTER_PORT is held for one generation and is free when its ranks start."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator

import pytest

from relaunch.agent import processes
from relaunch.agent.ranks.master_port import hold_port, release_port

ADDRESS = "127.0.0.1"


@pytest.fixture
def holder() -> Iterator[socket.socket]:
    with hold_port(ADDRESS) as held:
        yield held


def test_no_other_process_can_bind_a_held_port(holder: socket.socket) -> None:
    with pytest.raises(OSError, match="in use"):
        socket.create_server(holder.getsockname())


def test_rank_0_binds_although_a_helper_has_a_copy(holder: socket.socket) -> None:
    target = holder.getsockname()
    helper = processes.fork(signal.pause)  # as one that the scheduler has not let run yet
    try:
        release_port(holder)
        socket.create_server(target).close()
    finally:
        os.kill(helper, signal.SIGKILL)
        os.waitpid(helper, 0)
