"""The guard of one generation: kills its ranks when the keeper should have done it and has not.

A process beside the keeper. It opens no file outside of /proc and of control groups, so that neither a keeper that is stopped nor one
that waits for a disk keeps ranks alive past their fence. It decides nothing: the keeper and the supervisor tell it the time.
"""

from __future__ import annotations

import os
import signal
from typing import Dict, List, Tuple

from relaunch.agent import processes
from relaunch.agent.loop import Channel, Loop
from relaunch.agent.protocol import Json, Token, now
from relaunch.agent.ranks import cgroup

PING_INTERVAL = 2.0
"""Seconds between signs of life to the keeper."""
MOST_MOVES = 20
"""Looks for what was forked between two moves: each finds the children of what the last one has missed."""
PAUSES = (0.02, 1.0)
"""Seconds between two looks for what is left while killing: the first and the longest."""


def run(token: Token, order: Json, state: str, keeper: processes.Process, link: int, extensions: int, news: Json) -> None:
    """Be the guard. The process was forked from the keeper a moment ago.

    Args:
        token: of the generation.
        order: what `prepare` was given.
        state: the node's state folder, as ranks have it in their environment.
        keeper: which process it is; where it is dead by now, its pid says nothing.
        link: a socket to the keeper.
        extensions: a pipe on which supervisors tell to when the fence has moved.
        news: what the keeper knows now.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    processes.set_name("relaunch-guard")
    processes.close_all_but([link, extensions])
    Guard(token, order, state, keeper, link, extensions, news).run()


class Guard:
    def __init__(self, token: Token, order: Json, state: str, keeper: processes.Process, link: int, extensions: int, news: Json) -> None:
        self.token = token
        self.order = order
        self.node_state = state
        self.keeper = keeper
        self.state = "prepared"
        self.may_run = False
        """Whether a rank may have been forked."""
        self.ends: float | None = None
        """When the fence is due (CLOCK_BOOTTIME); None: never."""
        self.kill_at: float | None = None
        """While stopping: when the keeper sends SIGKILL."""
        self.supervisor = 0
        self.groups: Dict[int, int] = {}
        self.cgroup: str | None = None
        self.has_moved = False
        """Whether what the ranks have forked is in their control group."""
        self.pinged_at = 0.0
        self.look_at = 0.0
        self.pause = PAUSES[0]
        self.gives_up_at: float | None = None
        """Set once the keeper is dead: when to leave what SIGKILL does not end."""
        self.loop = Loop()
        self.hear_keeper(news)
        self.extensions = Channel(self.loop, extensions, self._hear_supervisor, lambda: None)
        self.link = Channel(self.loop, link, self.hear_keeper, self._see_keeper_dead)

    def run(self) -> None:
        while True:
            self.loop.turn(self._next_deadline())
            if now() >= self.pinged_at + PING_INTERVAL:
                self.pinged_at = now()
                self.link.send({"alive": True})
            # Not before it is known which process is the supervisor, which stays outside.
            if self.cgroup is not None and self.groups and self.supervisor and not self.has_moved:
                self._move(self.cgroup)
            if self._is_overdue() and now() >= self.look_at:
                # What was said just now counts: after a stop of this process it waits to be read.
                self.extensions.hear_pending()
                self.link.hear_pending()
                if self._is_overdue() and not self._kill():
                    return

    def hear_keeper(self, news: Json) -> None:
        self.state = news["state"]
        self.may_run = news["may_run"]
        self.ends = news["ends"]
        self.kill_at = news["kill_at"]
        self.supervisor = news["supervisor"]
        self.groups = dict(news["groups"])
        self.cgroup = news["cgroup"]

    def _hear_supervisor(self, news: Json) -> None:
        """Take over when the fence is due: the keeper hears the same, unless it is stopped."""
        if self.state == "running":
            self.ends = news["ends"]

    def _see_keeper_dead(self) -> None:
        self.gives_up_at = now() + float(self.order["stuck_after"])
        self.look_at = now()
        if self.state == "gone" or not self.may_run:
            os._exit(0)

    @property
    def _due_at(self) -> float | None:
        """By when everything that a rank has forked must be dead."""
        if self.gives_up_at is not None:
            return 0.0
        if not self.may_run or self.state in ("ended", "gone"):
            return None
        if self.kill_at is not None:
            return self.kill_at
        return None if self.ends is None else self.ends + float(self.order["stop_grace"])

    def _is_overdue(self) -> bool:
        return self._due_at is not None and now() >= self._due_at

    def _next_deadline(self) -> float:
        times = [self.pinged_at + PING_INTERVAL]
        if self._due_at is not None:
            times.append(max(self._due_at, self.look_at))
        return min(times)

    def _move(self, folder: str) -> None:
        """Move ranks and all that they have forked by now into their control group; what they fork later is born there.

        Not the keeper does it, nor the ranks themselves: each first move waits some milliseconds for the kernel's RCU.
        """
        self.has_moved = True
        moved: set[int] = set()
        for _ in range(MOST_MOVES):
            pids = {process.pid for process in self._find_below()} - moved
            if not pids:
                return
            cgroup.move(folder, pids)
            moved |= pids

    def _find_below(self) -> List[processes.Process]:
        """Ranks are below their keeper, a subreaper, however they were forked."""
        return processes.list_below(self.keeper, without=[os.getpid(), self.supervisor])

    def _kill(self) -> bool:
        """Kill what is left; return whether to go on, which is so until the keeper and everything are gone."""
        if self.cgroup is not None:
            cgroup.kill(self.cgroup)
        left = self._find_left()
        for process in left:
            processes.kill(process, signal.SIGKILL)
        self.pause = min(PAUSES[1], self.pause * 2) if left else PAUSES[1]
        self.look_at = now() + self.pause
        return self.gives_up_at is None or (bool(left) and now() < self.gives_up_at)

    def _find_left(self) -> List[processes.Process]:
        if self.gives_up_at is None:
            return self._find_below()
        state = self.node_state
        named = processes.of_token(self.token.text, lambda rest: rest == "", state, self.groups)
        return named + (cgroup.members(self.cgroup) if self.cgroup is not None else [])


def news_of(
    state: str,
    may_run: bool,
    ends: float | None,
    kill_at: float | None,
    supervisor: int,
    groups: List[Tuple[int, int]],
    cgroup: str | None,
) -> Json:
    """What a keeper tells its guard, all of it each time.

    Args:
        state: the keeper's.
        may_run: whether a rank may have been forked.
        ends: when the fence is due.
        kill_at: when the keeper kills what it is stopping, if it is.
        supervisor: its pid, 0 for none: it is no rank.
        groups: pid and start time of the ranks, for when the keeper is dead.
        cgroup: the control group of the ranks, if there is one.
    """
    return {
        "state": state,
        "may_run": may_run,
        "ends": ends,
        "kill_at": kill_at,
        "supervisor": supervisor,
        "groups": groups,
        "cgroup": cgroup,
    }
