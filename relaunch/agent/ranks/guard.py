"""The guard of one generation: kills its ranks if the shim misses the deadline for doing so.

The guard is a separate process beside the shim. It opens files only in /proc and in control
groups, so ranks do not outlive their fence when the shim is stopped (SIGSTOP) or blocked on a
disk. It makes no decisions: the shim and the supervisor send it the deadlines.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Dict, List, Tuple

from relaunch.agent import processes, search
from relaunch.agent.loop import Channel, Loop
from relaunch.agent.protocol import Json, Token, now
from relaunch.agent.ranks import cgroup
from relaunch.agent.search import SearchResult

PING_INTERVAL = 2.0
"""Seconds between keep-alive messages to the shim."""
MAX_MOVES = 20
"""Maximum number of passes when moving processes into the control group.

Each pass finds what was forked since the previous one, such as children of processes it missed.
"""
MAX_SEARCH_PAUSE = 60.0
"""Seconds between two searches of the node, at most, while one has left a process behind."""
SCAN_INTERVALS = (0.02, 1.0)
"""Backoff in seconds between scans for survivors while killing: the first and the longest."""


def run(
    token: Token,
    order: Json,
    state: str,
    shim: processes.Process,
    link: int,
    extensions: int,
    news: Json,
) -> None:
    """Run the guard in a process that was just forked from the shim.

    Args:
        token: The token of the generation.
        order: The `prepare` order.
        state: The node's state folder, as ranks have it in their environment.
        shim: The shim, by pid and start time: the pid alone may be reused after its death.
        link: A socket to the shim.
        extensions: A pipe on which supervisors send who they are and the new time of the fence.
        news: The shim's current state, as `make_news` returns it.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    processes.outlive_terminating_signals()  # it ends with the shim, once nothing is left to kill
    os.setsid()
    processes.set_name("relaunch-guard")
    processes.adopt_orphans()  # else what a search leaves behind is the shim's, like a rank
    processes.close_all_but([link, extensions])
    Guard(token, order, state, shim, link, extensions, news).run()


class Guard:
    def __init__(
        self,
        token: Token,
        order: Json,
        state: str,
        shim: processes.Process,
        link: int,
        extensions: int,
        news: Json,
    ) -> None:
        self.token = token
        self.order = order
        self.node_state = state
        self.shim = shim
        self.state = "prepared"
        self.may_run = False
        """Whether any rank may have been forked."""
        self.ends: float | None = None
        """When the fence is due, in seconds of CLOCK_BOOTTIME; None if never."""
        self.kill_at: float | None = None
        """While stopping: when the shim sends SIGKILL."""
        self.supervisor = 0
        self.announced: List[Tuple[int, int]] = []
        """Pid and start time of the supervisors that have said so themselves.

        A shim that hangs right after it has forked one has not told its pid.
        """
        self.groups: Dict[int, int] = {}
        self.cgroup: str | None = None
        self.has_clients = False
        """Whether ranks may have had a daemon start processes, which are not below the shim."""
        self.search = self.answered = 0
        """The numbers of the last search that the shim has asked for, and of the last one made."""
        self.search_at = 0.0
        self.search_pause = 0.0
        self.killed: List[processes.Process] = []
        """What such searches have found and killed. It may still be dying."""
        self.has_moved = False
        """Whether the ranks and what they forked were moved into their control group."""
        self.pinged_at = 0.0
        self.scan_at = 0.0
        self.pause = SCAN_INTERVALS[0]
        self.give_up_at: float | None = None
        """Set once the shim is dead: when to give up on processes that SIGKILL does not end."""
        self.has_fenced = False
        """Whether the shim was sent the news that the fence is carried out here."""
        self.loop = Loop()
        self.handle_news({**news, "behind": False})
        self.extensions = Channel(self.loop, extensions, self._handle_extension, lambda: None)
        self.link = Channel(self.loop, link, self.handle_news, self._handle_shim_death)

    def run(self) -> None:
        while True:
            if self.search > self.answered and self._may_search():
                self.answered = self.search
                left, unread, _ = self._search_node()
                self.link.send(
                    {
                        "searched": self.answered,
                        "left": [(process.pid, process.started) for process in left],
                        "unread": [(process.pid, process.started) for process in unread],
                    }
                )
            self.loop.run_once(self._next_deadline())
            if now() >= self.pinged_at + PING_INTERVAL:
                self.pinged_at = now()
                self.link.send({"alive": True})
            # Wait until the pid of the supervisor is known: it must stay outside the group.
            if self.cgroup is not None and self.groups and self.supervisor and not self.has_moved:
                self._move(self.cgroup)
            if self._is_overdue() and now() >= self.scan_at:
                # If this process was stopped, extensions may be waiting unread: read them first.
                self.extensions.read_pending()
                self.link.read_pending()
                if self._is_overdue() and not self._kill():
                    return

    def handle_news(self, news: Json) -> None:
        self.state = news["state"]
        self.may_run = news["may_run"]
        if not news["behind"]:
            self.ends = news["ends"]
        if news["kill_at"] != self.kill_at:
            self.search_at = self.search_pause = 0.0  # a stop does not wait for the next search
        self.kill_at = news["kill_at"]
        self.supervisor = news["supervisor"]
        self.groups = dict(news["groups"])
        self.cgroup = news["cgroup"]
        self.has_clients = news["has_clients"]
        self.search = news["search"]

    def _handle_extension(self, news: Json) -> None:
        """Handle what a supervisor sends. The shim gets the time as well, unless it is stopped."""
        if "supervisor" in news:
            pid, started = news["supervisor"]
            self.announced = [*filter(_is_shown, self.announced), (pid, started)]
        elif self.state == "running":
            self.ends = news["ends"]

    def _handle_shim_death(self) -> None:
        self.give_up_at = now() + float(self.order["stuck_after"])
        self.scan_at = now()
        if self.state == "gone" or not self.may_run:
            os._exit(0)

    @property
    def _due_at(self) -> float | None:
        """Return when the ranks and what they forked must be dead; None if no deadline is set."""
        if self.give_up_at is not None:
            return 0.0
        if not self.may_run or self.state in ("ended", "gone"):
            return None
        fence = None if self.ends is None else self.ends + float(self.order["stop_grace"])
        times = [at for at in (self.kill_at, fence) if at is not None]
        return min(times) if times else None

    def _is_overdue(self) -> bool:
        return self._due_at is not None and now() >= self._due_at

    def _next_deadline(self) -> float:
        times = [self.pinged_at + PING_INTERVAL]
        if self._due_at is not None:
            times.append(max(self._due_at, self.scan_at))
        return min(times)

    def _move(self, folder: str) -> None:
        """Move the ranks and what they have forked so far into their control group.

        Whatever they fork later starts in that group. The guard does this, not the shim or the
        ranks, because each first move waits some milliseconds for the kernel's RCU.
        """
        self.has_moved = True
        moved: set[int] = set()
        for _ in range(MAX_MOVES):
            self.extensions.read_pending()  # a supervisor may have been forked meanwhile
            self.link.read_pending()
            pids = {process.pid for process in self._find_below()} - moved
            if not pids:
                return
            cgroup.move_processes(folder, pids)
            moved |= pids

    def _find_below(self) -> List[processes.Process]:
        """Return the ranks and what they forked: all are descendants of the shim, a subreaper."""
        announced = [pid for pid, _ in filter(_is_shown, self.announced)]
        return processes.list_below(self.shim, without=[os.getpid(), self.supervisor, *announced])

    def _kill(self) -> bool:
        """Kill what is left; return whether to go on.

        Go on until the shim is dead and either nothing is left or `give_up_at` has passed.
        """
        if self.state == "running" and not self.has_fenced:
            # Before the first kill: the shim reads it before it learns that a rank has ended.
            self.has_fenced = True
            self.link.send({"fenced": now()})
        if self.cgroup is not None:
            cgroup.kill(self.cgroup)
        left, unread = self._find_left()
        for process in left:
            processes.kill(process, signal.SIGKILL)
        if self.has_clients and self.give_up_at is None and self._may_search():
            # After what is below the shim: this takes longer.
            self._search_node()
        self.pause = min(SCAN_INTERVALS[1], self.pause * 2) if left else SCAN_INTERVALS[1]
        self.scan_at = now() + self.pause
        return self.give_up_at is None or (bool(left or unread) and now() < self.give_up_at)

    def _find_left(self) -> Tuple[List[processes.Process], List[processes.Process]]:
        """Return what is left, and what may be left: its environment cannot be read now."""
        if self.give_up_at is None:
            return self._find_below(), []
        left, unread, _ = self._find_named(self.groups)
        return left + (cgroup.list_members(self.cgroup) if self.cgroup is not None else []), unread

    def _search_node(self) -> SearchResult:
        """Return what has this generation's token, or may have it; kill the former if that is due.

        For what a daemon has started, which is not below the shim.
        """
        found = self._find_named({})
        found = found._replace(processes=processes.add_dying(found.processes, self.killed))
        if self._is_overdue():
            for process in found.processes:
                processes.kill(process, signal.SIGKILL)
            self.killed = found.processes
        self.search_pause = (
            min(MAX_SEARCH_PAUSE, self.search_pause * 2 or 0.25)
            if processes.list_children()
            else 0.0
        )
        self.search_at = now() + self.search_pause
        return found

    def _may_search(self) -> bool:
        """Return whether to search the node, which may leave a process that the kernel keeps.

        Such a one ends once what it reads does not hang any more. While one is left, searches are
        made less and less often.
        """
        _reap_orphans()
        return now() >= self.search_at or not processes.list_children()

    def _find_named(self, groups: Dict[int, int]) -> SearchResult:
        """Find what has the token of this generation, or belongs to these groups."""
        found = search.find_by_token(
            self.token.text,
            lambda rest: rest == "",
            self.node_state,
            groups,
            since=self.shim.started,
        )
        _reap_orphans()
        return found


def _is_shown(identity: Tuple[int, int]) -> bool:
    """Return whether /proc shows this process, by pid and start time."""
    process = processes.read_process(identity[0])
    return process is not None and process.started == identity[1]


def _reap_orphans() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def make_news(
    state: str,
    may_run: bool,
    ends: float | None,
    kill_at: float | None,
    supervisor: int,
    groups: List[Tuple[int, int]],
    cgroup: str | None,
    has_clients: bool = False,
    search: int = 0,
    behind: bool = False,
) -> Json:
    """Return the message that a shim sends to its guard. Each message holds the complete state.

    Args:
        state: The state of the shim.
        may_run: Whether a rank may have been forked.
        ends: When the fence is due; None if never.
        kill_at: When the shim sends SIGKILL, if it is stopping the ranks.
        supervisor: The pid of the supervisor, 0 if there is none. It is not a rank.
        groups: Pid and start time of each rank, used once the shim is dead.
        cgroup: The control group of the ranks, if there is one.
        has_clients: Whether ranks may have had a daemon start processes.
        search: The number of the search for these that the shim waits for; 0: for none.
        behind: Whether the shim did not run until just now. What a guard knows of the fence is
            newer then.
    """
    return {
        "state": state,
        "may_run": may_run,
        "ends": ends,
        "kill_at": kill_at,
        "supervisor": supervisor,
        "groups": groups,
        "cgroup": cgroup,
        "has_clients": has_clients,
        "search": search,
        "behind": behind,
    }
