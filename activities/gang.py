"""Holds what is known of the nodes and ranks of one shard, and decides when to report it.

The module `watch` makes the connections.
"""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from relaunch.activities.clocks import (
    read_boot,
    read_boot_clock,
    read_wall_clock,
    read_wall_offset,
)
from relaunch.activities.hangs import HangLooks, read_looks
from relaunch.activities.observations import (
    MESSAGE_LIMIT,
    read_observations,
    read_unfinished,
)
from relaunch.activities.reports import (
    MissingProgress,
    WatchedCheckpoints,
    WatchHeartbeat,
    WatchRanksInput,
    WatchReport,
)
from relaunch.activities.run_figures import RunRecorder
from relaunch.activities.stragglers import StepTimes
from relaunch.activities.unfinished import READ_TIMEOUT_S, UnfinishedRank, read_last_words
from relaunch.backends.base import Backend, BackendError, ProtocolError, Refusal, WatchStream
from relaunch.evidence.catalog import catalog
from relaunch.evidence.observations import Observation, RankExited, RanksVanished
from relaunch.evidence.rank_log import names_failure
from relaunch.evidence.stragglers import SlowNode
from relaunch.job.diagnose import is_root
from relaunch.job.events import (
    CancelRequested,
    CheckpointSaved,
    Event,
    FaultObserved,
    NodeReturned,
    NodesSlow,
    NodeUnreachable,
    ProgressSeen,
    RanksHung,
    StepReached,
)
from relaunch.job.hang import (
    Counter,
    Overdue,
    Pace,
    advance,
    find_late_exit,
    find_overdue,
    has_restarted,
    rate,
    update_counter,
)
from relaunch.job.places import has_rebooted, parse_place

GATHER_DELAY_S = 0.005
"""Seconds to wait for the other exits of one fault. A longer wait would only delay the relaunch:
the exits of one node arrive together."""
CASCADE_GATHER_TIMEOUT_S = 5.0
"""Seconds to wait for a root cause when only secondary failures have arrived. The rank that failed
may still be writing its traceback, and an interpreter that holds GPUs then takes seconds to end. On
a slow machine, with one second, a peer's broken connection, on another node, was reported as the
cause. A node that answers later than that has as long again (`_find_gather_end`)."""
WORDS_INTERVAL_S = 1.0
"""Seconds, while only secondary failures have arrived, until the nodes are asked (again) what ranks
wrote that have not ended."""
WORDS_LIMIT_S = 120.0
"""Seconds before the first failure was seen in which a rank wrote the exception that is its cause:
handlers at its exit may take a minute before its connections break. An older one was handled."""
WORDS_SLACK_S = 10.0
"""Seconds after an exception in which training may still be seen to advance: other ranks report the
last step a little later."""
STALE_AFTER_BEATS = 1.5
"""Heartbeat intervals without news after which a node's progress counts as unknown."""
MAX_OBSERVATIONS = 16
"""Most observations in a report, which must stay below 256 KiB: a gang of thousands fails as
one."""
MAX_TEXT_BYTES = 192 * 1024
"""Bytes of JSON in one report for what ranks wrote and printed."""
ECHO_LINES = 20
"""Last lines that are sent of each distinct echo but the first observation, which has all: enough
to say what broke, also below what NCCL traces."""
MIN_GOOD_BEATS = 3
"""Valid heartbeats in a row after which a node that sent invalid data counts as answering again."""
RARE_MOVES = 2
"""Heartbeats for which others go on without a rank, until it is known not to report each step."""
WENT_ON_S = 60.0
"""Seconds for which ranks still advance that needed another one which has exited with 0: the step
that it had taken part in, and the report of it."""
CHECKPOINT_INTERVAL_S = 15.0
"""Seconds between two looks at the folder of checkpoints."""
NO_FOLDER = os.strerror(errno.ENOENT)
"""Why a node cannot read a folder before the first checkpoint is saved."""
MAX_NAMED = 16
MAX_REASON = 300
"""Most characters of why a rank's progress cannot be read."""
TOO_LONG = "left out: the report would be too long"


@dataclass(frozen=True, slots=True)
class RankStep:
    """The progress that one rank has reported."""

    counter: Counter
    at: datetime
    phase: str | None = None
    lead_moves: int = 0
    """`Lead.moves` when the counter changed last."""
    reported_at: float = -math.inf
    """When it was reported last, by CLOCK_MONOTONIC."""


@dataclass(slots=True)
class Lead:
    """How far the rank has come that has come furthest."""

    position: int | None = None
    moves: int = 0
    """In how many heartbeat intervals it has advanced."""
    moved_at: float = -math.inf
    """When that was counted last, by CLOCK_MONOTONIC."""
    changed_at: datetime | None = None
    """When the counter of any rank changed last."""

    def note(self, position: int, at: datetime, interval: float) -> None:
        """Note that the counter of a rank has changed, and how far the rank has come.

        Args:
            position: How far.
            at: When its counter changed.
            interval: The interval of heartbeats in seconds.
        """
        self.changed_at = at if self.changed_at is None else max(self.changed_at, at)
        if self.position is not None and position <= self.position:
            return
        self.position = position
        if time.monotonic() - self.moved_at >= interval:
            self.moves, self.moved_at = self.moves + 1, time.monotonic()


@dataclass(slots=True)
class NodeView:
    """The known state of one node."""

    last_heard: float
    """By `read_boot_clock`."""
    silent_since: float | None = None
    """CLOCK_MONOTONIC; None while connected."""
    reason: str = ""
    is_elsewhere: bool = False
    """Whether the answers come from another place than where its ranks were started."""
    reported_lost: bool = False
    reported_elsewhere: bool = False
    misbehaves: bool = False
    """Whether it sent invalid data. It then counts as silent, and its lease is not renewed, until
    it has sent GOOD_BEATS valid heartbeats."""
    good_beats: int = 0
    is_stalled: bool = False
    """Whether the process that reaps its ranks does not answer: their exits may not be reported."""
    stream: WatchStream | None = None
    stamp: float | None = None
    """The newest heartbeat stamp from which the lease was not renewed yet."""
    stamped_at: float = 0.0
    """When `stamp` was received, by `read_boot_clock`."""
    answered_at: float = field(default_factory=time.monotonic)
    """When what it had said of its ranks was complete last, by CLOCK_MONOTONIC; at first, when the
    watch began."""
    late_at: float = -math.inf
    """When it answered after a silence that was longer than between heartbeats."""
    has_rebooted: bool = False
    """Whether its watch came from a later boot than the one that ranks were started in."""
    seq: int = 0
    steps: dict[int, RankStep] = field(default_factory=dict)
    checkpoints: dict[int, int] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    missing: MissingProgress | None = None
    """Why none of its ranks reports a step; None: one does, or the node gives no hint."""
    exited: dict[int, bool] = field(default_factory=dict)
    """Whether each exited rank succeeded, by rank."""
    finished: list[RankExited] = field(default_factory=list)
    """The exits with 0."""


MIN_JUMP_S = 1.0
"""Seconds by which the wall clock must have jumped to be followed. Less is noise: a process that is
scheduled late between two readings, a clock that is slewed."""


def _find_jump(before: float, now: float) -> timedelta:
    """Return by how much the wall clock has jumped between two of `read_wall_offset`."""
    jump = now - before
    return timedelta(seconds=jump) if abs(jump) >= MIN_JUMP_S else timedelta()


def _shift_pace(pace: Pace, by: timedelta) -> Pace:
    return replace(
        pace,
        started_at=pace.started_at + by,
        advanced_at=None if pace.advanced_at is None else pace.advanced_at + by,
    )


class WatchedShard:
    """The state of all nodes of the shard. Facts come in from `_follow`; one report goes out."""

    def __init__(
        self, input: WatchRanksInput, pace: Pace, before: WatchHeartbeat | None = None
    ) -> None:
        now = read_boot_clock()
        self.input = input
        self.exit_delay = 0.0
        """Seconds by which the backend may report one exit later than another."""
        self._nodes = {
            node: NodeView(
                now,
                seq=input.after_seq.get(node, 0),
                reported_lost=node in input.lost,
                reported_elsewhere=node in input.elsewhere,
            )
            for node in input.nodes
        }
        self._began_at = read_wall_clock()
        self._wall_offset = read_wall_offset()
        self._gap = timedelta()
        """By how much the wall clock jumped between the attempt before and this one."""
        if before is not None and before.boot and before.boot == read_boot():
            self._gap = _find_jump(before.wall_offset, self._wall_offset)
        self._pace = _shift_pace(pace, self._gap)
        self._reached_before = None if before is None else before.at
        """When training had advanced last, as the attempt before saw it."""
        self._faults: list[tuple[Observation, bool]] = []
        """Faults, each with whether it may be the root cause. That is judged once, because
        thousands come together."""
        self._fault_at = math.inf
        """When the first of them was seen, by CLOCK_MONOTONIC."""
        self._gathering = asyncio.Event()
        """Set once only secondary failures have arrived, and their cause is looked for."""
        self._unfinished: dict[str, tuple[UnfinishedRank, ...]] = {}
        """Ranks that had not ended when their node was asked last, by node."""
        self._first_words: asyncio.Event | None = None
        """Set once all nodes were asked for the first time; None: they are not asked."""
        self._stopped: list[RankExited] = []
        """What ranks had written before their nodes stopped them."""
        self._returned: list[str] = []
        self._not_renewed = frozenset(input.lost)
        """Nodes that the job counts as lost. It may decide at any moment to go on without them,
        judged by when they were last heard, so they are not renewed. The watch that follows their
        return renews them."""
        self._cancelled: CancelRequested | None = None
        """Set when a person stopped a rank directly on the platform, not through relaunch. This is
        taken as a request to cancel the job."""
        # The nodes whose first heartbeat tells which checkpoints are older than this watch: all
        # nodes, except those from which the previous attempt already heard it.
        is_based = before is not None and before.based
        self._unheard = (
            set(before.unreachable) & set(input.nodes)
            if before is not None and is_based
            else set(input.nodes)
        )
        self._baseline = before.baseline if before is not None and is_based else None
        self._unspoken = set(input.nodes)
        self._news = asyncio.Event()
        self._first_stamps = asyncio.Event()
        for node, ranks in input.exited.items():
            self._nodes[node].exited = dict.fromkeys(ranks, True)
            # When they did is not known any more: not after now.
            self._nodes[node].finished = [
                RankExited(node, rank, 0, 0, None, datetime.now(UTC)) for rank in ranks
            ]
        self._lead = Lead()
        self._counted: frozenset[int] = frozenset()
        """The ranks by which the pace was updated last."""
        self._looks = HangLooks(input)
        self._advanced = self._advance_mark
        """`_advance_mark` when the looks were cleared last."""
        self._step_times = StepTimes(
            input.stragglers, input.timeouts.heartbeat.total_seconds(), time.monotonic()
        )
        self._recorder = RunRecorder(
            before.figures if before is not None else None,
            before.sent_at if before is not None else None,
            datetime.now(UTC),
            input.launched_at,
        )
        self._first_success: float | None = time.monotonic() if any(input.exited.values()) else None

    @property
    def generation(self) -> int:
        return self.input.token.generation

    @property
    def _heartbeat_s(self) -> float:
        return self.input.timeouts.heartbeat.total_seconds()

    @property
    def _tick(self) -> float:
        """Seconds after which time limits are checked without news."""
        return max(0.05, min(1.0, self._heartbeat_s / 4))

    # --- facts in

    def note_connection(self, node: str, stream: WatchStream) -> None:
        view = self._nodes[node]
        view.stream, view.good_beats, view.is_elsewhere = stream, 0, False
        view.last_heard = read_boot_clock()

    def note_invalid_data(self, node: str, reason: str) -> bool:
        """Record that a node sent invalid data, and return whether this is new.

        The node counts as silent, even if valid data comes in between.
        """
        view = self._nodes[node]
        is_news = not view.misbehaves or view.reason != reason
        view.misbehaves = True
        self.note_disconnection(node, reason)
        return is_news

    def _note_answer(self, node: str) -> None:
        """Record that a node sent valid data."""
        view = self._nodes[node]
        if view.misbehaves and view.good_beats < MIN_GOOD_BEATS:
            return
        view.misbehaves, view.silent_since = False, None
        if not view.is_stalled:
            answered, now = view.answered_at, time.monotonic()
            view.answered_at = now
            is_late = now - answered > STALE_AFTER_BEATS * self._heartbeat_s
            # Of the answers since a fault the first one counts: on a busy machine all may be late.
            if is_late and answered < self._fault_at:
                view.late_at = now
            if self._faults:
                self._news.set()
        if view.reported_lost:
            view.reported_lost = view.reported_elsewhere = False
            self._returned.append(node)
            self._news.set()

    def note_refusal(self, node: str) -> bool:
        """Record that a node answers, which knows nothing of this generation.

        Return whether it was lost until now.
        """
        view = self._nodes[node]
        was_lost, view.last_heard = view.reported_lost, read_boot_clock()
        view.misbehaves = False  # it will send no heartbeats that could show it
        self._note_answer(node)
        return was_lost

    def note_disconnection(self, node: str, reason: str, *, is_elsewhere: bool = False) -> float:
        """Record a lost connection.

        Return the seconds for which this watch has failed to reach the node.
        """
        view = self._nodes[node]
        view.stream, view.stamp, view.reason, view.is_elsewhere = None, None, reason, is_elsewhere
        if view.silent_since is None:
            view.silent_since = time.monotonic()
        return time.monotonic() - view.silent_since

    def last_seq(self, node: str) -> int:
        return self._nodes[node].seq

    def process_line(self, node: str, line: Mapping[str, Any]) -> None:
        """Process a line of a watch, as `parse_watch_line` returns it.

        Raises:
            ProtocolError: it names ranks that are not this node's.
        """
        self._follow_wall_clock()
        now = read_wall_clock()
        view = self._nodes[node]
        view.last_heard = read_boot_clock()
        if isinstance(hello := line.get("hello"), Mapping):
            view.has_rebooted = has_rebooted(
                self.input.places, self.input.token, node, parse_place(hello.get("place"))
            )
        elif (heartbeat := line.get("heartbeat")) is not None:
            self._check_ranks(node, map(int, heartbeat.get("progress") or ()))
            view.stamp, view.stamped_at = float(heartbeat["stamp"]), read_boot_clock()
            view.good_beats += 1
            view.is_stalled = heartbeat.get("shim_silent") is not None
            self._note_answer(node)
            self._first_stamps.set()
            self._update_progress(node, view, heartbeat.get("progress") or {}, now)
            view.missing = _find_missing(node, heartbeat)
            self._unspoken.discard(node)
            if node in self._unheard:
                self._unheard.remove(node)
                found = [
                    saved
                    for saved in (self._baseline, *view.checkpoints.values())
                    if saved is not None
                ]
                self._baseline = min(found, default=None)
            if self._is_based():
                self._recorder.note_checkpoint(self._find_checkpoint(), self._baseline, now)
            if self._find_new_checkpoint() is not None:
                self._news.set()
        elif (raw := line.get("observation")) is not None:
            seq = int(raw["seq"])
            if seq <= view.seq:
                return
            if raw.get("kind") == "StoppedByUser":
                view.seq = seq
                self._cancelled = CancelRequested(
                    str(raw.get("reason") or "")[:MESSAGE_LIMIT], str(raw.get("by") or "")
                )
                self._news.set()
                return
            observations = read_observations(node, raw, now)
            self._check_ranks(
                node, (one.rank for one in observations if isinstance(one, RankExited))
            )
            is_of_reboot = any(
                isinstance(one, RanksVanished) and one.rebooted for one in observations
            )
            if is_of_reboot and self.awaits_others(node):
                # Where a reboot may have destroyed the record of a launch, an agent assumes one.
                self._note_answer(node)
                return
            view.seq = seq
            for observation in observations:
                self.add_observation(node, observation)
            if raw.get("stopped") and (before := raw.get("before_stop")) is not None:
                self._stopped.append(read_unfinished(node, {**raw, **before}, "stopped", now))
            self._note_answer(node)
        elif (end := line.get("end")) is not None:
            self._note_end(node, int(end.get("seq", 0)))
            self._note_answer(node)

    def _note_end(self, node: str, seq: int) -> None:
        """Record that a node has nothing more to report: none of its ranks is alive.

        If it never said how they ended, that is the fault: the record of their launch did not
        survive a loss of power, or the one observation that would say it has a number that was used
        before. Nothing else would show it, because the node answers.

        Args:
            node: The node.
            seq: The number of its last observation.
        """
        view = self._nodes[node]
        count = self.input.ranks_per_node
        if self._cancelled is not None or len(view.exited) >= count or self._has_failed_node(node):
            return
        if self.awaits_others(node):
            return
        # What the node does not number counts as one more observation, so that the next watch knows
        # that it was reported.
        view.seq = max(view.seq, seq) + 1
        cause = "the node rebooted" if view.has_rebooted else "nothing of its ranks is left"
        reason = f"{cause}; the exits of {count - len(view.exited)} of {count} are not known"
        self.add_observation(
            node, RanksVanished(node, datetime.now(UTC), reason, view.has_rebooted)
        )

    def awaits_others(self, node: str) -> bool:
        """Return whether no rank may ever have been started here, and the job waits for others."""
        is_other_lost = self.input.lost_in_others or bool(set(self.input.lost) - {node})
        return not self.input.launched and is_other_lost

    def _has_failed_node(self, node: str) -> bool:
        """Return whether a fault of a node's ranks is known, from this watch or from one before it.

        Each observation is a fault or the exit of a rank that succeeded.
        """
        reported = self.input.after_seq.get(node, 0) > len(self.input.exited.get(node, ()))
        return reported or any(observation.node == node for observation, _ in self._faults)

    def _check_ranks(self, node: str, ranks: Iterable[int]) -> None:
        first, world = self.input.first_rank, self.input.world_size
        if first is None:
            return
        count = self.input.ranks_per_node
        first += self.input.nodes.index(node) * count
        for rank in ranks:
            # A launcher, which is numbered after all ranks, may number its own ranks as it likes.
            if not (first <= rank < first + count or (first >= world and rank < world)):
                raise ProtocolError(
                    node,
                    f"it reports rank {rank}, expected {first} to {first + count - 1}",
                )

    def add_observation(self, node: str, observation: Observation) -> None:
        if isinstance(observation, RankExited):
            if self._nodes[node].exited.get(observation.rank) is False:
                return  # a rank ends once
            self._nodes[node].exited[observation.rank] = not observation.failed
            if not observation.failed:
                self._nodes[node].finished.append(replace(observation, log_tail=()))
                self._first_success = self._first_success or time.monotonic()
                self._news.set()
                return
        self._fault_at = min(self._fault_at, time.monotonic())
        self._faults.append((observation, is_root(observation)))
        self._news.set()

    def _update_progress(
        self, node: str, view: NodeView, progress: Mapping[str, Any], now: datetime
    ) -> None:
        for rank, value in progress.items():
            if not isinstance(value, dict):
                continue
            if value.get("checkpoint") is not None:
                view.checkpoints[int(rank)] = int(value["checkpoint"])
            if value.get("step") is None:
                continue
            before = view.steps.get(int(rank))
            known, step = before.counter if before else None, int(value["step"])
            if has_restarted(known, step):
                self._pace = replace(self._pace, restarts=True)
            counter = update_counter(known, step)
            reported_at = time.monotonic()
            at = now - timedelta(seconds=float(value.get("age") or 0.0))
            # The age includes the time for which the node was suspended.
            if before is None and at < self._began_at:
                # Neither is moved by a clock that was set back: an age is no time of the day.
                at = min(at + max(self._gap, timedelta()), self._began_at)
            elif before is not None and known == counter:
                at = before.at
            elif before is not None:
                at = max(at, now - timedelta(seconds=reported_at - before.reported_at))
            if before is None or known != counter:
                self._lead.note(counter.position, at, self._heartbeat_s)
                moves = self._lead.moves
            else:
                moves = before.lead_moves
            view.steps[int(rank)] = RankStep(counter, at, value.get("phase"), moves, reported_at)
            self._step_times.add(node, int(rank), counter.position, at, value)
            view.values = {
                k: float(v)
                for k, v in (value.get("values") or {}).items()
                if isinstance(v, int | float)
            }
        earlier = self._pace
        self._update_pace()
        self._recorder.note_pace(earlier, self._pace, now)
        report_at, now_at = self.input.report_at_step, self._pace.step
        if report_at is not None and now_at is not None and report_at <= now_at != earlier.step:
            self._news.set()

    def _follow_wall_clock(self) -> None:
        """Move what is known about training by each jump of the wall clock.

        The wall clock was stepped, or this machine was suspended: neither is a standstill.
        """
        jump = _find_jump(self._wall_offset, offset := read_wall_offset())
        if not jump:
            return
        self._wall_offset = offset
        self._pace = _shift_pace(self._pace, jump)
        if self._lead.changed_at is not None:
            self._lead.changed_at += jump
        for view in self._nodes.values():
            for rank, value in view.steps.items():
                view.steps[rank] = replace(value, at=value.at + jump)

    def _update_pace(self) -> None:
        """Update the pace with what every live, reporting rank has reached.

        The time is that of the last rank to reach it; the phase is that of one of the ranks.
        """
        living = {
            rank: value
            for view in self._nodes.values()
            # A node without a recent heartbeat is silent, not slow: its last report says nothing
            # about now.
            if not self._is_stale(view)
            for rank, value in view.steps.items()
            if rank not in view.exited and not self._all_exited(view)
        }
        if not living:
            return
        phase = next((value.phase for value in living.values() if value.phase), None)
        counted = living.keys() - self._find_rare(living)
        kept = [living[rank] for rank in counted]
        position = min(value.counter.position for value in kept)
        before = self._pace.position
        if counted != self._counted and before is not None and before < position:
            # The step may have been that of a rank which counts no more, and be long ago.
            self._pace = replace(self._pace, advanced_at=None)
        self._counted = frozenset(counted)
        self._pace = advance(
            self._pace,
            min(value.counter.step for value in kept),
            max(value.at for value in kept if value.counter.position == position),
            phase,
            position,
        )
        if self._advance_mark != self._advanced:
            self._advanced = self._advance_mark
            self._looks.clear()

    @property
    def _advance_mark(self) -> tuple[int | None, datetime | None]:
        """What changes when training advances."""
        return self._pace.position, self._lead.changed_at if self.input.in_lockstep else None

    def _find_rare(self, ranks: Mapping[int, RankStep]) -> frozenset[int]:
        """Return ranks that do not report each step.

        One that prints `resumed at step 60`, and nothing more, says nothing about training. In
        lockstep no rank goes on without the others, so one that others have left behind for two
        heartbeats does not hold them up.
        """
        if not self.input.in_lockstep:
            return frozenset()
        oldest = self._lead.moves - RARE_MOVES
        rare = frozenset(rank for rank, value in ranks.items() if value.lead_moves <= oldest)
        return frozenset() if len(rare) == len(ranks) else rare

    def _judged_pace(self) -> Pace:
        """Return the pace by which training counts as late, or as hung.

        In lockstep an advance of any rank is one of all. That some rank is left behind shows only
        after two heartbeats, and until then its last step may be long ago: the watch may be new, or
        a step may take longer than half of the limit.
        """
        pace, changed = self._pace, self._lead.changed_at
        if not self.input.in_lockstep or pace.advanced_at is None or changed is None:
            return pace
        return replace(pace, advanced_at=max(pace.advanced_at, changed))

    def _find_checkpoint(self) -> int | None:
        """Return the newest checkpoint that is finished by all ranks that report theirs.

        One that some ranks have yet to write is not finished.
        """
        views = [view for view in self._nodes.values() if not self._all_exited(view)]
        return min(
            (
                saved
                for view in views
                for rank, saved in view.checkpoints.items()
                if rank not in view.exited
            ),
            default=None,
        )

    def _is_based(self) -> bool:
        """Return whether every reachable node has reported its earlier checkpoints.

        These are the checkpoints that are older than this watch.
        """
        return all(self._nodes[node].silent_since is not None for node in self._unheard)

    def _find_new_checkpoint(self) -> CheckpointSaved | None:
        if not self.input.report_checkpoint or not self._is_based():
            return None
        saved = self._find_checkpoint()
        if saved is None or (self._baseline is not None and saved <= self._baseline):
            return None
        return CheckpointSaved(self.generation, saved, datetime.now(UTC))

    # --- leases

    def stamps(self) -> dict[str, tuple[float, float]]:
        """Return the stamps of heartbeats received so far, and when each was received.

        Only these may be renewed from after the next acknowledgement.
        """
        return {
            node: (view.stamp, view.stamped_at)
            for node, view in self._nodes.items()
            if view.stamp is not None and node not in self._not_renewed and not view.misbehaves
        }

    async def renew(self, stamps: Mapping[str, tuple[float, float]]) -> None:
        for node, (stamp, stamped_at) in stamps.items():
            stream = self._nodes[node].stream
            if stream is not None:
                try:
                    await stream.renew(stamp, round(read_boot_clock() - stamped_at, 3))
                except BackendError:
                    continue  # its `_follow` task sees the broken connection and tries again

    async def wait_for_beat(self, interval: float) -> None:
        """Sleep until the next heartbeat.

        The first renewal is sent as soon as there is something to renew.
        """
        if not self._first_stamps.is_set():
            # Do not use `wait_for` here: until Python 3.12 it swallows a cancellation that comes at
            # the moment when the awaited event is set.
            try:
                async with asyncio.timeout(interval):
                    await self._first_stamps.wait()
            except TimeoutError:
                return
            return
        await asyncio.sleep(interval)

    def heartbeat(self) -> WatchHeartbeat:
        first = next((view for view in self._nodes.values() if view.values), None)
        silent = tuple(
            node for node, view in self._nodes.items() if view.stream is None or view.misbehaves
        )
        return WatchHeartbeat(
            generation=self.generation,
            step=self._pace.step,
            at=self._reached_at,
            rate=rate(self._pace),
            values=first.values if first else {},
            reachable=len(self._nodes) - len(silent),
            unreachable=silent[:MAX_NAMED],
            stalled=tuple(node for node, view in self._nodes.items() if view.is_stalled)[
                :MAX_NAMED
            ],
            pace=self._pace,
            checkpoint=self._find_checkpoint() or self._recorder.seen,
            based=self._is_based(),
            baseline=self._baseline,
            figures=self._recorder.figures,
            sent_at=datetime.now(UTC),
            boot=read_boot(),
            wall_offset=self._wall_offset,
            missing=None
            if self._pace.step is not None
            else max(
                (view.missing for view in self._nodes.values() if view.missing is not None),
                key=lambda one: (bool(one.unreadable), bool(one.lines)),
                default=None,
            ),
        )

    # --- one report out

    async def report(self) -> WatchReport:
        """Wait until there is something to decide, and return the report."""
        while True:
            if self._faults and self._cancelled is None:
                await self._gather()
            if self._cancelled is not None:
                return self._make_report(self._cancelled)
            if self._faults:
                return self._make_report(self._make_fault())
            if self._returned:
                # The last exits may arrive with the return, and no watch follows once all ranks
                # have exited.
                return self._make_report(all_succeeded=self._all_succeeded())
            if self._all_succeeded():
                return self._make_report(all_succeeded=True)
            if lost := self._find_newly_lost():
                return self._make_report(*lost)
            if reached := [
                one
                for one in (self._find_step_to_report(), self._find_new_checkpoint())
                if one is not None
            ]:
                return self._make_report(*reached)
            if (hang := self._find_hang()) is not None:
                return self._make_report(hang)
            if slow := self._find_slow():
                return self._make_report(NodesSlow(self.generation, slow))
            self._news.clear()
            try:
                async with asyncio.timeout(self._tick):
                    await self._news.wait()
            except TimeoutError:
                continue  # time limits may pass without news

    async def _gather(self) -> None:
        """Wait for a root cause.

        If no exit is one, it is what a rank wrote that was stopped, or has not ended.
        """
        await asyncio.sleep(GATHER_DELAY_S)
        while self._may_have_later_root():
            self._gathering.set()
            left = self._find_gather_end() - time.monotonic()
            if left <= 0.0 and self._first_words is not None and not self._first_words.is_set():
                left = READ_TIMEOUT_S  # the machine is busy, or the answers come in a moment
            if left <= 0.0:
                break
            self._news.clear()
            try:
                async with asyncio.timeout(left):
                    await self._news.wait()
            except TimeoutError:
                continue
        if self._cancelled is None and not any(root for _, root in self._faults):
            failed = self._find_failed()
            known = {(one.node, one.rank) for one in failed}
            self._faults = [
                (one, root)
                for one, root in self._faults
                if not isinstance(one, RankExited) or (one.node, one.rank) not in known
            ] + [(one, True) for one in failed]

    def _find_failed(self) -> list[RankExited]:
        """Return the ranks that failed by what they wrote, and whose exits do not say so."""
        return [one for one in (*self._stopped, *self._list_unfinished()) if self._has_failed(one)]

    def _list_unfinished(self, *, only_ending: bool = False) -> list[RankExited]:
        """Return the ranks that have not ended, as far as their nodes say.

        Args:
            only_ending: Only those that have begun to end.
        """
        return [
            rank.words
            for node, ranks in self._unfinished.items()
            for rank in ranks
            if rank.words.rank not in self._nodes[node].exited
            and (rank.is_ending or not only_ending)
        ]

    def _has_failed(self, one: RankExited) -> bool:
        """Return whether what a rank wrote, or that it dumps core, is the cause of the fault."""
        if one.unfinished == "dumping":
            return is_root(one)
        step = self._nodes[one.node].steps.get(one.rank)
        own = None if step is None else step.at
        moved = self._lead.changed_at if self.input.in_lockstep else own
        if moved is not None and (moved - one.at).total_seconds() > WORDS_SLACK_S:
            return False  # it handled the exception
        if one.error is None:
            first = min(observation.at for observation, _ in self._faults)
            if (first - one.at).total_seconds() > WORDS_LIMIT_S:
                return False
        return names_failure(one.log_tail, catalog(), one.error)

    async def keep_reading_words(self, reach: Callable[[str], Backend]) -> None:
        """Ask for what ranks wrote that have not ended, while only consequences have arrived.

        Args:
            reach: Returns the backend of a node.
        """
        first = self.input.first_rank
        if first is not None and first >= self.input.world_size:
            return  # launchers, which report the ranks below them
        self._first_words = asyncio.Event()
        await self._gathering.wait()
        while True:
            await asyncio.sleep(WORDS_INTERVAL_S)
            asked = [
                node
                for node, view in self._nodes.items()
                if not self._all_exited(view) and view.silent_since is None
            ]
            await asyncio.gather(*(self._read_words(reach, node) for node in asked))
            if not self._first_words.is_set():
                self._first_words.set()
                self._news.set()

    async def _read_words(self, reach: Callable[[str], Backend], node: str) -> None:
        words = await read_last_words(reach, self.input.token, node)
        if words is not None:
            ranks = self._list_ranks()[node]
            self._unfinished[node] = tuple(one for one in words if one.words.rank in ranks)

    def _find_gather_end(self) -> float:
        """Return until when a root cause may still come, by CLOCK_MONOTONIC.

        A node that has not answered since the fault may be slow, and have the root: it is waited
        for, but no longer than a lease, before which its ranks cannot be replaced anyway. One whose
        first answer was late may need some seconds more for the exits. So is a rank that is ending
        and did not write why: its exit says it.
        """
        wait = CASCADE_GATHER_TIMEOUT_S + self.exit_delay
        limit = min(self.input.timeouts.lease, self.input.timeouts.lost_after).total_seconds()
        ends = [self._fault_at + wait]
        for view in self._nodes.values():
            if self._all_exited(view) or view.reported_lost:
                continue
            if view.answered_at < self._fault_at:
                ends.append(view.answered_at + limit)
            elif view.late_at >= self._fault_at:
                ends.append(view.late_at + wait)
        if any(is_root(one) for one in self._list_unfinished(only_ending=True)):
            ends.append(self._fault_at + limit)
        return max(ends)

    def _may_have_later_root(self) -> bool:
        """Return whether only secondary failures have arrived, and another rank may be the root."""
        if self._cancelled is not None or any(root for _, root in self._faults):
            return False
        is_whole_job = self.input.judges and not self.input.others
        return not (is_whole_job and all(map(self._all_exited, self._nodes.values())))

    def _make_fault(self) -> FaultObserved:
        # Put the node's own evidence (kernel lines) first: it outweighs what any program reports,
        # and must not be left out.
        ordered = sorted(
            self._faults,
            key=lambda each: (not getattr(each[0], "kernel", ()), not each[1], each[0].at),
        )
        sent = _cut_texts(
            MAX_TEXT_BYTES, tuple(observation for observation, _ in ordered[:MAX_OBSERVATIONS])
        )
        first = min(observation.at for observation, _ in self._faults)
        silent, unheard = self._list_silent(), self._list_lost()
        return FaultObserved(
            self.generation,
            sent,
            len(ordered) - len(sent),
            first,
            silent,
            unheard=unheard,
            finished=self._list_needed(),
        )

    def _list_needed(self) -> tuple[RankExited, ...]:
        """Return the ranks that exited with 0 and without which the others have not advanced."""
        advanced = self._pace.advanced_at
        needed = [
            one
            for view in self._nodes.values()
            for one in view.finished
            if advanced is None or (advanced - one.at).total_seconds() <= WENT_ON_S
        ]
        return tuple(sorted(needed, key=lambda one: (one.at, one.rank)))[:MAX_NAMED]

    def _list_silent(self) -> tuple[tuple[str, timedelta], ...]:
        """Return the nodes that were not heard lately and for how long.

        Nodes reported as lost are left out.
        """
        ages = {
            node: self._age(view)
            for node, view in self._nodes.items()
            if not view.reported_lost and self._is_stale(view)
        }
        return tuple(ages.items())[:MAX_NAMED]

    def _list_lost(self) -> tuple[tuple[str, timedelta], ...]:
        return tuple(
            (node, self._age(view)) for node, view in self._nodes.items() if view.reported_lost
        )

    def _age(self, view: NodeView) -> timedelta:
        """Return the time since a node was last heard, or since this watch began."""
        return timedelta(seconds=max(0.0, read_boot_clock() - view.last_heard))

    def _is_stale(self, view: NodeView) -> bool:
        return (
            view.misbehaves or self._age(view) > STALE_AFTER_BEATS * self.input.timeouts.heartbeat
        )

    def _all_succeeded(self) -> bool:
        return all(
            sum(view.exited.values()) == self.input.ranks_per_node for view in self._nodes.values()
        )

    def _all_exited(self, view: NodeView) -> bool:
        """Return whether no rank runs on a node any more.

        The exit of a launcher counts as that of its ranks.
        """
        return len(view.exited) >= self.input.ranks_per_node

    def _find_newly_lost(self) -> list[NodeUnreachable]:
        lost = []
        limit = self.input.timeouts.lost_after.total_seconds()
        for node, view in self._nodes.items():
            # Answers from another place are different news from silence, with a different remedy,
            # and are reported again.
            is_reported = view.reported_lost and view.is_elsewhere <= view.reported_elsewhere
            if (
                view.silent_since is not None
                and not is_reported
                and time.monotonic() - view.silent_since >= limit
            ):
                view.reported_lost, view.reported_elsewhere = True, view.is_elsewhere
                lost.append(
                    NodeUnreachable(
                        self.generation, node, self._age(view), view.reason, view.is_elsewhere
                    )
                )
        return lost

    def _find_step_to_report(self) -> StepReached | None:
        report_at = self.input.report_at_step
        if report_at is None or self._pace.highest is None or self._pace.highest < report_at:
            return None
        return StepReached(self.generation, self._pace.highest, self._reached_at)

    @property
    def _reached_at(self) -> datetime:
        """When training last advanced, as this attempt or the one before saw it."""
        own = self._pace.advanced_at or self._pace.started_at
        return own if self._reached_before is None else max(own, self._reached_before)

    def _find_hang(self) -> RanksHung | None:
        if any(self._nodes[node].silent_since is None for node in self._unspoken):
            return None  # it may be the one that reports steps
        if self.input.hang_known or not self._first_stamps.is_set():
            # Until a node reports, only the pace of the previous watch is known, and no watch ran
            # in between.
            return None
        self._follow_wall_clock()
        now = read_wall_clock()
        if all(self._is_stale(view) for view in self._nodes.values()):
            return None  # if no node is heard, none can be judged as hung
        steps = {
            rank: value
            for view in self._nodes.values()
            for rank, value in view.steps.items()
            if rank not in view.exited
        }
        rare = self._find_rare(steps)
        positions = {
            rank: value.counter.position for rank, value in steps.items() if rank not in rare
        }
        overdue = self._find_overdue(now)
        expected, lost = self._list_expected()
        hang = self._looks.judge(self._judged_pace(), overdue, expected, lost, positions, now)
        if hang is None:
            return None
        slowest = sorted(positions, key=lambda rank: (positions[rank], rank))
        ranks = dict.fromkeys((*(one.rank for one in hang.suspects), *slowest))
        return RanksHung(
            self.generation,
            tuple(ranks)[:MAX_NAMED],
            hang.reason,
            now,
            self._list_silent(),
            unheard=self._list_lost(),
            suspects=hang.suspects,
            groups=hang.groups,
            rule=hang.rule,
            is_cut_off=hang.is_cut_off,
        )

    def _find_slow(self) -> tuple[SlowNode, ...]:
        """Return nodes that are slow and were not reported yet; looked for once in a window."""
        if not self._step_times.close_window(time.monotonic()):
            return ()
        found = [one for one in self._step_times.find() if one.node not in self.input.slow]
        return tuple(found[:MAX_NAMED])

    def _find_overdue(self, now: datetime) -> Overdue | None:
        finished, pace = self._first_success, self._judged_pace()
        return find_overdue(pace, self.input.hang, now) or find_late_exit(
            None if finished is None else timedelta(seconds=time.monotonic() - finished),
            pace,
            self.input.timeouts.exit_barrier,
            now,
        )

    def _list_ranks(self) -> dict[str, range]:
        """Return the ranks of each node of the job; of this shard's nodes, if it does not judge."""
        count = self.input.training_ranks_per_node or self.input.ranks_per_node
        per_process = count // self.input.ranks_per_node
        first = 0
        if not self.input.judges and self.input.first_rank is not None:
            first = self.input.first_rank
            if per_process > 1:  # a launcher, numbered after all ranks
                first = (first - self.input.world_size) * count
        return {
            node: range(first + index * count, first + (index + 1) * count)
            for index, node in enumerate((*self._nodes, *self.input.others))
        }

    def _list_expected(self) -> tuple[list[int], list[int]]:
        """Return the ranks of the job that have not ended: first those whose node is not lost.

        What ranks do on a node that was not heard lately is not known, and soon will be.
        """
        expected: list[int] = []
        lost: list[int] = []
        for node, ranks in self._list_ranks().items():
            view = self._nodes.get(node)
            if view is None:
                expected += ranks
            elif not self._all_exited(view):
                kept = lost if view.reported_lost else expected
                kept += (rank for rank in ranks if rank not in view.exited)
        return expected, lost

    # --- looks at ranks that are late

    async def keep_looking(self, reach: Callable[[str], Backend]) -> None:
        """Look at the ranks while their step stays the same for long.

        Args:
            reach: Returns the backend of a node.
        """
        while True:
            self._follow_wall_clock()
            now = read_wall_clock()
            overdue = self._find_overdue(now)
            is_watched = self._first_stamps.is_set() and not self.input.hang_known
            if not is_watched or not self._looks.are_wanted(self._judged_pace(), overdue, now):
                await asyncio.sleep(self._tick)
                continue
            begun, advanced = time.monotonic(), self._advance_mark
            framed = self._looks.needs_frames(overdue)
            looks = await read_looks(reach, self.input.token, self._list_ranks(), framed=framed)
            if self._advance_mark == advanced:
                self._looks.add(looks, begun, framed=framed)
                self._news.set()
            until = begun + self._looks.interval
            while (left := until - time.monotonic()) > 0:
                await asyncio.sleep(min(left, self._tick))
                self._follow_wall_clock()
                if not framed and self._find_overdue(read_wall_clock()) is not None:
                    break  # the limit has passed in between: now stacks are needed

    # --- looks at checkpoints that no rank reports

    async def keep_reading_checkpoints(self, reach: Callable[[str], Backend]) -> None:
        """Look for new checkpoints in the folder that the job names, as long as the ranks run.

        They are only counted: a folder that is seen from outside does not prove that all ranks have
        finished (decision 42).

        Args:
            reach: Returns the backend of a node.
        """
        folder = self.input.checkpoints
        while folder is not None:
            await self._read_checkpoints(reach, folder)
            await asyncio.sleep(CHECKPOINT_INTERVAL_S)

    async def _read_checkpoints(
        self, reach: Callable[[str], Backend], folder: WatchedCheckpoints
    ) -> None:
        node = self.input.nodes[0]
        try:
            answer = await reach(node).checkpoints(
                node, folder.directory, folder.workdir, folder.pattern
            )
        except BackendError:
            return
        if isinstance(answer, Refusal) or answer["unreadable"] not in (None, NO_FOLDER):
            return
        now = datetime.now(UTC)
        newest = answer["newest"]
        self._recorder.note_seen_checkpoint(
            None if newest is None else newest["step"],
            timedelta(seconds=0.0 if newest is None else newest["age"]),
            now,
            is_reported=self._find_checkpoint() is not None,
        )

    def _make_report(self, *events: Event, all_succeeded: bool = False) -> WatchReport:
        seen: list[Event] = []
        if self._pace.highest is not None:
            seen.append(
                ProgressSeen(
                    self.generation,
                    self._pace.highest,
                    self._reached_at,
                    restarts=self._pace.restarts,
                    # Of several watches one reports them, that of the job's first node.
                    figures=self._recorder.figures if self.input.judges else None,
                )
            )
        # Always include the returns: decisions based on the other events must know that these nodes
        # are back.
        seen += (NodeReturned(self.generation, node) for node in self._returned)
        exited = {
            node: tuple(sorted(rank for rank, succeeded in view.exited.items() if succeeded))
            for node, view in self._nodes.items()
            if any(view.exited.values())
        }
        return WatchReport(
            (*seen, *events),
            {node: view.seq for node, view in self._nodes.items() if view.seq},
            exited,
            all_succeeded,
        )


def _find_missing(node: str, heartbeat: Mapping[str, Any]) -> MissingProgress | None:
    for rank, report in (heartbeat.get("progress") or {}).items():
        if isinstance(report, Mapping) and report.get("unreadable"):
            return MissingProgress(node, int(rank), unreadable=report["unreadable"][:MAX_REASON])
    if (printed := heartbeat.get("unmatched")) is not None:
        return MissingProgress(node, printed["rank"], tuple(printed["lines"]))
    return None


def _cut_texts(limit: int, observations: tuple[Observation, ...]) -> tuple[Observation, ...]:
    """Cut texts so that all observations together have at most `limit` bytes.

    The last lines and the earliest root have precedence. What many echoes say alike is sent once.
    """
    left, sent, echoes = limit, [], set[tuple[str, ...]]()
    for index, one in enumerate(observations):
        if isinstance(one, RankExited | RanksVanished):
            left -= sum(map(_count_bytes, one.kernel))
            if left < 0:
                one = replace(one, kernel=(), kernel_unreadable=TOO_LONG)  # noqa: PLW2901
        if isinstance(one, RankExited):
            if one.error is not None:
                left -= _count_bytes(one.error.message) + _count_bytes(one.error.traceback)
                if left < 0:
                    error = replace(one.error, message=one.error.message[:200], traceback="")
                    one = replace(one, error=error)  # noqa: PLW2901
            is_echo = one.failed and not one.stopped and not is_root(one)
            lines = one.log_tail if index == 0 or is_root(one) else ()
            if is_echo and (last := one.log_tail[-ECHO_LINES:]) not in echoes:
                echoes.add(last)
                lines = lines or last
            tail: list[str] = []
            for line in reversed(lines):
                left -= _count_bytes(line)
                if left < 0:
                    break
                tail.insert(0, line)
            one = replace(one, log_tail=tuple(tail))  # noqa: PLW2901
            # Without its lines it would seem to have ended by itself, before the root.
            one = replace(one, echo=is_echo and is_root(one))  # noqa: PLW2901
        sent.append(one)
    return tuple(sent)


def _count_bytes(text: str) -> int:
    return len(json.dumps(text, ensure_ascii=False).encode(errors="replace"))
