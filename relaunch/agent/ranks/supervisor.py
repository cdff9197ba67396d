"""The supervisor of one generation: serves watchers and peers, reads progress and evidence.

The keeper needs none of it. When the keeper dies it makes sure that no rank outlives it, says so in the
journal, and stays to tell.
"""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import time
from dataclasses import dataclass
from typing import Dict, Iterable, Tuple

from relaunch.agent import processes
from relaunch.agent.failpoints import reach_failpoint
from relaunch.agent.loop import Channel, Loop
from relaunch.agent.node import gpu_users, kernel_log
from relaunch.agent.protocol import Json, Token, line, now
from relaunch.agent.ranks import cgroup, evidence, journal, retention
from relaunch.agent.ranks.lease import Lease, PeerClocks, Standstills, Vouchers, measure_standstill
from relaunch.agent.ranks.peers import Answer, Peers
from relaunch.agent.ranks.progress import RankProgress
from relaunch.agent.state import Generation, JobState, boot_id

PING = 2.0
"""Seconds between signs of life to the keeper."""
KEEPER_SILENCE = 3.0
"""Seconds without an answer to a sign of life after which a keeper is called silent: it answers each at once."""
OVERDUE = 0.5
"""Seconds past the end of the last grace after which the guard should have killed what is left, and evidently has not."""
COMPARE = (0.5, 2.0)
"""Seconds, at least and at most, between two comparisons of clocks with the peers while a lease runs; in between a sixth of it."""
LOOK = 0.5
"""Seconds between looks at progress while somebody watches: half of the second that heartbeats may be apart."""
WATCHERS = 16
"""The oldest goes when one more comes: it is the likeliest to be a zombie."""
WATCHER_LIMIT = 16 * 1024 * 1024
"""Bytes that wait for a watcher: every rank's error file and log tail at once."""
KILLING = 0.9
"""Seconds to see everything dead before saying that the keeper died: ranks are to be gone within one."""
FAILED = "failed (exitcode: "
"""What torchrun and ft_launcher log of the rank that failed first, when they have ended the others."""
LAUNCHER_PATIENCE = 5.0
"""Seconds from there to the launcher's own end, in which it says more; torchrun needs two on a busy machine."""
FAREWELL = 0.8
"""Less than the keeper gives us."""


class Watcher:
    def __init__(self, channel: Channel, after_seq: int, heartbeat: float) -> None:
        self.channel = channel
        self.seq = after_seq
        self.heartbeat = heartbeat
        self.beat_at = 0.0
        self.due_at = 0.0

    @property
    def slow(self) -> bool:
        """Whether it has read nothing for three heartbeats although something waits for it."""
        return self.channel.behind and now() > self.channel.written_at + max(1.0, 3 * self.heartbeat)


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class Sockets:
    watch: socket.socket
    peers: socket.socket
    link: int
    """To the keeper."""
    guard: int
    """A pipe to the guard."""


def run(
    generation: Generation,
    token: Token,
    order: Json,
    keeper: processes.Process,
    sockets: Sockets,
    kernel: kernel_log.Mark,
    news: Json,
) -> None:
    """Be the supervisor. The process was forked from the keeper a moment ago."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    processes.set_name("relaunch-sup")
    kept = [sockets.watch.fileno(), sockets.peers.fileno(), sockets.link, sockets.guard]
    processes.close_all_but([*kept, kernel.handle])
    supervisor = Supervisor(generation, token, order, keeper, sockets, kernel)
    supervisor.hear_keeper(news)
    supervisor.run()


class Supervisor:
    def __init__(
        self,
        generation: Generation,
        token: Token,
        order: Json,
        keeper: processes.Process,
        sockets: Sockets,
        kernel: kernel_log.Mark,
    ) -> None:
        self.generation = generation
        self.token = token
        self.order = order
        self.keeper = keeper
        self.listener = sockets.watch
        self.guard = sockets.guard
        self.loop = Loop()
        self.boot = boot_id(generation.state)
        self.state = "prepared"
        self.alive: list[int] = []
        self.pids: dict[int, int] = {}
        """pid by rank, of those that the keeper has not reaped."""
        self.lease: Lease | None = None
        """The keeper's, with what the keeper would have taken by now if it is stopped: this process passes it on to the guard."""
        self.guard_pid = 0
        self.kill_at: float | None = None
        """While stopping: when the keeper sends SIGKILL."""
        self.killed_at = 0.0
        """When this process last did so in its place."""
        self.unanswered_since: float | None = None
        """When the sign of life was sent that the keeper has not answered."""
        self.alive_until: float | None = None
        """As of the keeper's last word, which is never later than what it holds by now. None: it cannot fall."""
        self.leased_until: float | None = None
        self.renewed = False
        self.vouchers = Vouchers(())
        self.clocks = PeerClocks()
        self.standstills = Standstills()
        self.fences = False
        self.observations: list[Json] = []
        self.kernel = kernel
        self.kernel_reading: Json | None = None
        self.untaken: list[Json] = []
        """What we said of the keeper's end ourselves and a full disk did not take."""
        self.synced = 0
        """Up to which number the disk has them, as far as the keeper has said."""
        self.watchers: list[Watcher] = []
        self.connections: list[Channel] = []
        self.pattern: re.Pattern[str] | None = None
        self.launches = False
        """Whether ranks are below a launcher."""
        self.failed_at: float | None = None
        """When that was first seen to have said that one of them failed."""
        self.progress: dict[int, RankProgress] = {}
        self.pinged_at = self.looked_at = self.asked_at = 0.0
        self.leave_at: float | None = None
        self.loop.watch(self.listener.fileno(), lambda events: self._accept())
        self.job = JobState.of(generation.state, token)
        self.peers = Peers(self.loop, self.job, token, sockets.peers, self._vitals)
        self.link = Channel(self.loop, sockets.link, self.hear_keeper, self._keeper_went)

    def run(self) -> None:
        while self.leave_at is None or now() < self.leave_at:
            self.loop.turn(self._next_deadline())
            self._tick()

    # --- the keeper ---

    def hear_keeper(self, told: Json) -> None:
        self.unanswered_since = None
        if "state" not in told:
            return
        if "start" in told:
            self._begin(told["start"])
        self.state = told["state"]
        self.synced = told["seq"]
        self.alive = sorted(int(rank) for rank in told["alive"])
        self.alive_until = told["alive_until"]
        self.leased_until = told["leased_until"]
        self.renewed = told["renewed"]
        self.guard_pid, self.kill_at = told["guard"], told["kill_at"]
        self.pids = {int(rank): pid for rank, pid in told["pids"]}
        if self.lease is not None and self.leased_until is not None:
            self.lease.set_times(self.leased_until, told["handle"], self.renewed)
        self._send_news()
        if self.state == "gone":
            self._say_end()
            self.leave_at = now() if not self.watchers else now() + FAREWELL

    def _begin(self, order: Json) -> None:
        self.peers.begin(order)
        self.fences = order["fences"]
        self.lease = Lease(now(), self.order["lease"], self.order["fence_after"], order["fences"])
        self.vouchers = Vouchers(peer["node"] for peer in order["peers"])
        self.pattern = re.compile(order["log_pattern"]) if order["log_pattern"] is not None else None
        self.launches = order.get("launched") is not None
        self._follow(order["launched"]["ranks"] if self.launches else self.order["ranks"])

    def _follow(self, numbers: Iterable[int]) -> None:
        for rank in numbers:
            if rank not in self.progress:
                self.progress[rank] = RankProgress(self.generation, rank, self.pattern)

    def _keeper_went(self) -> None:
        """Its end of the line closed: an orderly end was announced, anything else is its death."""
        if self.state == "gone":
            return
        started = self.generation.started
        if started is None and self.progress:  # it was removed: we were told of the launch
            self._kill_what_is_left()
        if started is None or started.get("refused"):
            self.leave_at = now()
            return
        left = self._kill_what_is_left()
        self.observations = journal.read(self.generation.journal)
        missing = set(self.order["ranks"]) - journal.exited(self.observations)
        if missing:
            reason = f"the keeper died; the exits of ranks {sorted(missing)} are not known"
            if left:
                reason += f"; {gpu_users.describe(left)} does not die"
            record = journal.Journal(self.generation.journal)
            record.append(("KeeperDied", {"reason": reason}))
            record.close()
            self.untaken = record.pending
            self.observations = [*journal.read(self.generation.journal), *self.untaken]
        self.synced = len(self.observations)
        self.state, self.alive, self.leased_until = "gone", [], None
        self._send_news()
        self._say_end()
        self.leave_at = now() + self.order["lease"]

    def _kill_what_is_left(self) -> list[int]:
        """Kill the ranks and all that they forked; return what would not die."""
        groups, folder = self.generation.groups, self.generation.cgroup
        deadline = time.monotonic() + KILLING
        killed: list[processes.Process] = []
        while True:
            if folder is not None:
                cgroup.kill(folder)
            named = processes.of_token(self.token.text, lambda rest: rest == "", str(self.generation.state), groups)
            left = processes.with_dying(named, killed)
            left += cgroup.members(folder) if folder is not None else []
            if not left or time.monotonic() > deadline:
                return sorted({process.pid for process in left})
            for process in left:
                processes.kill(process, signal.SIGKILL)
            killed = left
            time.sleep(0.01)

    # --- watchers ---

    def _accept(self) -> None:
        try:
            caller, _ = self.listener.accept()
        except OSError:  # it hung up before we came to it
            return
        channel = Channel(
            self.loop,
            caller.detach(),
            lambda line: self._hear(channel, line),
            lambda: self._forget(channel),
            WATCHER_LIMIT,
        )
        self.connections.append(channel)
        if len(self.connections) > WATCHERS:
            self.connections[0].drop()

    def _forget(self, channel: Channel) -> None:
        self.connections.remove(channel)
        left = [watcher for watcher in self.watchers if watcher.channel is not channel]
        if len(left) != len(self.watchers):
            self.watchers = left
            self.link.send({"watchers": len(self.watchers)})
            if self.state == "gone" and self.link.closed:
                self.leave_at = now() + self.order["lease"]
        if self.state == "gone" and not self.watchers and not self.link.closed:
            self.leave_at = now()

    def _hear(self, channel: Channel, line: Json) -> None:
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
            channel.send({"hello": hello})
            self._send_news()
            if self.state == "gone":
                self._say_end()
            else:
                self._look()
                self._beat(watcher)
        elif "renew" in line and isinstance(line["renew"], dict) and _is_time(line["renew"].get("stamp")):
            age = line["renew"].get("age", 0.0)
            if _is_time(age):
                self._renew(float(line["renew"]["stamp"]), float(age))

    def _renew(self, stamp: float, age: float) -> None:
        """Pass a renewal on. The guard hears what follows from it here: the keeper may be stopped.

        Args:
            stamp: this node's clock in the heartbeat that the watcher has received.
            age: seconds since then, by the watcher's clock.
        """
        at = now()
        if stamp <= at:
            # Several that waited here while the machine was paused tell of the same time.
            self._count_standstill(measure_standstill(self.standstills.correct(stamp), age, at))
            stamp = min(self.standstills.correct(stamp), at - age)
        if self.lease is not None and self.lease.renew(stamp, at):
            self._inform_guard()
        self.link.send({"renew": stamp})

    def _count_standstill(self, lost: float) -> None:
        """Have the lease end earlier by the time for which this node's clock stood still."""
        if lost > 0.0 and self.lease is not None:
            self.standstills.add(now(), lost)
            self.clocks.forget()
            self.vouchers.forget()
            self.lease.shift(lost)
            self.link.send({"stood_still": lost})  # before the guard, which may have to kill at once: by then the keeper can know why
            self._inform_guard()

    def _inform_guard(self) -> None:
        if self.lease is None or self.state != "running":
            return
        try:
            os.write(self.guard, line({"ends": self.lease.ends}))
        except BlockingIOError:  # a guard that reads nothing is replaced by the keeper
            pass

    def _send_news(self) -> None:
        """Send what the journal has for good and each watcher has not."""
        written = journal.read(self.generation.journal)
        self.observations = [*written, *self.untaken][: self.synced]
        if self.kernel_reading is None and kernel_log.asked_for(self.observations):  # now, whether or not anybody watches
            self.kernel_reading = kernel_log.reading_of(self.generation, self.kernel)
        for watcher in list(self.watchers):
            for observation in self.observations[watcher.seq :]:
                reach_failpoint(self.generation.state, "supervisor.sending")
                watcher.seq = observation["seq"]
                watcher.channel.send({"observation": evidence.told(self.generation, observation, self.kernel_reading)})

    def _say_end(self) -> None:
        for watcher in list(self.watchers):
            watcher.channel.send({"end": {"seq": len(self.observations)}})
            watcher.channel.finish()

    def _beat(self, watcher: Watcher) -> None:
        watcher.beat_at = now()
        watcher.due_at = watcher.beat_at + watcher.heartbeat
        if watcher.channel.behind:
            return  # a heartbeat that waits in a queue would be stale when it is read
        runs = self.leased_until is not None and self.alive_until is not None
        left = round(max(0.0, self.leased_until - now()), 3) if runs and self.leased_until is not None else None
        reports = {str(rank): progress.report() for rank, progress in self.progress.items()}
        reported = {rank: report for rank, report in reports.items() if report is not None}
        heartbeat: Json = {"stamp": now(), "alive": self._find_alive(), "lease_left": left, "progress": reported}
        if self._keeper_silence is not None:
            heartbeat["keeper_silent"] = round(self._keeper_silence, 1)
        watcher.channel.send({"heartbeat": heartbeat})

    def _find_alive(self) -> list[int]:
        """Ranks that live, by the keeper's word, which comes after that of their exits; where it is silent, by the kernel's too."""
        if self._keeper_silence is None:
            return self.alive
        found = {rank: processes.look(pid) for rank, pid in self.pids.items()}
        return [rank for rank in self.alive if rank in found and (process := found[rank]) is not None and process.lives]

    @property
    def _keeper_silence(self) -> float | None:
        """For how many seconds the keeper has not answered, where that is long."""
        if self.unanswered_since is None or now() < self.unanswered_since + KEEPER_SILENCE:
            return None
        return now() - self.unanswered_since

    @property
    def _kill_due_at(self) -> float | None:
        """When to kill what keeper and guard should have killed; None where there is nothing to kill."""
        if self.link.closed or self.state not in ("running", "stopping"):
            return None
        ends = None if self.lease is None or self.lease.ends is None else self.lease.ends + float(self.order["stop_grace"])
        due = ends if self.state == "running" else self.kill_at
        return None if due is None else max(due + OVERDUE, self.killed_at + OVERDUE)

    def _kill_for_keeper(self) -> None:
        """Kill the ranks: both the keeper and the guard are stopped, or hang."""
        self.link.hear_pending()
        if self._kill_due_at is None or now() < self._kill_due_at:
            return
        self.killed_at = now()
        for process in processes.list_below(self.keeper, without=[os.getpid(), self.guard_pid]):
            processes.kill(process, signal.SIGKILL)

    def _wake_keeper(self) -> None:
        """Send SIGCONT to a keeper that was stopped: until it goes on, ranks that end are not reported."""
        found = processes.look(self.keeper.pid)
        if found is not None and found.state == "T":
            processes.kill(self.keeper, signal.SIGCONT)

    def _look(self) -> None:
        """Read progress; where a step or a checkpoint advanced, the next heartbeat comes within a second of the last."""
        self.looked_at = now()
        if self.launches:
            launched = self.generation.launched
            self._follow(launched)  # a launcher may number them otherwise than it was told
            self._see_failure(launched)
        advanced = [progress.read() for progress in self.progress.values()]
        if any(advanced):
            for watcher in self.watchers:
                watcher.due_at = min(watcher.due_at, watcher.beat_at + 1.0)

    def _see_failure(self, launched: Dict[int, Tuple[int, int]]) -> None:
        """Notice a launcher that has seen a rank fail and does not end: ft_launcher waits for those of other nodes, up to five minutes."""
        if all(processes.lives(*one) for one in launched.values()):
            return
        if self.failed_at is None:
            if any(FAILED in line for line in evidence.tail(self.generation.log(self.order["ranks"][0]))):
                self.failed_at = now()
        elif now() > self.failed_at + LAUNCHER_PATIENCE:
            self.link.send({"failed_below": True})

    # --- time ---

    def _next_deadline(self) -> float:
        times = [self.pinged_at + PING]
        if self.leave_at is not None:
            times.append(self.leave_at)
        if self._kill_due_at is not None:
            times.append(self._kill_due_at)
        if self.peers.busy:
            times.append(now() + 0.2)
        if self._ask_at is not None:
            times.append(self._ask_at)
        for watcher in self.watchers:
            times.append(watcher.due_at)
            if self.alive:
                times.append(self.looked_at + LOOK)
        return min(times)

    @property
    def _ask_at(self) -> float | None:
        """When the peers are to be asked next, if they are: for their clocks while leased, for their word once the lease has passed."""
        if self.leased_until is None or not self.renewed:
            return None
        often = self.asked_at + min(1.0, float(self.order["fence_after"]) / 5)
        if not self.fences or now() >= self.leased_until:
            return max(self.leased_until, often)
        return min(max(self.leased_until, often), self.asked_at + min(COMPARE[1], max(COMPARE[0], float(self.order["lease"]) / 6)))

    def _tick(self) -> None:
        if now() >= self.pinged_at + PING:
            self.pinged_at = now()
            if not self.link.closed:
                self._ping()
            retention.cut_live_logs(self.generation)
        if self._kill_due_at is not None and now() >= self._kill_due_at:
            self._kill_for_keeper()
        self.peers.expire()
        self._see_alone()
        if self._ask_at is not None and now() >= self._ask_at:
            self.asked_at = now()
            self.peers.ask(self._peer_answered)
        if self.watchers and self.alive and now() >= self.looked_at + LOOK:
            self._look()
        for watcher in list(self.watchers):
            if watcher.slow:
                watcher.channel.drop()
            elif now() >= watcher.due_at:
                self._beat(watcher)

    def _ping(self) -> None:
        """Show the keeper that this process lives, and see whether the keeper does."""
        if self.unanswered_since is None:
            self.unanswered_since = now()
            self.link.send({"alive": True})
        elif self._keeper_silence is not None:
            self._wake_keeper()

    # --- peers ---

    def _vitals(self) -> tuple[bool, bool]:
        """Whether we are alive, and leased. What the keeper has said meanwhile is heard first: who stops is not alive."""
        self.link.hear_pending()
        at = now()
        alive = self.state == "running" and bool(self.alive) and (self.alive_until is None or at < self.alive_until)
        return alive, alive and self.renewed and self.leased_until is not None and at < self.leased_until

    def _see_alone(self) -> None:
        """Fence where nothing of the generation can be left elsewhere, and no controller watches it here.

        So a machine finds itself that was paused while its gang was stopped: no peer tells it the time.
        """
        if self.state != "running" or not self.renewed or not self.fences or not self.peers.is_alone:
            return
        if not self.watchers:
            named = ", ".join(sorted(self.peers.refused))
            self.link.send({"alone": f"no controller watches here, no peer answers, and nothing of this generation lives on {named}"})
            self.peers.refused.clear()
            return
        for watcher in self.watchers:  # one that is gone is seen to be gone when something is sent to it
            watcher.due_at = min(watcher.due_at, watcher.beat_at + 1.0)

    def _peer_answered(self, answer: Answer) -> None:
        if answer.stamp is not None:
            self._count_standstill(self.clocks.compare(answer.node, answer.asked, answer.answered, answer.stamp))
        if answer.superseded is not None:
            self.link.send({"superseded": answer.superseded})
            return
        asked = self.standstills.correct(answer.asked)
        vouched = self.vouchers.answered(answer.node, asked, answer.alive, answer.leased)
        if vouched is not None:
            if self.lease is not None:
                self.lease.vouched(vouched)
                self._inform_guard()
            self.link.send({"vouched": vouched})
