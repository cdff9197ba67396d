"""The shim of one generation: forks ranks, reaps them, journals exits, holds the lease.

The shim talks only to its supervisor, its guard and the commands that send it orders. It reads no
progress and no logs, and never waits for another process. Its writes may block on the disk, so it
sends signals before it writes anything; the guard, which writes nothing, knows each deadline too.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

from relaunch.agent import disk, processes
from relaunch.agent.failpoints import reach_failpoint
from relaunch.agent.folders import FolderError
from relaunch.agent.loop import Channel, Loop, is_from_this_user
from relaunch.agent.node import kernel_log
from relaunch.agent.protocol import Json, Refusal, Token, now
from relaunch.agent.ranks import cgroup, guard, journal, spawn, supervisor
from relaunch.agent.ranks.clients import ClientWork
from relaunch.agent.ranks.journal import Journal
from relaunch.agent.ranks.lease import Lease
from relaunch.agent.ranks.link import ChildLink
from relaunch.agent.ranks.master_port import release_port
from relaunch.agent.ranks.upkeep import FolderUpkeep
from relaunch.agent.state import Generation, read_boot_id, read_json, write_json
from relaunch.agent.warm.python import WarmPython

MAX_IDLE = 5.0
"""Maximum seconds between two turns of the event loop when nothing is due."""
STANDSTILL = MAX_IDLE + 1.0
"""Seconds between two turns after which this process is taken not to have run: it was stopped, or
waited for its disk."""
CATCH_UP_TIME = 2.0
"""Seconds after that in which no lease counts as expired here: newer renewals are on their way.

Until then the guard, which has them from the supervisor, ends ranks at their fence."""
SWEEP_INTERVALS = (0.01, 0.25)
"""Backoff in seconds between scans for survivors while stopping: the first and the longest."""
STUCK_NOTICE_DELAY = 0.5
"""Seconds after SIGKILL before survivors are reported to the callers that ordered the stop.

This is less than the timeout after which the callers give up on a silent shim.
"""
FAREWELL_TIMEOUT = 1.0
"""Seconds that the supervisor has to send the end to its watchers."""


@dataclass(frozen=True)
class ShimSockets:
    orders: socket.socket
    watch: socket.socket
    peers: socket.socket
    master: socket.socket
    """Holds MASTER_PORT until the ranks start, so that no other generation gets the same port."""

    @property
    def handles(self) -> list[int]:
        return [
            self.orders.fileno(),
            self.watch.fileno(),
            self.peers.fileno(),
            self.master.fileno(),
        ]


def record_identity(generation: Generation) -> None:
    """Record that this process becomes the shim.

    This is done first, so that the process can be found even if it is stopped on the way.
    """
    process = processes.read_process(os.getpid())
    if process is not None:
        generation.write_identity("shim", process.pid, process.started)


def become(
    generation: Generation,
    token: Token,
    order: Json,
    sockets: ShimSockets,
    lock: int,
    warm: Optional[WarmPython] = None,
) -> None:
    """Run the shim in this process.

    Its sockets listen already, so a caller that has the answer to `prepare` can connect at once.
    The process that carried out `prepare` becomes the shim: this saves a fork, and there is no
    moment at which only one of the two lives.

    Args:
        warm: A Python that is a child of this process, and has imported what the ranks need.
    """
    if os.getsid(0) != os.getpid():
        os.setsid()
    processes.set_name("relaunch-shim")
    log = os.open(generation.path / "shim.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDWR)
    for source, target in ((null, 0), (null, 1), (log, 2)):
        os.dup2(source, target)
    link = warm.link if warm is not None else None
    kept = [link.fileno()] if link is not None else []
    processes.close_all_but([*sockets.handles, lock, *kept])
    processes.reset_signals()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    processes.adopt_orphans()
    Shim(generation, token, order, sockets, lock, warm).run()


class Shim:
    stopped_at = 0.0
    """Unix time just before the ranks got SIGTERM."""
    signalled: str | None = None
    """The signal that asked this process to end, until it is obeyed."""
    cgroup: str | None = None
    """The control group of the ranks; None if there is none."""
    turned_at = 0.0
    """When the last turn of the loop ended."""
    catches_up_until = 0.0
    """After this process did not run: until when no lease counts as expired."""
    was_behind = False
    """Whether the helpers were not told the lease since then."""
    has_failed = False
    """Whether a rank has failed otherwise than by a SIGTERM that was not from here."""

    def __init__(
        self,
        generation: Generation,
        token: Token,
        order: Json,
        sockets: ShimSockets,
        lock: int,
        warm: Optional[WarmPython] = None,
    ) -> None:
        self.generation = generation
        self.token = token
        self.order = order
        self.sockets = sockets
        self.warm = warm
        """Forks the ranks, and is gone once they are started."""
        self.loop = Loop()
        self.own = processes.identify_self()
        """This process by pid and start time, so that its helpers cannot mistake another for it."""
        self.journal = Journal(generation.journal, ranks=len(order["ranks"]))
        self.journal_due_at = 0.0
        """When to retry a write that the disk refused."""
        self.upkeep = FolderUpkeep(generation, token, order, lock)
        self.state = "prepared"
        self.start_order: Json | None = None
        self.started: Json | None = None
        self.alive: spawn.Ranks = {}
        self.lease: Lease | None = None
        self.kill_at = 0.0
        self.launcher_kill_at: float | None = None
        """When to kill a launcher that logged a failed rank but has not exited.

        It first gets SIGTERM, so that it exits and reports the failure. This is not a stop: its
        exit is journaled as a failure.
        """
        self.sweep_at = 0.0
        self.sweep_pause = SWEEP_INTERVALS[0]
        self.is_ending = False
        """Whether the generation was stopped or fenced: the shim exits once the ranks are gone."""
        self.watchers = 0
        self.used_at = now()
        """When this generation last had a watcher or a renewal, or began to run."""
        self.callers: list[Channel] = []
        self.terminated_groups: set[int] = set()
        """Process groups that got SIGTERM."""
        self.terminated_strays: set[tuple[int, int]] = set()
        """Pid and start time of the processes outside of these groups that got SIGTERM."""
        self.stoppers: list[tuple[Channel, bool]] = []
        """Callers that wait for the end of this generation, and whether it was ending already."""
        self.reported_stuck: dict[Channel, list[int]] = {}
        """The surviving pids that were last reported to each of these callers."""
        self.kernel = kernel_log.record_position()
        """The position in the kernel log before any rank runs; the supervisor reads from here."""
        self.groups: list[tuple[int, int]] = []
        """Pid and start time of each rank."""
        self.client_work = ClientWork(self._inform_guard)
        self.launch_ends: float | None = None
        """When the fence is due if this process fails while starting ranks, before the lease."""
        self.extensions = os.pipe()
        """A pipe from every supervisor to every guard: who it is, and the time of the fence."""
        for handle in self.extensions:
            os.set_blocking(handle, False)
        self.link = ChildLink(
            self.loop, generation, "supervisor", self._become_supervisor, self._handle_message
        )
        self.guard = ChildLink(
            self.loop, generation, "guard", self._become_guard, self._handle_guard
        )

    def run(self) -> None:
        waking, woken = os.pipe()
        for handle in (waking, woken):
            os.set_blocking(handle, False)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in processes.TERMINATING_SIGNALS:
            signal.signal(number, self._note_signal)
        self.loop.watch(waking, lambda events: self._handle_wakeup(waking))
        self.loop.watch(self.sockets.orders.fileno(), lambda events: self._accept())
        self.turned_at = now()
        while not self._is_over():
            self.loop.run_once(self._next_deadline())
            self._tick()
            self._catches_up()  # also if this turn took long
            self.turned_at = now()
        self._finish()
        self.journal.close()  # also releases preallocated space

    # --- events ---

    def _handle_wakeup(self, waking: int) -> None:
        try:
            os.read(waking, 4096)
        except BlockingIOError:
            pass
        self.upkeep.due_at = 0.0  # a command that finds files missing also sends a signal
        self._reap()

    def _note_signal(self, number: int, frame: object) -> None:
        self.signalled = signal.Signals(number).name

    def _obey_signal(self) -> None:
        """Stop the ranks with their grace if this process was asked to end, and end after them.

        So ask a node that shuts down, and a unit, a login or a container that is stopped: they send
        SIGTERM to all processes at once, and SIGKILL some time later. A rank may have ended of it
        before this process got it.
        """
        if self.signalled is None:
            return
        reason = f"its shim got {self.signalled}: its node, unit, login or container is stopped"
        self.signalled = None
        if self.state == "running":
            self._fence("terminated", reason)
        elif self.state == "stopping" and not self.is_ending and not self.has_failed:
            self.journal.append(("Fenced", {"why": "terminated", "reason": reason}))
        self.is_ending = True

    def _reap(self) -> None:
        # Check the fence first. If the guard killed the ranks because the fence was due, their
        # exits count as stopped, also if a renewal has come since. The supervisor sent the reason
        # before the guard could kill.
        self.link.read_pending()
        self.guard.read_pending()
        was_killed = any(map(processes.was_killed, self.alive.values()))
        self._fence_if_due(may_wait=not was_killed)
        self._obey_signal()
        exits = []
        numbers = {pid: rank for rank, pid in self.alive.items()}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if (
                not self.link.handle_exit(pid)
                and not self.guard.handle_exit(pid)
                and pid in numbers
            ):
                exits.append((numbers[pid], pid, status))
        if exits:
            self._record_exits(exits)

    def _record_exits(self, exits: list[tuple[int, int, int]]) -> None:
        stopped = self.state == "stopping"
        observations: list[tuple[str, dict[str, Any]]] = []
        failed = False
        for rank, pid, status in exits:
            del self.alive[rank]
            killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
            code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
            failed = failed or code != 0
            is_terminated = killed == signal.SIGTERM and self.launcher_kill_at is None
            self.has_failed = self.has_failed or (not stopped and code != 0 and not is_terminated)
            fields = {
                "rank": rank,
                "local_rank": self.order["ranks"].index(rank),
                "pid": pid,
                "exit_code": code,
                "signal": killed,
                "stopped": stopped,
            }
            if self.start_order is not None and "launched" in self.start_order:
                fields["launcher"] = True
            elif stopped:
                fields["stopped_at"] = self.stopped_at
            observations.append(("RankExited", fields))
        if self.state == "running" and (failed or not self.alive):
            self._begin_stop(self.order["stop_grace"])
        reach_failpoint(self.generation.state, "shim.reaped")
        self.journal.append(*observations)
        if not stopped:
            self._publish()  # report the failure before the scan below, which takes milliseconds
        reach_failpoint(self.generation.state, "shim.journaled")
        if self.state == "stopping":
            self._sweep()
            self._publish()
        self.generation.remove_task_records(rank for rank, _, _ in exits)

    def _begin_stop(self, grace: float) -> None:
        """Send SIGTERM to the ranks, and schedule SIGKILL after `grace` seconds.

        Whatever the reason for the stop, SIGKILL comes no later than `stop_grace` seconds after the
        fence is due, even if the machine was suspended past that time.
        """
        if self.state == "running":
            self.state = "stopping"
            ends = self.lease.ends if self.lease is not None else None
            self.kill_at = (
                now() + grace
                if ends is None
                else min(now() + grace, ends + self.order["stop_grace"])
            )
            self._inform_supervisor()  # first: it tells peers whether this node is alive
            self.stopped_at = round(time.time(), 3)
            for pid in self.alive.values():
                self.terminated_groups.add(pid)
                processes.kill_group(pid, signal.SIGTERM)
                processes.kill_group(pid, signal.SIGCONT)
        self.kill_at = min(self.kill_at, now() + grace)
        self._inform_guard()
        self.sweep_pause = SWEEP_INTERVALS[0]
        self.sweep_at = now()

    def _sweep(self) -> None:
        """Terminate or kill what is left; when nothing is left, end and confirm.

        Everything that ranks ever forked is below this process, which is a subreaper. What a daemon
        has started for them is not.
        """
        helpers = {self.link.pid, self.guard.pid}
        if self.alive or set(processes.list_children()) - helpers:
            self.client_work.note_living()
        elif self.client_work.is_gone():
            self.state = "ended"
            self.used_at = now()
            self._inform_guard()
            self._confirm()
            self.generation.remove_task_records()  # also of a launch that was refused
            return
        if now() < self.kill_at:
            self._terminate_strays()
        else:
            left = self._find_below()  # before a client among them is killed
            for pid in self.alive.values():
                processes.kill_group(pid, signal.SIGKILL)
            for process in left:
                processes.kill(process, signal.SIGKILL)
            if self.cgroup is not None:
                cgroup.kill(self.cgroup)
            left += self.client_work.list_unfinished()
            # Without any, the guard's search has no answer: the callers take that for silence.
            if left and now() >= self.kill_at + STUCK_NOTICE_DELAY:
                self._report_stuck(left)
        self.sweep_pause = min(SWEEP_INTERVALS[1], self.sweep_pause * 1.5)
        self.sweep_at = now() + self.sweep_pause

    def _find_below(self) -> list[processes.Process]:
        """Return the ranks and all living processes that they forked; note clients among them."""
        below = processes.list_descendants(os.getpid(), without=[self.link.pid, self.guard.pid])
        self.client_work.note(below)
        return below

    def _look_for_clients(self) -> None:
        try:
            self._find_below()
        except OSError as error:  # no descriptor or memory is left: ranks go on meanwhile
            disk.log(f"what ranks have started cannot be listed, which is tried again: {error}")
            self.client_work.note(())  # also sets the time of the next look

    def _terminate_strays(self) -> None:
        """Send SIGTERM once to each process that left the process groups of the ranks.

        And to what has outlived its client, which would have passed that on.
        """
        for process in [*self._find_below(), *self.client_work.list_first()]:
            identity = process.pid, process.started
            if (
                process.group not in self.terminated_groups
                and identity not in self.terminated_strays
            ):
                self.terminated_strays.add(identity)
                processes.kill(process, signal.SIGTERM)

    def _report_stuck(self, left: list[processes.Process]) -> None:
        """Report survivors to the callers that ordered the stop, whenever the set has changed."""
        pids = sorted(process.pid for process in left)
        for caller, _ in self.stoppers:
            if self.reported_stuck.get(caller) != pids:
                self.reported_stuck[caller] = pids
                unread = {process.pid for process in self.client_work.unread}
                caller.send(
                    {
                        "stuck": [(process.pid, process.started) for process in left],
                        "unread": [process.pid for process in left if process.pid in unread],
                    }
                )

    def _confirm(self) -> None:
        """Confirm the end to the callers that ordered the stop.

        This comes before the journal and the watchers, because the next generation waits for it.
        """
        for caller, already in self.stoppers:
            caller.send({"gone": True, "already": already})
        self.stoppers.clear()
        self.reported_stuck.clear()

    def _catches_up(self) -> bool:
        """Return whether this process did not run until just now."""
        at = now()
        if at > self.turned_at + STANDSTILL:
            self.catches_up_until = at + CATCH_UP_TIME
            self.turned_at = at
            self.was_behind = True
            self.link.excuse_silence()
            self.guard.excuse_silence()
        return at < self.catches_up_until

    @property
    def _is_behind(self) -> bool:
        """Return whether the helpers know newer times of the lease than this process."""
        return self.lease is not None and self._catches_up()

    def _has_running_guard(self) -> bool:
        guard = processes.read_process(self.guard.pid) if self.guard.pid else None
        return guard is not None and guard.state in "RS"

    def _fence_if_due(self, may_wait: bool = True) -> None:
        """Fence if the lease has expired.

        Args:
            may_wait: Whether to wait for newer renewals first if this process did not run. It does
                so only beside a guard that runs.
        """
        if self._catches_up() and may_wait and self._has_running_guard():
            return
        if (
            self.state == "running"
            and self.lease is not None
            and self.lease.find_fence_reason(now()) is not None
        ):
            self.link.read_pending()  # if this process was stopped, renewals may be waiting unread
            fenced = self.lease.find_fence_reason(now())
            if fenced is not None:
                self._fence(*fenced)

    @property
    def _unwatched_until(self) -> float | None:
        """Return when to stop ranks that no controller watches; None if never.

        Nothing is launched elsewhere because of it, so a late or a missed stop breaks no promise.
        """
        limit = self.start_order["unwatched"] if self.start_order is not None else None
        if limit is None or self.watchers or self.state != "running":
            return None
        return self.used_at + float(limit)

    def _fence_if_unwatched(self) -> None:
        if self._unwatched_until is not None and now() >= self._unwatched_until:
            self.link.read_pending()  # a watcher may be waiting unread
            until = self._unwatched_until
            if until is not None and now() >= until and self.start_order is not None:
                limit = self.start_order["unwatched"]
                self._fence("unwatched", f"no controller has watched its ranks for {limit:g} s")

    def _tick(self) -> None:
        self._fence_if_due()
        self._fence_if_unwatched()
        if (
            self.state == "running"
            and self.launcher_kill_at is not None
            and now() >= self.launcher_kill_at
        ):
            self.launcher_kill_at = float("inf")
            for pid in self.alive.values():
                processes.kill_group(pid, signal.SIGKILL)
        look_at = self.client_work.look_at
        if self.state == "running" and look_at is not None and now() >= look_at:
            self._look_for_clients()
        if self.state == "stopping" and now() >= self.sweep_at:
            self._reap()
            self._sweep()
            self._publish()
        self._tick_helpers()
        if now() >= self.upkeep.due_at:
            self._check_folder()
        if self._has_unwritten and now() >= self.journal_due_at:
            self._publish()
        self._fence_if_unguarded()
        if self.was_behind and not self._catches_up():
            self.was_behind = False
            self.link.read_pending()
            self._inform_supervisor()

    def _tick_helpers(self) -> None:
        """Replace helpers that have died or hang, before anything waits for the disk."""
        self._catches_up()
        is_new = self.link.tick(), self.guard.tick()
        if is_new[0]:
            self.watchers = 0
            self.used_at = max(self.used_at, now())
            self._inform_guard()
        if is_new[1]:
            self._inform_supervisor()  # which kills the ranks if both shim and guard hang
        for helper in itertools.compress((self.link, self.guard), is_new):
            helper.record()

    def _fence_if_unguarded(self) -> None:
        """Stop the ranks if no guard could be forked for as long as a lease lasts.

        Nothing would end them at their fence if this process hung.
        """
        limit = float(self.order["lease"])
        is_refused = not self.guard.pid and bool(self.guard.obstacle)
        if self.state == "running" and is_refused and now() >= self.guard.gone_at + limit:
            reason = f"no guard of its ranks could be started for {limit:g} s"
            self._fence("unguarded", f"{reason}: {self.guard.obstacle}")

    @property
    def _has_unwritten(self) -> bool:
        return bool(self.journal.pending) or self.journal.behind_since is not None

    def _fence(self, why: str, reason: str) -> None:
        if self.state == "running":
            self.is_ending = True
            self._begin_stop(self.order["stop_grace"])
            self.journal.append(("Fenced", {"why": why, "reason": reason}))

    def _next_deadline(self) -> float:
        times = [
            now() + MAX_IDLE,
            self.link.next_deadline,
            self.guard.next_deadline,
            self.upkeep.due_at,
        ]
        if self._has_unwritten:
            times.append(self.journal_due_at)
        if self.state == "prepared":
            times.append(self.order["valid_until"])
        elif self.state == "running":
            times += [
                at
                for at in (
                    self.launcher_kill_at,
                    self._fence_at,
                    self._behind_until,
                    self._unwatched_until,
                    self.client_work.look_at,
                )
                if at is not None
            ]
        elif self.state == "stopping":
            times.append(self.sweep_at)
        elif self.state == "ended" and not self.watchers:
            times.append(self.used_at + self.order["lease"])
        return min(times)

    @property
    def _fence_at(self) -> float | None:
        if self.lease is None or self.lease.ends is None:
            return None
        if now() < self.catches_up_until and self._has_running_guard():
            return max(self.lease.ends, self.catches_up_until)
        return self.lease.ends

    @property
    def _behind_until(self) -> float | None:
        return self.catches_up_until if self.was_behind else None

    def _is_over(self) -> bool:
        if self.state == "prepared":
            return self.is_ending or now() > self.order["valid_until"]
        unwanted = not self.watchers and now() > self.used_at + self.order["lease"]
        # Observations that are not on disk yet would be lost with this process.
        leaving = self.is_ending and not self.journal.pending
        return self.state == "ended" and (leaving or unwanted)

    def _finish(self) -> None:
        """Let the supervisor send the end to its watchers, then kill both helpers."""
        self._confirm()
        self.state = "gone"
        self._publish()
        deadline = now() + FAREWELL_TIMEOUT
        while self.link.pid and now() < deadline:
            self.loop.run_once(deadline)
        self.link.kill()
        self.guard.kill()
        if self.cgroup is not None:
            cgroup.remove(self.cgroup)

    # --- orders ---

    def _accept(self) -> None:
        try:
            caller, _ = self.sockets.orders.accept()
        except OSError:  # the caller hung up before accept
            return
        if not is_from_this_user(caller):
            caller.close()
            return
        channel = Channel(
            self.loop,
            caller.detach(),
            lambda order: self._carry_out(channel, order),
            lambda: self.callers.remove(channel),
        )
        self.callers.append(channel)

    def _carry_out(self, caller: Channel, order: Json) -> None:
        if "start" in order:
            caller.send(self._start(order["start"]))
        elif "stop" in order:
            caller.send({"stopping": True})
            self.stoppers.append((caller, self.is_ending))
            self.is_ending = True
            if self.state in ("running", "stopping"):
                is_news = self.state == "running" or bool(self.alive)
                self._begin_stop(order["stop"]["stop_grace"])
                if is_news:
                    self.journal.append(("Stopped", {"reason": order["stop"]["reason"]}))
            else:
                self._confirm()

    def _start(self, order: Json) -> Json:
        if self.started is not None:
            return (
                {**self.started, "already": True}
                if self.started["outcome"] == "done"
                else self.started
            )
        if self.is_ending:
            return Refusal("expired", "an order to stop came first").answer
        if order["prepared"] != self.order["answer"]["stamp"]:
            return Refusal(
                "expired", "this order goes with another preparation of the generation"
            ).answer
        if now() > self.order["valid_until"]:
            return Refusal(
                "expired", f"prepared more than {self.order['valid_for']:g} s ago"
            ).answer
        reach_failpoint(self.generation.state, "start.received")
        boot = read_boot_id(self.generation.state)
        # The record is not synced: the page cache survives any process, and a loss of power that
        # destroys it ends the ranks as well.
        self.cgroup = cgroup.make_group(self.generation.path)
        kernel = kernel_log.serialize_position(self.kernel)
        launching = {
            "stamp": now(),
            "boot_id": boot,
            "node": order["node"],
            "kernel": kernel,
            "cgroup": self.cgroup,
            "redact": spawn.make_redaction(order, self.generation, self.token),
            "pids": None,
        }
        self._set_launch_end()  # before a disk that hangs can keep this process from it
        try:
            self._ensure_guard()
            self._record_launch(launching)
        except Refusal as refused:
            self.launch_ends = None
            self._inform_guard()
            return refused.answer
        release_port(self.sockets.master)
        self._set_launch_end()
        is_warm = self.warm is not None
        launched = order.get("launched") or {"command": []}
        self.client_work.begin(order["command"], launched["command"])
        try:
            obstacle = self._launch(order)
            pids = {str(rank): pid for rank, pid in self.alive.items()}
            identities = {str(rank): self._identify(rank, pid) for rank, pid in self.alive.items()}
            self.groups = list(identities.values())
            self._record_launch({**launching, "stamp": now(), "pids": identities})
        except Refusal as refused:
            self.started = refused.answer
            try:
                self._record_launch({**launching, "stamp": now(), "refused": refused.answer})
            except Refusal as unwritten:  # started.json exists, so the launch is not repeated
                disk.log(unwritten.answer["reason"])
            self.state, self.is_ending, self.kill_at = "stopping", True, 0.0
            self.alive.clear()
            self._inform_guard()
            self._sweep()
            return self.started
        reach_failpoint(self.generation.state, "start.forked")
        self.started = {"outcome": "done", "pids": pids, "already": False}
        if is_warm:
            self.started["warm"] = {"forked": obstacle is None, "reason": obstacle or ""}
        self.start_order = order
        self.upkeep.has_separate_stderr = order["separate_stderr"] and "launched" not in order
        self.state = "running"
        self.turned_at, self.catches_up_until = now(), 0.0  # a slow launch is no standstill
        self.used_at = now()  # this node may have waited long for slower ones to be prepared
        begun = min(now(), self._latest_begin)
        self.lease = Lease(begun, self.order["lease"], self.order["fence_after"], order["fences"])
        self._inform_supervisor(begin=True)
        # Fork helpers that do not run, or have died meanwhile, at once: without a supervisor no
        # lease is renewed.
        self.link.due_at = self.guard.due_at = now()
        return self.started

    def _identify(self, rank: int, pid: int) -> tuple[int, int]:
        """Return pid and start time of a rank that was not reaped yet.

        If /proc hides it, because it has executed sudo already, its own record has the start time.
        """
        process = processes.read_process(pid)
        if process is not None:
            return pid, process.started
        record = read_json(self.generation.task_record_path(rank)) or {}
        return pid, record["started"] if record.get("pid") == pid else processes.HIDDEN

    @property
    def _latest_begin(self) -> float:
        """Return when ranks have begun at the latest, by what a controller counts with.

        It takes the first lease to begin by `valid_until`, and then waits for `lease`,
        `fence_after` and `stop_grace` (relaunch.job.fencing.safe_launch_at).
        """
        begins = min(spawn.EXEC_TIMEOUT, float(self.order["fence_after"]))
        return float(self.order["valid_until"]) + begins

    def _set_launch_end(self) -> None:
        """Have the guard end ranks that are forked from now on, should this process not begin."""
        begins = min(spawn.EXEC_TIMEOUT, float(self.order["fence_after"]))
        self.launch_ends = min(now() + begins, self._latest_begin) + float(self.order["lease"])
        self._inform_guard()

    def _launch(self, order: Json) -> Optional[str]:
        """Start the ranks; return why they were not forked from the warm Python, if there is one.

        That Python is gone afterwards: its memory is the ranks' now.
        """
        ranks = self.order["ranks"]
        try:
            return spawn.launch(
                self.generation,
                self.token,
                ranks,
                order,
                self.alive,
                self.warm,
                self.order["valid_until"],
            )
        finally:
            if self.warm is not None:
                self.warm.kill()
                self.warm = None

    # --- the guard ---

    def _become_guard(self, link: int) -> None:
        state = str(self.generation.state)
        guard.run(
            self.token,
            self.order,
            state,
            self.own,
            link,
            self.extensions[0],
            self._make_guard_news(),
        )

    def _handle_guard(self, message: Json) -> None:
        if "fenced" in message and self.lease is not None:
            self.link.read_pending()  # the supervisor may know why it was time
            late = "this node's shim did not run when it was time to stop its ranks"
            fenced = self.lease.find_fence_reason(message["fenced"])
            self._fence(*(fenced or ("isolated", late)))
        if "searched" in message and self.client_work.handle_answer(message):
            self.sweep_at = now()

    def _ensure_guard(self) -> None:
        """Fork a guard if there is none.

        Raises:
            Refusal: None can be forked. Nothing would end ranks if this process hung.
        """
        if not self.guard.pid:
            self.guard.due_at = now()
            if self.guard.tick():
                self._inform_supervisor()
                self.guard.record()
        if not self.guard.pid:
            obstacle = self.guard.obstacle
            raise Refusal(
                "cannot_start", f"no guard of the ranks can be started, so no rank was: {obstacle}"
            )

    def _inform_guard(self) -> None:
        self.guard.send(self._make_guard_news())

    def _make_guard_news(self) -> Json:
        ends = self.lease.ends if self.lease is not None else self.launch_ends
        kill_at = self.kill_at if self.state == "stopping" else None
        may_run = self.launch_ends is not None
        return guard.make_news(
            self.state,
            may_run,
            ends,
            kill_at,
            self.link.pid,
            self.groups,
            self.cgroup,
            self.client_work.has_clients,
            self.client_work.search,
            self._is_behind,
        )

    def _record_launch(self, record: Json) -> None:
        """Write started.json.

        Raises:
            Refusal: The disk is full.
        """
        try:
            write_json(self.generation.path / "started.json", record, durable=False)
        except OSError as error:
            if not disk.is_full(error):
                raise
            raise disk.make_refusal(self.generation.state, "no rank was started") from error
        self.upkeep.launch = record

    # --- the folder ---

    def _check_folder(self) -> None:
        """Restore removed files; fence if the generation was superseded in the meantime."""
        missing = self.upkeep.find_missing()
        try:
            if missing:
                self._restore(missing)
            superseded = self.upkeep.find_successor()
        except (OSError, FolderError) as error:  # training goes on; the next check tries again
            disk.log(f"the folder of this generation cannot be made again: {error}")
            return
        if superseded is not None:
            self.is_ending = True
            self._fence("superseded", superseded)

    def _restore(self, missing: list[Path]) -> None:
        own = self.generation.path
        self.upkeep.restore(missing, self.alive)
        if self.generation.journal in missing:
            self.journal.restore(self.generation.journal)
        if own / "orders" in missing:
            self.loop.forget(self.sockets.orders.fileno())
            self.sockets.orders.close()
            self.sockets = replace(self.sockets, orders=self.generation.listen("orders"))
            self.loop.watch(self.sockets.orders.fileno(), lambda events: self._accept())
        if own / "sock" in missing:
            self.sockets.watch.close()
            self.sockets = replace(self.sockets, watch=self.generation.listen("sock"))
            self.link.kill()  # the next supervisor gets the new socket

    # --- the supervisor ---

    def _become_supervisor(self, link: int) -> None:
        sockets = supervisor.SupervisorSockets(
            self.sockets.watch, self.sockets.peers, link, self.extensions[1]
        )
        supervisor.run(
            self.generation,
            self.token,
            self.order,
            self.own,
            sockets,
            self.kernel,
            self._make_news(begin=True),
        )

    def _publish(self) -> None:
        """Sync the journal, then let the supervisor send the new observations to its watchers."""
        self.journal.sync()
        self.journal_due_at = now() + journal.RETRY_INTERVAL
        self._inform_supervisor()

    def _inform_supervisor(self, begin: bool = False) -> None:
        self._inform_guard()
        self.link.send(self._make_news(begin))

    def _make_news(self, begin: bool) -> Json:
        lease = self.lease if self.state == "running" else None
        news: Json = {
            "state": self.state,
            "seq": self.journal.seq if self.journal.is_failing else self.journal.synced,
            "unwritten": self.journal.pending if self.journal.is_failing else [],
            "alive": list(self.alive),
            "pids": list(self.alive.items()),
            "guard": self.guard.pid,
            "kill_at": self.kill_at if self.state == "stopping" else None,
            "handle": None if lease is None else lease.alive_until,
            "alive_until": None if lease is None else lease.ends,
            "leased_until": None if lease is None else lease.leased_until,
            "renewed": lease is not None and lease.renewed,
        }
        news["behind"] = not begin and self.state == "running" and self._is_behind
        if begin and self.start_order is not None:
            news["start"] = self.start_order
        return news

    def _handle_message(self, message: Json) -> None:
        if "alive" in message:
            self.link.send({"here": True})
        if "watchers" in message:
            self.watchers = message["watchers"]
            self.used_at = now()
        if "renew" in message:
            self.used_at = now()
            if self.lease is not None and self.lease.renew(message["renew"], now()):
                self._inform_supervisor()
        if "stood_still" in message and self.lease is not None:
            self.lease.shorten(message["stood_still"])
            if self.state == "stopping" and self.lease.ends is not None:
                self.kill_at = min(self.kill_at, self.lease.ends + self.order["stop_grace"])
            self._inform_supervisor()
            self._fence_if_due()
        if "alone" in message:
            # Before the first renewal the launch may be late, for which no node is to blame.
            renewed = self.lease is not None and self.lease.renewed
            self._fence("isolated" if renewed else "never_watched", message["alone"])
        if (
            "vouched" in message
            and self.lease is not None
            and self.lease.extend(message["vouched"])
        ):
            self._inform_supervisor()
        if "failed_below" in message and self.state == "running" and self.launcher_kill_at is None:
            self.launcher_kill_at = now() + self.order["stop_grace"]
            for pid in self.alive.values():
                processes.kill_group(pid, signal.SIGTERM)
        if "superseded" in message:
            self._fence("superseded", message["superseded"])
