"""The supervisor of one generation: serves watchers and peers, reads progress and evidence.

The shim can run without it. When the shim dies, the supervisor kills the remaining ranks, records
the shim's death in the journal, and stays to report it to watchers.
"""

from __future__ import annotations

import _thread
import math
import os
import re
import signal
import socket
import time
from dataclasses import dataclass
from typing import Dict, Iterable, Tuple

from relaunch.agent import processes, search
from relaunch.agent.failpoints import reach_failpoint
from relaunch.agent.loop import Channel, Loop, is_from_this_user
from relaunch.agent.node import gpu_users, kernel_log
from relaunch.agent.protocol import Json, Token, line, make_sender, now
from relaunch.agent.ranks import cgroup, evidence, journal, retention
from relaunch.agent.ranks.lease import Lease, PeerClocks, Standstills, Vouchers, measure_standstill
from relaunch.agent.ranks.log_times import LogTimes
from relaunch.agent.ranks.peers import Answer, Peers
from relaunch.agent.ranks.progress import RankProgress
from relaunch.agent.ranks.redact import Redactor
from relaunch.agent.state import Generation, JobState, read_boot_id

PING_INTERVAL = 2.0
"""Seconds between keep-alive messages to the shim."""
SHIM_TIMEOUT = 3.0
"""Seconds without an answer to a keep-alive message after which the shim counts as silent.

A shim that runs answers at once.
"""
OVERDUE_DELAY = 0.5
"""Seconds after the end of the grace period by which the guard should have killed what is left."""
COMPARE_INTERVALS = (0.5, 2.0)
"""Minimum and maximum seconds between clock comparisons with the peers while a lease runs.

Within these limits, the interval is a sixth of the lease.
"""
PROGRESS_INTERVAL = 0.5
"""Seconds between reads of progress while there is a watcher: half of the 1 s heartbeat limit."""
MAX_WATCHERS = 16
"""Maximum connections. One more drops the oldest, which is the most likely to be dead."""
MAX_QUEUED_BYTES = 16 * 1024 * 1024
"""Maximum bytes queued for a watcher: room for the error file and log tail of every rank."""
KILL_TIMEOUT = 0.9
"""Seconds to kill everything before the shim's death is recorded. Ranks must be gone within 1 s."""
FAILURE_TEXT = "failed (exitcode: "
"""What torchrun and ft_launcher log about the first failed rank, after they ended the others."""
LAUNCHER_EXIT_TIMEOUT = 5.0
"""Seconds from that log line to the launcher's own exit, in which it logs more.

Torchrun needs two seconds on a busy machine.
"""
FAREWELL_TIMEOUT = 0.8
"""Seconds to send the end to watchers: less than the shim waits (shim.FAREWELL_TIMEOUT)."""


class Watcher:
    def __init__(self, channel: Channel, after_seq: int, heartbeat: float) -> None:
        self.channel = channel
        self.seq = after_seq
        self.heartbeat = heartbeat
        self.sent_at = 0.0
        self.due_at = 0.0

    @property
    def is_slow(self) -> bool:
        """Return whether data is queued and it read none for three heartbeats (at least 1 s)."""
        return self.channel.has_unsent and now() > self.channel.last_write_at + max(
            1.0, 3 * self.heartbeat
        )


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class LogUpkeep:
    """What is written while ranks run, in a thread: where the disk hangs, only that waits for it.

    Otherwise leases would not be renewed, and ranks would end at their fence.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._times = LogTimes(generation)
        self._is_running = False

    def run(self) -> None:
        """Begin, unless the last time has not ended yet."""
        if self._is_running:
            return
        self._is_running = True
        try:
            _thread.start_new_thread(self._write, ())
        except RuntimeError:  # this user has no process left
            self._is_running = False

    def _write(self) -> None:
        try:
            retention.cut_live_logs(self._generation)
            self._times.mark()
        finally:
            self._is_running = False


@dataclass(frozen=True)
class SupervisorSockets:
    watch: socket.socket
    peers: socket.socket
    link: int
    """A socket to the shim."""
    guard: int
    """A pipe to the guard."""


def run(
    generation: Generation,
    token: Token,
    order: Json,
    shim: processes.Process,
    sockets: SupervisorSockets,
    kernel: kernel_log.LogPosition,
    news: Json,
) -> None:
    """Run the supervisor in a process that was just forked from the shim."""
    # First: a guard that kills while the shim hangs right after the fork takes this for a rank.
    own = processes.identify_self()
    _write_to_guard(sockets.guard, {"supervisor": [own.pid, own.started]})
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    processes.outlive_terminating_signals()
    os.setsid()
    processes.set_name("relaunch-sup")
    handles = [sockets.watch.fileno(), sockets.peers.fileno(), sockets.link, sockets.guard]
    processes.close_all_but([*handles, kernel.handle])
    supervisor = Supervisor(generation, token, order, shim, sockets, kernel)
    supervisor.handle_news(news)
    supervisor.run()


def _write_to_guard(guard: int, message: Json) -> None:
    try:
        os.write(guard, line(message))
    except (BlockingIOError, BrokenPipeError):  # the shim replaces one that is gone or hangs
        pass


class Supervisor:
    node: str | None = None
    """This node's name, as the start order gives it."""
    redactor = Redactor()
    """Replaces secrets in what is sent; of the launch, once there is one."""
    launches = False
    """Whether the ranks run below a launcher."""

    def __init__(
        self,
        generation: Generation,
        token: Token,
        order: Json,
        shim: processes.Process,
        sockets: SupervisorSockets,
        kernel: kernel_log.LogPosition,
    ) -> None:
        self.generation = generation
        self.token = token
        self.order = order
        self.shim = shim
        self.listener = sockets.watch
        self.guard = sockets.guard
        self.loop = Loop()
        self.boot = read_boot_id(generation.state)
        self.state = "prepared"
        self.alive: list[int] = []
        self.pids: dict[int, int] = {}
        """Pid by rank, of the ranks that the shim has not reaped."""
        self.lease: Lease | None = None
        """A copy of the shim's lease, plus renewals that a stopped shim has not processed yet.

        The supervisor sends the resulting time of the fence to the guard.
        """
        self.guard_pid = 0
        self.kill_at: float | None = None
        """While stopping: when the shim sends SIGKILL."""
        self.killed_at = 0.0
        """When this process last sent SIGKILL in place of the shim."""
        self.pinged_since: float | None = None
        """When the keep-alive message was sent that the shim has not answered."""
        self.alive_until: float | None = None
        """When the fence is due, as of the shim's last message; None if never.

        The shim may have extended it since.
        """
        self.leased_until: float | None = None
        self.renewed = self.fences = False
        self.vouchers = Vouchers(())
        self.clocks = PeerClocks()
        self.standstills = Standstills()
        self.held: dict[str, float] = {}
        """What changes the shim's lease, and waits until the shim reads again."""
        self.observations: list[Json] = []
        self.kernel = kernel
        self.kernel_reading: Json | None = None
        self.unwritten: list[Json] = []
        """Observations that the disk does not take: the shim's, and of its death."""
        self.synced = 0
        """Number of the last observation to send: on disk, or waited for long enough."""
        self.watchers: list[Watcher] = []
        self.connections: list[Channel] = []
        self.pattern: re.Pattern[str] | None = None
        self.failed_at: float | None = None
        """When the launcher's log was first seen to report a failed rank."""
        self.progress: dict[int, RankProgress] = {}
        self.log_upkeep = LogUpkeep(self.generation)
        self.pinged_at = self.read_at = self.asked_at = 0.0
        self.exit_at: float | None = None
        self.loop.watch(self.listener.fileno(), lambda events: self._accept())
        self.job = JobState.from_token(generation.state, token)
        self.peers = Peers(self.loop, self.job, token, sockets.peers, self._read_vitals)
        self.link = Channel(self.loop, sockets.link, self.handle_news, self._handle_shim_close)

    def run(self) -> None:
        while self.exit_at is None or now() < self.exit_at:
            self.loop.run_once(self._next_deadline())
            self._tick()

    # --- the shim ---

    def handle_news(self, news: Json) -> None:
        self.pinged_since = None
        if "state" not in news:
            return
        if "start" in news:
            self._begin(news["start"])
        self.state = news["state"]
        self.synced, self.unwritten = news["seq"], news["unwritten"]
        self.alive = sorted(int(rank) for rank in news["alive"])
        self.guard_pid, self.kill_at = news["guard"], news["kill_at"]
        self.pids = {int(rank): pid for rank, pid in news["pids"]}
        if not news["behind"]:
            self._copy_lease(news)
        if self.synced != len(self.observations):
            self._send_observations()
        if self.state == "gone":
            self._send_end()
            self.exit_at = now() if not self.watchers else now() + FAREWELL_TIMEOUT

    def _copy_lease(self, news: Json) -> None:
        self.alive_until = news["alive_until"]
        self.leased_until = news["leased_until"]
        self.renewed = news["renewed"]
        if self.lease is not None and self.leased_until is not None:
            self.lease.set_times(self.leased_until, news["handle"], self.renewed)

    def _begin(self, order: Json) -> None:
        self.node = order["node"]
        self.peers.begin(order)
        self.fences = order["fences"]
        self.lease = Lease(now(), self.order["lease"], self.order["fence_after"], order["fences"])
        self.vouchers = Vouchers(peer["node"] for peer in order["peers"])
        self.pattern = (
            re.compile(order["log_pattern"]) if order["log_pattern"] is not None else None
        )
        self.redactor = Redactor.read(self.generation)
        self.launches = order.get("launched") is not None
        self._follow(order["launched"]["ranks"] if self.launches else self.order["ranks"])

    def _follow(self, numbers: Iterable[int]) -> None:
        for rank in numbers:
            if rank not in self.progress:
                self.progress[rank] = RankProgress(self.generation, rank, self.pattern)

    def _handle_shim_close(self) -> None:
        """Handle a closed socket: unless the shim announced its end, it has died."""
        if self.state == "gone":
            return
        started = self.generation.launch
        if started is None and self.progress:  # the file was removed, but the launch was announced
            self._kill_rest()
        if started is None or started.get("refused"):
            self.exit_at = now()
            return
        left, unread = self._kill_rest()
        record = journal.Journal(self.generation.journal)
        for kept in self.unwritten:
            if kept["seq"] == record.seq + 1:  # not written by the shim after all
                fields = {key: kept[key] for key in kept if key not in ("seq", "kind")}
                record.append((kept["kind"], fields))
        self.observations = [*journal.read(self.generation.journal), *record.pending]
        missing = set(self.order["ranks"]) - journal.list_exited(self.observations)
        if missing:
            reason = f"the shim died; the exits of ranks {sorted(missing)} are not known"
            if left:
                reason += f"; {gpu_users.describe(left)} does not die"
            if unread:
                reason += f"; the environment of {gpu_users.describe(unread)} cannot be read"
            record.append(("ShimDied", {"reason": reason}))
        record.close()
        self.unwritten = record.pending
        self.observations = [*journal.read(self.generation.journal), *self.unwritten]
        if not left and not unread:
            self.generation.remove_task_records()
        self.synced = len(self.observations)
        self.state, self.alive, self.leased_until = "gone", [], None
        processes.obey_terminating_signals()  # what is left to report is in the journal
        self._send_observations()
        self._send_end()
        self.exit_at = now() + self.order["lease"]

    def _kill_rest(self) -> tuple[list[int], list[int]]:
        """Kill the ranks and all that they forked.

        Return the pids of what did not die in time, and of what may be of them and was not killed.
        """
        groups, folder = self.generation.groups, self.generation.cgroup
        deadline = None
        killed: list[processes.Process] = []
        while True:
            if folder is not None:
                cgroup.kill(folder)
            found = search.find_by_token(
                self.token.text,
                lambda rest: rest == "",
                str(self.generation.state),
                groups,
                since=self.shim.started,
            )
            left = processes.add_dying(found.processes, killed)
            hidden = processes.find_hidden(groups, left)
            left += cgroup.list_members(folder) if folder is not None else []
            for process in left:
                processes.kill(process, signal.SIGKILL)
            is_late = deadline is not None and time.monotonic() > deadline
            if is_late or not (left or hidden or found.unread):
                return (
                    sorted({process.pid for process in (*left, *hidden)}),
                    [process.pid for process in found.unread],
                )
            killed = left
            deadline = deadline or time.monotonic() + KILL_TIMEOUT
            time.sleep(0.01)

    # --- watchers ---

    def _accept(self) -> None:
        try:
            caller, _ = self.listener.accept()
        except OSError:  # the caller hung up before accept
            return
        if not is_from_this_user(caller):
            caller.close()
            return
        channel = Channel(
            self.loop,
            caller.detach(),
            lambda line: self._handle_line(channel, line),
            lambda: self._forget(channel),
            MAX_QUEUED_BYTES,
        )
        self.connections.append(channel)
        if len(self.connections) > MAX_WATCHERS:
            self.connections[0].drop()

    def _forget(self, channel: Channel) -> None:
        self.connections.remove(channel)
        left = [watcher for watcher in self.watchers if watcher.channel is not channel]
        if len(left) != len(self.watchers):
            self.watchers = left
            self.link.send({"watchers": len(self.watchers)})
            if self.state == "gone" and self.link.closed:
                self.exit_at = now() + self.order["lease"]
        if self.state == "gone" and not self.watchers and not self.link.closed:
            self.exit_at = now()

    def _handle_line(self, channel: Channel, line: Json) -> None:
        if "watch" in line:
            watcher = Watcher(channel, line["watch"]["after_seq"], line["watch"]["heartbeat"])
            self.watchers.append(watcher)
            self.link.send({"watchers": len(self.watchers)})
            hello = {
                "token": self.token.json,
                "boot_id": self.boot,
                "state": self.state,
                "ranks": self.order["ranks"],
                "stamp": now(),
                "place": self.job.place,
            }
            self._tell(watcher, {"hello": hello})
            self._send_observations()
            if self.state == "gone":
                self._send_end()
            else:
                self._read_progress()
                self._send_heartbeat(watcher)
        elif (
            "renew" in line
            and isinstance(line["renew"], dict)
            and _is_time(line["renew"].get("stamp"))
        ):
            age = line["renew"].get("age", 0.0)
            if _is_time(age):
                self._renew(float(line["renew"]["stamp"]), float(age))

    def _renew(self, stamp: float, age: float) -> None:
        """Forward a renewal to the shim, and send the new time of the fence to the guard.

        The guard is informed from here because the shim may be stopped.

        Args:
            stamp: This node's clock in the heartbeat that the watcher received.
            age: Seconds since then, by the watcher's clock.
        """
        at = now()
        if stamp > at:  # not of this node's clock
            return
        # Correct the stamp first: several renewals may have waited here during the same pause,
        # and it must count only once.
        self._count_standstill(measure_standstill(self.standstills.correct(stamp), age, at))
        stamp = min(self.standstills.correct(stamp), at - age)
        if self.lease is not None and self.lease.renew(stamp, at):
            self._inform_guard()
        self._forward("renew", stamp)

    def _count_standstill(self, lost: float) -> None:
        """Shorten the lease by the seconds for which this node's clock stood still."""
        if lost > 0.0 and self.lease is not None:
            self.standstills.add(now(), lost)
            self.clocks.forget()
            self.vouchers.forget()
            self.lease.shorten(lost)
            # Inform the shim first: the guard may kill at once, and the shim needs to know why.
            self._forward("stood_still", lost)
            self._inform_guard()

    def _forward(self, name: str, value: float) -> None:
        """Send to the shim what changes its lease; while it reads nothing, keep what counts.

        That is little, however long it reads nothing, and the newest is not behind all the others.
        """
        if name == "stood_still":
            for held in {"renew", "vouched"} & set(self.held):
                self.held[held] -= value  # it would have been shortened after it had come
            self.held[name] = self.held.get(name, 0.0) + value
        else:
            self.held[name] = max(value, self.held.get(name, value))
        self._send_held()

    def _send_held(self) -> None:
        if not self.link.has_unsent:
            for name in ("stood_still", "renew", "vouched"):
                if name in self.held:
                    self.link.send({name: self.held.pop(name)})

    def _inform_guard(self) -> None:
        if self.lease is None or self.state != "running":
            return
        _write_to_guard(self.guard, {"ends": self.lease.ends})

    def _send_observations(self) -> None:
        """Send to each watcher the synced observations that it does not have yet."""
        written = journal.read(self.generation.journal)
        self.observations = [*written, *self.unwritten][: self.synced]
        # Read the kernel log now, even if there is no watcher.
        if self.kernel_reading is None and kernel_log.may_explain(self.observations):
            self.kernel_reading = kernel_log.read_generation(self.generation, self.kernel)
        if any(watcher.seq < len(self.observations) for watcher in self.watchers):
            self._send_last_progress()
        for watcher in list(self.watchers):
            for observation in self.observations[watcher.seq :]:
                reach_failpoint(self.generation.state, "supervisor.sending")
                watcher.seq = observation["seq"]
                told = evidence.add_evidence(self.generation, observation, self.kernel_reading)
                self._tell(watcher, {"observation": told})

    def _send_last_progress(self) -> None:
        """Send what ranks have reached, before the exits that may be the last that is read.

        Otherwise steps between the last heartbeat and the end of a rank would be unknown, and a
        generation that is shorter than a heartbeat would have gained nothing.
        """
        for progress in self.progress.values():
            progress.read()
        if any(progress.report() is not None for progress in self.progress.values()):
            for watcher in list(self.watchers):
                self._send_heartbeat(watcher)

    def _send_end(self) -> None:
        for watcher in list(self.watchers):
            self._tell(watcher, {"end": {"seq": len(self.observations)}})
            watcher.channel.finish()

    def _send_heartbeat(self, watcher: Watcher) -> None:
        watcher.sent_at = now()
        watcher.due_at = watcher.sent_at + watcher.heartbeat
        if watcher.channel.has_unsent:
            return  # a queued heartbeat would be stale when it is read
        runs = self.leased_until is not None and self.alive_until is not None
        left = (
            round(max(0.0, self.leased_until - now()), 3)
            if runs and self.leased_until is not None
            else None
        )
        reports = {str(rank): progress.report() for rank, progress in self.progress.items()}
        reported = {rank: report for rank, report in reports.items() if report is not None}
        heartbeat: Json = {
            "stamp": now(),
            "alive": self._find_alive(),
            "lease_left": left,
            "progress": self.redactor.redact(reported),
        }
        if not reported and self.progress:
            heartbeat["unmatched"] = self._describe_output()
        if self._shim_silence is not None:
            heartbeat["shim_silent"] = round(self._shim_silence, 1)
        self._tell(watcher, {"heartbeat": heartbeat})

    def _tell(self, watcher: Watcher, said: Json) -> None:
        """Send a line to a watcher. Each names its sender, by which the controller checks it."""
        shim = {"pid": self.shim.pid, "started": self.shim.started, "boot_id": self.boot}
        watcher.channel.send({**said, "sender": make_sender(self.token, self.node, shim)})

    def _describe_output(self) -> Json:
        """Return what was printed last by the rank that printed last: no rank reports progress."""
        printed = {rank: progress.printed_at() for rank, progress in self.progress.items()}
        rank = max(printed, key=lambda each: (printed[each], -each))
        return {"rank": rank, "lines": self.progress[rank].read_tail(self.redactor)}

    def _find_alive(self) -> list[int]:
        """Return the ranks that live, as the shim reported them.

        The shim removes a rank only after it has journaled its exit. If the shim is silent, ranks
        that are dead according to /proc are left out as well.
        """
        if self._shim_silence is None:
            return self.alive
        running = {rank: processes.read_or_hide(pid) for rank, pid in self.pids.items()}
        return [
            rank
            for rank in self.alive
            if rank in running and (process := running[rank]) is not None and process.is_alive
        ]

    @property
    def _shim_silence(self) -> float | None:
        """Return the seconds of the shim's silence; None if below SHIM_SILENCE."""
        if self.pinged_since is None or now() < self.pinged_since + SHIM_TIMEOUT:
            return None
        return now() - self.pinged_since

    @property
    def _kill_due_at(self) -> float | None:
        """Return when to kill what shim and guard should have killed; None if never."""
        if self.link.closed or self.state not in ("running", "stopping"):
            return None
        ends = (
            None
            if self.lease is None or self.lease.ends is None
            else self.lease.ends + float(self.order["stop_grace"])
        )
        due = ends if self.state == "running" else self.kill_at
        return None if due is None else max(due + OVERDUE_DELAY, self.killed_at + OVERDUE_DELAY)

    def _kill_for_shim(self) -> None:
        """Kill the ranks, because both the shim and the guard are stopped or hang."""
        self.link.read_pending()
        if self._kill_due_at is None or now() < self._kill_due_at:
            return
        self.killed_at = now()
        for process in processes.list_below(self.shim, without=[os.getpid(), self.guard_pid]):
            processes.kill(process, signal.SIGKILL)

    def _wake_shim(self) -> None:
        """Send SIGCONT to a stopped shim: while it is stopped, exits of ranks are not reported."""
        shim = processes.read_process(self.shim.pid)
        if shim is not None and shim.state == "T":
            processes.kill(self.shim, signal.SIGCONT)

    def _read_progress(self) -> None:
        """Read the progress of all ranks.

        If a step or a checkpoint changed, the next heartbeat comes within 1 s of the last one.
        """
        self.read_at = now()
        if self.launches:
            launched = self.generation.launched_ranks
            self._follow(launched)  # a launcher may assign other rank numbers than the order gave
            self._check_launcher(launched)
        advanced = [progress.read() for progress in self.progress.values()]
        if any(advanced):
            for watcher in self.watchers:
                watcher.due_at = min(watcher.due_at, watcher.sent_at + 1.0)

    def _check_launcher(self, launched: Dict[int, Tuple[int, int]]) -> None:
        """Report a launcher that logged a failed rank but does not exit to the shim.

        Ft_launcher waits up to five minutes for the launchers of other nodes.
        """
        if all(processes.is_alive(*rank) for rank in launched.values()):
            return
        if self.failed_at is None:
            if any(
                FAILURE_TEXT in line
                for line in evidence.read_tail(
                    self.generation.log_path(self.order["ranks"][0]), self.redactor
                )
            ):
                self.failed_at = now()
        elif now() > self.failed_at + LAUNCHER_EXIT_TIMEOUT:
            self.link.send({"failed_below": True})

    # --- time ---

    def _next_deadline(self) -> float:
        times = [self.pinged_at + PING_INTERVAL]
        if self.exit_at is not None:
            times.append(self.exit_at)
        if self._kill_due_at is not None:
            times.append(self._kill_due_at)
        if self.peers.busy:
            times.append(now() + 0.2)
        if self._ask_at is not None:
            times.append(self._ask_at)
        for watcher in self.watchers:
            times.append(watcher.due_at)
            if self.alive:
                times.append(self.read_at + PROGRESS_INTERVAL)
        return min(times)

    @property
    def _ask_at(self) -> float | None:
        """Return when to ask the peers next, or None.

        While a lease runs, peers are asked for their clocks; once it has expired, whether they
        vouch for this generation. Where ranks fence, they are asked from the start on: a machine
        that is paused before its first renewal is to know its peers by then. No answer extends the
        first lease.
        """
        if self.leased_until is None or not (self.renewed or self.fences):
            return None
        often = self.asked_at + min(1.0, float(self.order["fence_after"]) / 5)
        if not self.fences or now() >= self.leased_until:
            return max(self.leased_until, often)
        return min(
            max(self.leased_until, often),
            self.asked_at
            + min(COMPARE_INTERVALS[1], max(COMPARE_INTERVALS[0], float(self.order["lease"]) / 6)),
        )

    def _tick(self) -> None:
        self._send_held()
        if now() >= self.pinged_at + PING_INTERVAL:
            self.pinged_at = now()
            if not self.link.closed:
                self._ping()
            self.log_upkeep.run()
        if self._kill_due_at is not None and now() >= self._kill_due_at:
            self._kill_for_shim()
        self.peers.expire()
        self._check_alone()
        if self._ask_at is not None and now() >= self._ask_at:
            self.asked_at = now()
            self.peers.ask(self._handle_answer)
        if self.watchers and self.alive and now() >= self.read_at + PROGRESS_INTERVAL:
            self._read_progress()
        for watcher in list(self.watchers):
            if watcher.is_slow:
                watcher.channel.drop()
            elif now() >= watcher.due_at:
                self._send_heartbeat(watcher)

    def _ping(self) -> None:
        """Send a keep-alive message to the shim; if the shim is silent, continue it if stopped."""
        if self.pinged_since is None:
            self.pinged_since = now()
            self.link.send({"alive": True})
        elif self._shim_silence is not None:
            self._wake_shim()

    # --- peers ---

    def _read_vitals(self) -> tuple[bool, bool]:
        """Return (alive, leased) of this node's part of the generation.

        Pending messages of the shim are handled first: a generation that is stopping is not alive.
        """
        self.link.read_pending()
        at = now()
        alive = (
            self.state == "running"
            and bool(self.alive)
            and (self.alive_until is None or at < self.alive_until)
        )
        return (
            alive,
            alive and self.renewed and self.leased_until is not None and at < self.leased_until,
        )

    def _check_alone(self) -> None:
        """Fence if a peer refused the connection, no peer answers and no controller watches here.

        This covers a machine that was paused while its gang was stopped elsewhere: no peer is left
        whose clock would show the pause. A peer that is not started yet does not refuse, and has
        not answered, so it is no reason.
        """
        if self.state != "running" or not self.fences or not self.peers.is_alone:
            return
        if not self.watchers:
            nodes = ", ".join(sorted(self.peers.refusing_nodes))
            self.link.send(
                {
                    "alone": "no controller watches here, no peer answers, "
                    f"and nothing of this generation lives on {nodes}"
                }
            )
            self.peers.refusing_nodes.clear()
            return
        # Sending a heartbeat soon detects watchers that are gone.
        for watcher in self.watchers:
            watcher.due_at = min(watcher.due_at, watcher.sent_at + 1.0)

    def _handle_answer(self, answer: Answer) -> None:
        if answer.stamp is not None:
            self._count_standstill(
                self.clocks.compare(answer.node, answer.asked, answer.answered, answer.stamp)
            )
        if answer.superseded is not None:
            self.link.send({"superseded": answer.superseded})
            return
        asked = self.standstills.correct(answer.asked)
        vouched = self.vouchers.record_answer(answer.node, asked, answer.alive, answer.leased)
        if vouched is not None:
            if self.lease is not None:
                self.lease.extend(vouched)
                self._inform_guard()
            self._forward("vouched", vouched)
