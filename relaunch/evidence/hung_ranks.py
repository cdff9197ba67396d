"""Judge from several looks at ranks whether any of them works, and name the one that holds up all.

Looks are taken only while training is late (`relaunch.job.hang`). A rank that cannot be seen is
never taken for one that does nothing: what cannot be proven is left to `hang.at_most`.

Why the rules are what they are: a rank that evaluates, saves, uploads or compiles while the others
wait for it shows CPU, reads and writes, other processes or another stack. Waits of NCCL and gloo
spin, so CPU in a collective shows nothing. What waits for something outside of the job (a remote
service, a full file server) shows nothing either and may end well, so an idle rank is believed for
minutes, and one that sleeps by a timer is never judged by its stillness alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from relaunch.evidence.stacks import (
    HungRank,
    ProcessLook,
    RankLook,
    StackGroup,
    describe_rank,
    find_wait,
    group_stacks,
    make_signature,
)
from relaunch.text import count_noun, join_clauses, printable

STOPPED_LOOKS = 3
"""Looks in a row that find a process in state T. A debugger that attaches (state t) is not that."""
BLOCKED_LOOKS = 21
"""Looks in a row that find a rank in state D with the same counters: five minutes by default.

A hard NFS mount waits out the grace period of a server that restarts (90 s), and a checkpoint of
60 GB that is flushed at 200 MB/s at the end of a write is in state D for as long, with some ticks
of CPU. A thread that keeps time (NCCL's watchdog) ticks as well: then only the limit decides.
"""
ODD_LOOKS = 13
"""Looks in a row in which a rank that all others wait for does nothing: three minutes by default.

Requests to a remote service end or time out within one or two.
"""
CUT_OFF_LOOKS = 21
"""Looks in a row that find connections between ranks on which nothing is acknowledged, while no
rank works: five minutes by default. TCP itself goes on for 15 (Linux, tcp_retries2) and continues
where it was if the line comes back: most switches start again within these five.
"""
STILL_LOOKS = 4
"""Looks in a row in which no rank works, which make a learned limit count."""
WORK_CPU = 0.02
"""CPUs that one of a rank's processes uses, above which it works. A rank that idles in a
collective uses 0.001; an upload with TLS uses 0.01 for each MB/s."""
WORK_IO = 32 * 1024
"""Bytes a second that they read and write, above which it works. A monitor that a program starts
reads some KB/s of /proc."""
TICKS_S = 0.03
"""Seconds of CPU that are nothing in the shortest time: the kernel counts a process's in ticks of
0.01."""
IDLE_CPU, IDLE_IO = 0.01, 4 * 1024
"""At most so much is nothing, where a rank is accused before the limit."""
SLEEP = "nanosleep"
"""In the name of the kernel's function in which a thread sleeps by a timer. It will wake up."""
MAX_SUSPECTS, MAX_GROUPS, MAX_STACKS, MAX_STACK = 16, 16, 2, 16
MAX_LINE = 240

Rule = str
RULES = ("stopped", "blocked", "missing_rank", "odd_one_out", "cut_off")
"""What decides before the limit, in the order of precedence."""


@dataclass(frozen=True, slots=True)
class RankStreak:
    """The newest look at a rank, and for how many looks in a row something has held."""

    look: RankLook
    at: float
    """Seconds by the watcher's clock."""
    framed: bool
    """Whether Python stacks were asked for."""
    stopped: int = 0
    blocked: int = 0
    idle: int = 0
    """Nearly no CPU and I/O, the same processes."""
    quiet: int = 0
    """Idle, with the same stacks of all threads, not in a sleep, and no thread blocked in the
    kernel: that one writes or reads, perhaps slowly."""
    still: int = 0
    """No work, as far as CPU, I/O and stacks show."""
    cut_off: int = 0
    """A connection of it on which nothing is acknowledged."""


@dataclass(frozen=True, slots=True)
class MissingRanks:
    """Ranks that have not entered a collective in which the others wait, by their own records."""

    ranks: tuple[int, ...]
    reason: str
    """A clause: `rank 3 has not entered all_reduce #288686`."""
    is_certain: bool = False
    """Whether the record alone shows a deadlock: the ranks' collectives differ. A rank that is only
    missing may be about to come, from an evaluation that it does alone."""


@dataclass(frozen=True, slots=True)
class HangFinding:
    """A hang that is certain before the limit."""

    rule: Rule
    suspects: tuple[HungRank, ...]
    reason: str


def follow_ranks(
    before: Mapping[int, RankStreak], looks: Iterable[RankLook], at: float, *, framed: bool
) -> dict[int, RankStreak]:
    """Return the streaks with one more look at the ranks.

    Args:
        before: The streaks so far. Ranks that this look does not see are left out.
        looks: One look at each rank.
        at: When it was taken, in seconds by the watcher's clock.
        framed: Whether Python stacks were asked for.
    """
    return {look.rank: _follow(before.get(look.rank), look, at, framed) for look in looks}


def _follow(before: RankStreak | None, look: RankLook, at: float, framed: bool) -> RankStreak:
    if look.unreadable:
        return RankStreak(look, at, framed)
    has_stopped = any(one.state == "T" for one in look.processes)
    is_blocked = any(one.state == "D" or one.blocked for one in look.processes)
    is_cut_off = bool(look.stuck)
    first = RankStreak(
        look, at, framed, int(has_stopped), int(is_blocked), 1, 1, 1, int(is_cut_off)
    )
    if before is None or before.look.unreadable or at <= before.at:
        return first
    seconds = at - before.at
    if is_cut_off:
        first = replace(first, cut_off=before.cut_off + 1)
    mine, theirs = _by_pid(look), _by_pid(before.look)
    if mine.keys() != theirs.keys():
        return first  # a child that began or ended is work
    cpu = sum(max(0.0, one.cpu_s - theirs[pid].cpu_s) for pid, one in mine.items())
    io = sum(max(0, one.io_bytes - theirs[pid].io_bytes) for pid, one in mine.items())
    io = max(0, io - before.look.dumped_bytes)
    is_idle = cpu <= IDLE_CPU * seconds + TICKS_S and io <= IDLE_IO * seconds
    both = framed and before.framed
    pairs = [(theirs[pid], one) for pid, one in mine.items()]
    is_still = io <= WORK_IO * seconds and not any(_works(*pair, seconds) for pair in pairs)
    is_quiet = (
        is_idle
        and bool(look.frames)
        and SLEEP not in look.main.wchan
        and not is_blocked
        and all(old.threads == new.threads for old, new in pairs)
    )
    return RankStreak(
        look,
        at,
        framed,
        before.stopped + 1
        if has_stopped and (is_idle or look.main.state == "T")
        else first.stopped,
        before.blocked + 1 if is_blocked and not cpu and not io else first.blocked,
        before.idle + 1 if is_idle else 1,
        before.quiet + 1 if both and is_quiet else 1,
        before.still + 1 if both and is_still else 1,
        first.cut_off,
    )


def _by_pid(look: RankLook) -> dict[int, ProcessLook]:
    return {one.pid: one for one in look.processes if one.state != "Z"}


def _works(before: ProcessLook, now: ProcessLook, seconds: float) -> bool:
    """Return whether a process did work between two looks, not counting what it read and wrote."""
    burns = now.cpu_s - before.cpu_s > WORK_CPU * seconds + TICKS_S
    if not now.frames or not before.frames:
        return burns
    if now.frames != before.frames and make_signature(now.frames) != make_signature(before.frames):
        return True
    return burns and find_wait(now.frames) is None and now.threads != before.threads


def is_any_idle(streaks: Mapping[int, RankStreak]) -> bool:
    """Return whether a rank does so little that its stack is worth reading."""
    return any(
        one.idle > 1 or one.stopped or one.blocked or one.look.unreadable
        for one in streaks.values()
    )


def is_standstill(streaks: Mapping[int, RankStreak], expected: Collection[int]) -> bool:
    """Return whether it is proven that no rank works: each of the expected ones was seen."""
    return bool(expected) and all(
        rank in streaks and streaks[rank].still >= STILL_LOOKS for rank in expected
    )


def find_hung_ranks(
    streaks: Mapping[int, RankStreak],
    expected: Collection[int],
    rules: Mapping[str, bool],
    missing: MissingRanks | None = None,
) -> HangFinding | None:
    """Return the hang that is certain before the limit, or None.

    Args:
        streaks: The looks at the ranks while the step did not change.
        expected: All ranks of the job that have not ended, also those that were not seen.
        rules: Which of `RULES` apply; one that is left out does.
        missing: Who did not enter a collective, by the ranks' own records.
    """
    found = {
        "stopped": lambda: _find_stopped(streaks),
        "blocked": lambda: _find_blocked(streaks),
        "missing_rank": lambda: _find_missing(streaks, missing),
        "odd_one_out": lambda: _find_odd_one(streaks, expected),
        "cut_off": lambda: _find_unreached(streaks, expected),
    }
    findings = (found[rule]() for rule in RULES if rules.get(rule, True))
    return next((one for one in findings if one is not None), None)


def _find_stopped(streaks: Mapping[int, RankStreak]) -> HangFinding | None:
    looks = [one.look for one in streaks.values() if one.stopped >= STOPPED_LOOKS]
    clause = f"in {STOPPED_LOOKS} looks in a row"
    return _make_finding("stopped", looks, clause) if looks else None


def _find_blocked(streaks: Mapping[int, RankStreak]) -> HangFinding | None:
    looks = [one.look for one in streaks.values() if one.blocked >= BLOCKED_LOOKS]
    clause = f"blocked in the kernel in {BLOCKED_LOOKS} looks in a row, and nothing changes"
    return _make_finding("blocked", looks, clause) if looks else None


def _find_missing(
    streaks: Mapping[int, RankStreak], missing: MissingRanks | None
) -> HangFinding | None:
    if missing is None:
        return None
    found = [streaks[rank] for rank in missing.ranks if rank in streaks]
    if missing.is_certain:
        is_hang = all(one.still >= STILL_LOOKS for one in found)
    else:
        is_hang = all(one.quiet >= ODD_LOOKS for one in found)
    if not found or not is_hang:
        return None
    return _make_finding("missing_rank", [one.look for one in found], missing.reason)


def _find_odd_one(
    streaks: Mapping[int, RankStreak], expected: Collection[int]
) -> HangFinding | None:
    if len(expected) < 2 or any(rank not in streaks for rank in expected):
        return None
    operations = _count_operations(streaks[rank].look for rank in expected)
    if not operations:
        return None
    operation, count = operations.most_common(1)[0]
    # Of a node with eight ranks one may hold up the others in turn.
    if not 1 <= len(expected) - count <= max(1, len(expected) // 8):
        return None
    odd = []
    for rank in expected:
        one = streaks[rank]
        wait = find_wait(one.look.frames)
        is_odd = wait is None or wait.operation != operation
        if (one.quiet if is_odd else one.still) < ODD_LOOKS:
            return None
        if is_odd and wait is not None and 2 * count <= len(expected):
            return None  # of two ranks in two collectives either may be in the wrong one
        if is_odd:
            odd.append(one)
    waiting = [streaks[rank].look for rank in expected if streaks[rank] not in odd]
    return _make_finding("odd_one_out", [one.look for one in odd], _describe_wait(waiting, "other"))


def _find_unreached(
    streaks: Mapping[int, RankStreak], expected: Collection[int]
) -> HangFinding | None:
    if not is_standstill(streaks, expected):
        return None
    for_long = [
        one.look if one.cut_off >= CUT_OFF_LOOKS else replace(one.look, stuck=())
        for one in streaks.values()
    ]
    cut_off, silence = _find_cut_off(for_long)
    if not silence:
        return None
    if cut_off:
        return _make_finding("cut_off", cut_off, silence)
    waiting = _describe_wait([one for one in for_long if find_wait(one.frames)], "rank")
    return HangFinding("cut_off", (), "; ".join(filter(None, (waiting, silence))))


def is_any_cut_off(streaks: Mapping[int, RankStreak]) -> bool:
    """Return whether nothing is acknowledged on a connection between two ranks."""
    return bool(_find_cut_off([one.look for one in streaks.values()])[1])


def _make_finding(rule: Rule, looks: Sequence[RankLook], clause: str) -> HangFinding:
    return HangFinding(rule, _accuse(looks), f"{_describe(looks)}; {clause}")


def _accuse(looks: Iterable[RankLook]) -> tuple[HungRank, ...]:
    listed = sorted(looks, key=lambda one: one.rank)[:MAX_SUSPECTS]
    return tuple(
        HungRank(
            look.rank,
            look.node,
            describe_rank(look),
            tuple(printable(str(frame), MAX_LINE) for frame in look.frames[:MAX_STACK])
            if index < MAX_STACKS
            else (),
        )
        for index, look in enumerate(listed)
    )


def _describe(accused: Iterable[RankLook]) -> str:
    """Return who is where: `rank 63 on n8 is in __next__ (…), called from train (train.py:88)`."""
    return join_clauses([group.sentence for group in group_stacks(accused)])


def name_suspects(
    streaks: Mapping[int, RankStreak],
    missing: MissingRanks | None = None,
    positions: Mapping[int, int] | None = None,
) -> tuple[tuple[HungRank, ...], str]:
    """Return the ranks that hold up the others, as far as that shows, and a sentence about it.

    None are named where it does not show: where as many are at one place as at another.

    Args:
        streaks: The newest looks at all ranks of the job.
        missing: Who did not enter a collective, by the ranks' own records.
        positions: How far ranks have come, of those that report it.
    """
    looks = [one.look for _, one in sorted(streaks.items())]
    if not looks:
        return (), ""
    read = [one for one in looks if one.frames]
    waiting = [one for one in read if find_wait(one.frames) is not None]
    if missing is not None and (found := [one for one in looks if one.rank in missing.ranks]):
        return _accuse(found), f"{_describe(found)}; {missing.reason}"
    cut_off, silence = _find_cut_off(looks)
    if cut_off:
        return _accuse(cut_off), f"{_describe(cut_off)}; {silence}"
    outside = [one for one in looks if one not in waiting]
    is_plain = 2 * len(waiting) > len(looks) or (bool(waiting) and len(outside) == 1)
    for accused in (
        [one for one in looks if any(process.state == "T" for process in one.processes)],
        [one.look for one in streaks.values() if one.blocked >= STOPPED_LOOKS],
        outside if is_plain else [],  # those for which the others wait
        _find_other_operation(waiting, len(looks)),
        _find_minority(group_stacks(waiting), len(looks), waits=True),
        [] if waiting else _find_minority(group_stacks(read), len(looks), waits=False),
        _find_behind(looks, positions or {}),
    ):
        if 0 < len(accused) < len(looks):
            named = {one.rank for one in accused}
            others = _describe_wait([one for one in waiting if one.rank not in named], "other")
            return _accuse(accused), "; ".join(filter(None, (_describe(accused), others)))
    return (), "; ".join(filter(None, (_describe_wait(waiting, "rank"), silence)))


def _find_cut_off(looks: Sequence[RankLook]) -> tuple[list[RankLook], str]:
    """Return the ranks at the address that is at one end of all stuck connections, and a clause.

    With a single pair of addresses either end may be the one that is cut off: none is returned.
    Connections to what is no rank of the job, such as a file store, do not count.
    """
    owners: dict[str, list[RankLook]] = {}
    for look in looks:
        for address in look.addresses:
            owners.setdefault(address, []).append(look)
    pairs = {
        frozenset((one.local, one.remote))
        for look in looks
        for one in look.stuck
        if one.local != one.remote and one.local in owners and one.remote in owners
    }
    if not pairs:
        return [], ""
    common = frozenset.intersection(*pairs)
    if len(common) == 1:
        (address,) = common
        others = count_noun(len(pairs), "other address", "other addresses")
        return owners[address], f"no packet passes between {address} and {others}"
    one, other = sorted(min(pairs, key=sorted))
    more = (
        f" and {count_noun(len(pairs) - 1, 'other pair')}"
        if pairs - {frozenset((one, other))}
        else ""
    )
    return [], f"no packet passes between {one} and {other}{more}"


def _describe_wait(waiting: Sequence[RankLook], noun: str) -> str:
    """Return a clause about the operation in which most wait: `63 others wait in all_reduce`."""
    counts = _count_operations(waiting)
    if not counts:
        return ""
    operation, count = counts.most_common(1)[0]
    return f"{count_noun(count, noun)} {'wait' if count > 1 else 'waits'} in {operation}"


def _count_operations(waiting: Iterable[RankLook]) -> Counter[str]:
    waits = (find_wait(one.frames) for one in waiting)
    return Counter(wait.operation for wait in waits if wait is not None)


def _find_other_operation(waiting: Sequence[RankLook], total: int) -> list[RankLook]:
    """Return the ranks that wait in another collective than most: they were called in another
    order."""
    most = [each for each, count in _count_operations(waiting).items() if 2 * count > total]
    if len(waiting) < total or not most:
        return []
    return [
        one
        for one in waiting
        if (wait := find_wait(one.frames)) is not None and wait.operation != most[0]
    ]


def _find_minority(groups: Sequence[StackGroup], total: int, *, waits: bool) -> list[RankLook]:
    """Return the ranks that are at other places than most.

    Where no rank is in a known wait, most have to be three quarters: the GPU's queue may hold up
    the ranks of one program at several lines.
    """
    if not groups or sum(len(one.looks) for one in groups) < total:
        return []
    widest = len(groups[0].looks)
    if 2 * widest <= total or (not waits and 4 * widest < 3 * total):
        return []
    return [look for group in groups[1:] for look in group.looks]


def _find_behind(looks: Sequence[RankLook], positions: Mapping[int, int]) -> list[RankLook]:
    """Return the ranks that have come less far than most."""
    known = [positions[one.rank] for one in looks if one.rank in positions]
    if len(known) < len(looks) or 2 * known.count(max(known)) <= len(looks):
        return []
    return [one for one in looks if positions[one.rank] < max(known)]


def list_groups(looks: Iterable[RankLook]) -> tuple[str, ...]:
    """Return the groups of ranks as lines for people, the widest first."""
    groups = group_stacks(looks)
    lines = [printable(str(one), MAX_LINE) for one in groups[:MAX_GROUPS]]
    if len(groups) > MAX_GROUPS:
        lines[-1] = f"and {len(groups) - MAX_GROUPS + 1} more groups"
    return tuple(lines)
