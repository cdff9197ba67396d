"""Which ranks hang, and which only take long, by what several looks at them show."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.evidence.hung_ranks import (
    BLOCKED_LOOKS,
    CUT_OFF_LOOKS,
    MAX_GROUPS,
    ODD_LOOKS,
    RULES,
    STILL_LOOKS,
    STOPPED_LOOKS,
    HangFinding,
    MissingRanks,
    RankStreak,
    find_hung_ranks,
    follow_ranks,
    is_any_cut_off,
    is_any_idle,
    is_standstill,
    list_groups,
    name_suspects,
)
from relaunch.evidence.stacks import (
    Frame,
    ProcessLook,
    RankLook,
    StuckConnection,
    ThreadStack,
    describe_rank,
    describe_stack,
    find_wait,
    group_stacks,
    read_rank_looks,
)
from relaunch.job.hang import Pace, advance, find_overdue, is_late
from relaunch.spec.policy import HangLimits
from tests.pages import sections
from tests.recovery.builders import T0, at

SITE = "/usr/lib/python3/dist-packages/"
C10D = f"{SITE}torch/distributed/distributed_c10d.py"
TRAIN = Frame("train", "/home/u/train.py", 90)


def stack(*rows: tuple[str, str, int]) -> tuple[Frame, ...]:
    return tuple(Frame(*row) for row in rows)


def collective(name: str, line: int = 3252) -> tuple[Frame, ...]:
    wrapper = Frame("_logger.<locals>.wrapper", f"{SITE}torch/distributed/c10d_logger.py", 83)
    return (Frame(name, C10D, line), wrapper, TRAIN)


ALL_REDUCE = collective("all_reduce")
LOADER = (
    *stack(
        ("_PollLikeSelector.select", "/usr/lib/python3.11/selectors.py", 415),
        ("Queue.get", "/usr/lib/python3.11/multiprocessing/queues.py", 113),
        ("_Iter._next_data", f"{SITE}torch/utils/data/dataloader.py", 1505),
        ("_BaseDataLoaderIter.__next__", f"{SITE}torch/utils/data/dataloader.py", 725),
    ),
    replace(TRAIN, line=88),
)
BACKWARD = (
    *stack(
        ("_engine_run_backward", f"{SITE}torch/autograd/graph.py", 979),
        ("Tensor.backward", f"{SITE}torch/_tensor.py", 623),
    ),
    TRAIN,
)
FORWARD = (
    *stack(
        ("linear", f"{SITE}torch/nn/modules/linear.py", 9),
        ("Module._call_impl", f"{SITE}torch/nn/modules/module.py", 7),
    ),
    TRAIN,
)
EVALUATION = stack(("score", "/home/u/evaluate.py", 4), ("main", "/home/u/train.py", 70))


def process(
    frames: Sequence[Frame] = (), pid: int = 7, others: Sequence[ThreadStack] = (), **known: Any
) -> ProcessLook:
    threads = (ThreadStack("MainThread", tuple(frames)), *others) if frames else ()
    return ProcessLook(pid, threads=threads, **{"wchan": "futex_do_wait", **known})


def rank(number: int, frames: Sequence[Frame] = (), *below: ProcessLook, **known: Any) -> RankLook:
    return RankLook(number, f"n{number // 2 + 1}", (process(frames, **known), *below))


Scene = Callable[[int], Iterable[RankLook]]


def watch(
    scene: Scene, looks: int, *, framed: bool = True, seconds: float = 15.0
) -> dict[int, RankStreak]:
    streaks: dict[int, RankStreak] = {}
    for index in range(looks):
        streaks = follow_ranks(streaks, scene(index), index * seconds, framed=framed)
    return streaks


def find(scene: Scene, looks: int, ranks: int = 4, **known: Any) -> HangFinding | None:
    return find_hung_ranks(watch(scene, looks), range(ranks), known.pop("rules", {}), **known)


def waiting(*besides: RankLook, count: int = 4) -> list[RankLook]:
    """All other ranks wait in all_reduce and spin, as NCCL does."""
    found = {one.rank: one for one in besides}
    return [found.get(number, rank(number, ALL_REDUCE)) for number in range(count)]


# --- where a rank is


@pytest.mark.parametrize(
    ("frames", "operation"),
    [
        (ALL_REDUCE, "all_reduce"),
        (BACKWARD, "backward"),
        ((Frame("hook", "/home/u/hooks.py", 3), *BACKWARD), None),
        ((*FORWARD[:2], *BACKWARD), None),
        ((Frame("handler", "/home/u/train.py", 3), *ALL_REDUCE), None),
        (LOADER, None),
        ((), None),
        (stack(("wait_for_everyone", f"{SITE}accelerate/state.py", 1)), "wait_for_everyone"),
        (stack(("main", f"{SITE}accelerate/state.py", 1)), None),
    ],
)
def test_a_wait_is_known_by_its_functions(frames: Sequence[Frame], operation: str | None) -> None:
    wait = find_wait(frames)
    assert (wait and wait.operation) == operation


def test_a_place_is_one_line(page: SnapshotAssertion) -> None:
    stacks = (ALL_REDUCE, BACKWARD, LOADER, FORWARD, EVALUATION)
    assert "\n".join(map(describe_stack, stacks)) == page


def test_files_of_libraries_are_known_however_they_are_written() -> None:
    full = Frame("f", f"{SITE}torch/x.py", 1)
    assert full.is_library and full.short_file == "torch/x.py"
    for file in ("torch/x.py", "selectors.py", "<frozen importlib>", "/usr/lib64/python3.12/os.py"):
        assert Frame("f", file, 1).is_library, file
    for file in ("train.py", "/home/u/train.py"):
        assert not Frame("f", file, 1).is_library
        assert Frame("f", file, 1).short_file == "train.py"


def test_lines_of_a_wait_do_not_split_a_group_and_others_do() -> None:
    looks = [rank(0, ALL_REDUCE), rank(1, collective("all_reduce", 9)), rank(2, LOADER)]
    assert [one.ranks for one in group_stacks(looks)] == [(0, 1), (2,)]
    further = rank(3, (replace(EVALUATION[0], line=5), EVALUATION[1]))
    assert len(group_stacks([rank(2, EVALUATION), further])) == 2


ODD = {
    "loader": rank(3, LOADER),
    "stopped": rank(3, LOADER, state="T"),
    "stopped, no stack": rank(3, state="T"),
    "stopped child": rank(3, LOADER, process(pid=9, state="T")),
    "blocked": rank(3, EVALUATION, state="D"),
    "no stack": rank(3),
    "running": rank(3, state="R", wchan=""),
    "unread": RankLook(3, "n2", unreadable="the rank does not run"),
}


def test_groups_are_listed_with_the_widest_first(page: SnapshotAssertion) -> None:
    shown = {}
    for name, odd in ODD.items():
        suspects, reason = name_suspects(watch(lambda _, odd=odd: waiting(odd), 3))
        assert [one.rank for one in suspects] == [3]
        shown[name] = [reason, *list_groups(waiting(odd))]
    assert sections(shown) == page


def test_ranks_that_cannot_be_read_are_one_group() -> None:
    gone = [RankLook(number, "n1", unreadable="the rank does not run") for number in range(2)]
    assert list_groups(gone) == ("ranks 0-1 on n1 (2): cannot be read: the rank does not run",)


def test_many_groups_are_counted() -> None:
    looks = [rank(number, (replace(TRAIN, line=number),)) for number in range(MAX_GROUPS + 3)]
    lines = list_groups(looks)
    assert len(lines) == MAX_GROUPS and "4 more" in lines[-1]


def test_several_ranks_at_one_place_read_as_one(page: SnapshotAssertion) -> None:
    odd = [rank(6, LOADER), rank(7, LOADER)]
    _, reason = name_suspects(watch(lambda _: waiting(*odd, count=8), 1))
    assert reason == page


# --- what a node answers

PROCESS = {
    "pid": 7,
    "parent": 1,
    "rank": 3,
    "command": "python train.py",
    "state": "S",
    "blocked": 0,
    "cpu_s": 1.5,
    "read_bytes": 3,
    "written_bytes": None,
    "wchan": "0",
    "threads": [{"tid": 7, "name": "MainThread", "frames": [["f", "train.py", 3]]}],
    "unreadable": None,
}


def test_an_answer_is_read_by_rank() -> None:
    rows = [
        {"rank": 3, "pid": 7, "processes": [PROCESS], "unreadable": None, "flight": {"last": []}},
        {"rank": 2, "pid": None, "processes": [], "unreadable": "the rank does not run"},
    ]
    gone, found = read_rank_looks("n1", rows)
    assert (gone.rank, gone.unreadable, gone.frames) == (2, "the rank does not run", ())
    assert found.main.io_bytes == 3 and found.main.wchan == "" and found.flight == {"last": []}
    assert found.frames == (Frame("f", "train.py", 3),)


def test_ranks_below_a_launcher_are_ranks() -> None:
    below = [{**PROCESS, "pid": 8, "rank": 0}, {**PROCESS, "pid": 9, "rank": 1}]
    worker = {**PROCESS, "pid": 10, "rank": 1}
    row = {"rank": 16, "processes": [{**PROCESS, "rank": None}, *below, worker]}
    looks = read_rank_looks("n1", [row])
    assert [(one.rank, [p.pid for p in one.processes]) for one in looks] == [(0, [8]), (1, [9, 10])]
    alone = read_rank_looks("n1", [{"rank": 16, "processes": [{**PROCESS, "rank": None}]}])
    assert [one.rank for one in alone] == [16]
    rank_itself = read_rank_looks("n1", [{"rank": 3, "processes": [PROCESS, worker]}])
    assert [one.rank for one in rank_itself] == [3]


# --- what decides before the limit


def idle(odd: RankLook) -> Scene:
    """One rank is as it is, the others wait and spin."""

    def scene(index: int) -> list[RankLook]:
        spinning = [rank(n, collective("all_reduce", index), cpu_s=15.0 * index) for n in range(3)]
        return [*spinning, odd]

    return scene


def test_the_odd_one_out_is_a_hang_once_it_has_done_nothing() -> None:
    scene = idle(rank(3, LOADER))
    assert find(scene, ODD_LOOKS - 1) is None
    found = find(scene, ODD_LOOKS)
    assert found is not None and found.rule == "odd_one_out"
    assert [(one.rank, one.node) for one in found.suspects] == [(3, "n2")]
    assert "3 others wait in all_reduce" in found.reason
    assert found.suspects[0].frames[0].startswith("select")
    assert find(scene, ODD_LOOKS, ranks=5) is None, "one was not seen"
    assert find(scene, ODD_LOOKS, rules={"odd_one_out": False}) is None
    assert find(lambda _: [rank(0, LOADER)], ODD_LOOKS, ranks=1) is None
    assert find(lambda _: [rank(n, LOADER) for n in range(4)], ODD_LOOKS) is None, "none waits"


@pytest.mark.parametrize(("told", "is_hang"), [(230_000, True), (None, False), ("many", False)])
def test_what_a_rank_dumps_because_it_is_asked_is_no_work(told: object, is_hang: bool) -> None:
    """A whole record of 2,000 entries at each look, as torch writes it."""

    def scene(index: int) -> list[RankLook]:
        dumped = {"flight": {"at": 1.0, "last": [], "bytes": told}}
        odd = replace(rank(3, LOADER, io_bytes=230_000 * index), **dumped)
        return [*waiting(count=3), odd]

    assert (find(scene, ODD_LOOKS) is not None) is is_hang


def test_one_of_8_may_be_odd_and_a_quarter_not() -> None:
    def scene(index: int) -> list[RankLook]:
        return waiting(*(rank(n, LOADER) for n in odd), count=16)

    odd = (3, 4)
    assert find(scene, ODD_LOOKS, ranks=16) is not None
    odd = (3, 4, 5)
    assert find(scene, ODD_LOOKS, ranks=16) is None
    odd = ()
    assert find(scene, ODD_LOOKS, ranks=16) is None


def test_a_rank_in_another_collective_is_the_odd_one_out() -> None:
    found = find(idle(rank(3, collective("broadcast"))), ODD_LOOKS)
    assert found is not None and [one.rank for one in found.suspects] == [3]
    pair = [rank(0, collective("all_reduce")), rank(1, collective("broadcast"))]
    assert find(lambda _: pair, ODD_LOOKS, ranks=2) is None, "either may be wrong"


def test_ranks_in_two_collectives_are_left_to_the_limit() -> None:
    looks = waiting(rank(2, collective("barrier")), rank(3, LOADER))
    assert find(lambda _: looks, ODD_LOOKS) is None


def test_others_that_are_not_in_one_place_prove_nothing() -> None:
    def scene(index: int) -> list[RankLook]:
        return waiting(rank(0, collective("all_reduce"), cpu_s=0.0), rank(3, LOADER))

    def moving(index: int) -> list[RankLook]:
        line = replace(TRAIN, line=index)
        return waiting(rank(0, (*ALL_REDUCE[:-1], line)), rank(3, LOADER))

    assert find(scene, ODD_LOOKS) is not None
    assert find(moving, ODD_LOOKS) is None


def grow(index: int) -> Sequence[Frame]:
    return (replace(EVALUATION[0], line=index), *EVALUATION[1:])


BUSY: dict[str, Callable[[int], RankLook]] = {
    "its stack changes": lambda i: rank(3, grow(i)),
    "another thread's does": lambda i: rank(
        3, LOADER, others=(ThreadStack("upload", tuple(grow(i))),)
    ),
    "it computes in one operation": lambda i: rank(3, EVALUATION, cpu_s=15.0 * i),
    "it reads": lambda i: rank(3, EVALUATION, io_bytes=10**6 * i),
    "a child computes": lambda i: rank(3, EVALUATION, process(pid=9, cpu_s=15.0 * i)),
    "a child writes": lambda i: rank(3, EVALUATION, process(pid=9, io_bytes=10**6 * i)),
    "children come and go": lambda i: rank(3, EVALUATION, process(pid=9 + i)),
    "it sleeps": lambda i: rank(3, EVALUATION, wchan="hrtimer_nanosleep"),
    "its stack cannot be read": lambda i: rank(3),
    "a debugger has it": lambda i: rank(3, (), state="t"),
    "it flushes": lambda i: rank(3, EVALUATION, state="D", cpu_s=0.01 * i),
    "it cannot be seen": lambda i: RankLook(3, "n2", unreadable="no answer"),
}


@pytest.mark.parametrize("busy", BUSY.values(), ids=list(BUSY))
def test_a_rank_that_may_work_is_never_accused_early(busy: Callable[[int], RankLook]) -> None:
    def scene(index: int) -> list[RankLook]:
        return waiting(busy(index))

    assert find(scene, 2 * BLOCKED_LOOKS) is None


def test_a_zombie_is_no_child_that_came_or_went() -> None:
    def scene(index: int) -> list[RankLook]:
        return waiting(rank(3, LOADER, process(pid=9 + index, state="Z")))

    assert find(scene, ODD_LOOKS) is not None


@pytest.mark.parametrize(
    "odd", [rank(3, EVALUATION, state="T"), rank(3, LOADER, process(pid=9, state="T"))]
)
def test_a_stopped_process_is_a_hang_within_seconds(odd: RankLook) -> None:
    assert find(idle(odd), STOPPED_LOOKS - 1) is None
    found = find(idle(odd), STOPPED_LOOKS)
    assert found is not None and (found.rule, found.suspects[0].rank) == ("stopped", 3)
    assert find(idle(odd), STOPPED_LOOKS, rules={"stopped": False}) is None


def test_a_stopped_child_of_a_rank_that_works_is_none() -> None:
    def scene(index: int) -> list[RankLook]:
        return waiting(rank(3, LOADER, process(pid=9, state="T"), cpu_s=15.0 * index))

    assert find(scene, BLOCKED_LOOKS) is None


@pytest.mark.parametrize("known", [{"state": "D"}, {"blocked": 1}])
def test_a_rank_blocked_for_minutes_is_a_hang(known: dict[str, Any]) -> None:
    scene = idle(rank(3, EVALUATION, **known))
    rules = {"odd_one_out": False}
    assert find(scene, BLOCKED_LOOKS - 1, rules=rules) is None
    found = find(scene, BLOCKED_LOOKS, rules=rules)
    assert found is not None and (found.rule, found.suspects[0].rank) == ("blocked", 3)
    assert find(scene, BLOCKED_LOOKS, rules={**rules, "blocked": False}) is None


def test_a_record_that_shows_who_is_missing_decides() -> None:
    missing = MissingRanks((3,), "rank 3 has not entered all_reduce #288686")
    scene = idle(rank(3, EVALUATION))
    rules = {"odd_one_out": False}
    assert find(scene, ODD_LOOKS - 1, missing=missing, rules=rules) is None
    found = find(scene, ODD_LOOKS, missing=missing, rules=rules)
    assert found is not None and found.rule == "missing_rank"
    assert "#288686" in found.reason
    assert find(scene, ODD_LOOKS, missing=replace(missing, ranks=(9,)), rules=rules) is None
    assert find(scene, ODD_LOOKS, missing=missing, rules={**rules, "missing_rank": False}) is None
    assert set(RULES) == set(HangLimits().rules.model_dump())


def test_collectives_that_differ_decide_after_a_standstill() -> None:
    missing = MissingRanks((3,), "rank 3 has entered barrier #7", is_certain=True)
    scene = idle(rank(3, collective("barrier"), cpu_s=1.0))
    assert find(scene, STILL_LOOKS - 1, missing=missing) is None
    found = find(scene, STILL_LOOKS, missing=missing)
    assert found is not None and found.rule == "missing_rank"


@pytest.mark.parametrize("busy", ["its stack changes", "it reads", "it sleeps", "a child writes"])
def test_a_missing_rank_that_may_work_is_not_accused(busy: str) -> None:
    missing = MissingRanks((3,), "rank 3 has not entered barrier #7")
    assert find(lambda i: waiting(BUSY[busy](i)), 2 * ODD_LOOKS, missing=missing) is None


# --- whether any rank works, once the limit has passed


@pytest.mark.parametrize("busy", ["its stack changes", "it reads", "a child computes"])
def test_one_working_rank_is_no_standstill(busy: str) -> None:
    streaks = watch(lambda index: waiting(BUSY[busy](index)), 3 * STILL_LOOKS)
    assert not is_standstill(streaks, range(4))
    assert is_standstill(streaks, range(3))


STILL: dict[str, Callable[[int], RankLook]] = {
    "it spins in one line": lambda i: rank(3, EVALUATION, cpu_s=15.0 * i),
    "it spins in a collective": lambda i: rank(3, collective("barrier", i), cpu_s=15.0 * i),
    "it sleeps": lambda i: rank(3, EVALUATION, wchan="hrtimer_nanosleep"),
    "its stack cannot be read": lambda i: rank(3, cpu_s=0.1 * i),
    "a monitor reads a little": lambda i: rank(3, LOADER, io_bytes=10_000 * i),
}


@pytest.mark.parametrize("still", STILL.values(), ids=list(STILL))
def test_a_rank_that_does_nothing_for_4_looks_stands_still(
    still: Callable[[int], RankLook],
) -> None:
    def scene(index: int) -> list[RankLook]:
        return waiting(still(index))

    assert not is_standstill(watch(scene, STILL_LOOKS - 1), range(4))
    streaks = watch(scene, STILL_LOOKS)
    assert is_standstill(streaks, range(4))
    assert not is_standstill(streaks, range(5)), "one was never seen"
    assert not is_standstill(streaks, ())
    assert not is_standstill(watch(scene, 9, framed=False), range(4)), "no stacks were asked for"


def test_cpu_of_threads_whose_stacks_change_is_work() -> None:
    def scene(index: int) -> list[RankLook]:
        others = (ThreadStack("save", tuple(grow(index))),)
        return waiting(rank(3, LOADER, others=others, cpu_s=1.0 * index))

    assert not is_standstill(watch(scene, 9), range(4))


def test_a_rank_that_was_not_seen_starts_again() -> None:
    streaks = watch(lambda _: waiting(), 9)
    streaks = follow_ranks(streaks, waiting(BUSY["it cannot be seen"](0)), 200.0, framed=True)
    assert not is_standstill(streaks, range(4))
    streaks = follow_ranks(streaks, waiting(), 215.0, framed=True)
    assert streaks[3].still == 1 < streaks[0].still
    assert follow_ranks(streaks, waiting(), 215.0, framed=True)[0].still == 1, "no time has passed"


def test_stacks_are_read_once_a_rank_does_nothing() -> None:
    def scene(index: int) -> list[RankLook]:
        return [rank(number, grow(index), cpu_s=15.0 * index) for number in range(4)]

    assert not is_any_idle(watch(scene, 3, framed=False))
    assert is_any_idle(watch(lambda i: waiting(), 2, framed=False))
    assert not is_any_idle(watch(lambda i: waiting(), 1, framed=False))


# --- who is named once the limit has passed


def list_named(*looks: RankLook, **known: Any) -> list[int]:
    return [one.rank for one in name_suspects(watch(lambda _: looks, 1), **known)[0]]


def test_ranks_in_another_collective_than_most_are_named() -> None:
    other = rank(3, collective("all_gather"))
    assert list_named(*waiting(other)) == [3]
    assert list_named(*waiting(rank(2, collective("barrier")), other)) == []


def test_ranks_that_called_the_collective_elsewhere_are_named() -> None:
    assert list_named(*waiting(rank(3, (*ALL_REDUCE[:-1], replace(TRAIN, line=3))))) == [3]


def test_where_no_wait_is_known_three_quarters_name_the_rest() -> None:
    item = [rank(number, (TRAIN,)) for number in range(4)]
    assert list_named(*item[:3], rank(3, LOADER)) == [3]
    assert list_named(*item[:2], rank(2, LOADER)) == []
    assert list_named(*item) == []


def test_a_tie_names_none_without_another_fact() -> None:
    assert list_named(rank(0, ALL_REDUCE), rank(1, LOADER)) == [1], "all but one wait"
    tie = (rank(0, ALL_REDUCE), rank(1, LOADER), rank(2, ALL_REDUCE), rank(3, LOADER))
    assert list_named(*tie) == []
    assert list_named(*tie, missing=MissingRanks((1,), "rank 1 is missing")) == [1]
    at_item = [rank(number, (TRAIN,)) for number in range(3)]
    assert list_named(*at_item, rank(3, ALL_REDUCE)) == [], "they may wait for the GPU"
    all_waiting = [rank(number, ALL_REDUCE) for number in range(4)]
    assert list_named(*all_waiting) == []
    assert list_named(*all_waiting, positions={0: 9, 1: 9, 2: 8, 3: 9}) == [2]
    assert list_named(*all_waiting, positions={0: 9, 1: 9, 2: 8, 3: 8}) == []
    assert list_named(*all_waiting, positions={0: 9}) == []
    assert name_suspects({}) == ((), "")
    _, reason = name_suspects(watch(lambda _: all_waiting, 1))
    assert reason == "4 ranks wait in all_reduce"


def on_network(number: int, *stuck: str) -> RankLook:
    """A rank that waits in all_reduce, at the address 10.0.0.NUMBER."""
    own = f"10.0.0.{number}"
    return replace(
        rank(number, ALL_REDUCE),
        addresses=(own,),
        stuck=tuple(StuckConnection(own, other) for other in stuck),
    )


def test_one_silent_connection_between_ranks_is_a_cut() -> None:
    silent = (on_network(0), on_network(1, "10.0.0.2"), on_network(2))
    outside = (on_network(0, "52.0.0.1"), on_network(1), on_network(2))
    assert is_any_cut_off(watch(lambda _: silent, 1))
    assert not is_any_cut_off(watch(lambda _: outside, 1))


def test_the_rank_that_no_packet_reaches_is_named(snapshot: SnapshotAssertion) -> None:
    def name(*looks: RankLook) -> tuple[list[int], str]:
        suspects, reason = name_suspects(watch(lambda _: looks, 3))
        return [one.rank for one in suspects], reason

    others = (on_network(0), on_network(1, "10.0.0.2"))
    cut_off = name(*others, on_network(2, "10.0.0.3"), on_network(3))
    pair = name(on_network(0), on_network(1, "10.0.0.2"), on_network(2, "10.0.0.1"))
    two = name(on_network(0, "10.0.0.3"), on_network(1, "10.0.0.2"), on_network(2), on_network(3))
    outside = name(on_network(0, "52.0.0.1"), on_network(1, "10.0.0.1"), on_network(2))
    assert (cut_off[0], pair[0], two[0], outside[0]) == ([2], [], [], [])
    assert [cut_off[1], pair[1], two[1], outside[1]] == snapshot


def test_silent_connections_are_a_hang_after_five_minutes() -> None:
    pair = [on_network(0, "10.0.0.1"), on_network(1), on_network(2), on_network(3)]
    ring = [on_network(0, "10.0.0.1"), on_network(1), on_network(2, "10.0.0.1"), on_network(3)]
    heals = [on_network(number) for number in range(4)]

    def name(scene: Scene, looks: int) -> list[int] | None:
        found = find(scene, looks)
        if found is None:
            return None
        assert found.rule == "cut_off"
        return [one.rank for one in found.suspects]

    assert name(lambda _: ring, CUT_OFF_LOOKS - 1) is None
    assert name(lambda _: ring, CUT_OFF_LOOKS) == [1]
    assert name(lambda _: pair, CUT_OFF_LOOKS) == []
    assert name(lambda look: heals if look == 3 else ring, CUT_OFF_LOOKS) is None
    assert name(lambda _: ring[:3], CUT_OFF_LOOKS) is None, "rank 3 was not seen"

    def works(look: int) -> list[RankLook]:
        busy = process(EVALUATION, cpu_s=15.0 * look, io_bytes=look << 20)
        return [*ring[:3], replace(ring[3], processes=(busy,))]

    assert name(works, CUT_OFF_LOOKS) is None
    assert find(lambda _: ring, CUT_OFF_LOOKS, rules={"cut_off": False}) is None


def test_a_rank_that_is_often_blocked_is_named() -> None:
    looks = [rank(number, (replace(TRAIN, line=number),)) for number in range(4)]
    streaks = watch(lambda _: [*looks[:3], rank(3, looks[3].frames, state="D")], 3)
    assert [one.rank for one in name_suspects(streaks)[0]] == [3]
    assert describe_rank(streaks[3].look).endswith("(state D)")


def test_missing_ranks_that_were_not_seen_change_nothing() -> None:
    missing = MissingRanks((9,), "rank 9 is missing")
    assert list_named(*waiting(rank(3, LOADER)), missing=missing) == [3]


# --- healthy runs


@pytest.mark.no_cover  # counting branches makes it four times as slow
@pytest.mark.parametrize("runs", [200, pytest.param(1000, marks=pytest.mark.long)])
def test_healthy_runs_are_never_hung(runs: int) -> None:
    """Rank 0 evaluates or saves for up to 20 minutes and does not say so; time is simulated."""
    chance = random.Random(18)
    limits, heartbeat, interval = HangLimits(), timedelta(seconds=10), 15.0
    looked = 0
    for _ in range(runs):
        step_s = chance.choice((0.05, 1.0, 20.0))
        pace, now = Pace(T0, expected=True), 0.0
        for step in range(12):
            pace = advance(pace, step, at(now))
            now += max(step_s, 10.0)
        busy = chance.choice(
            [
                lambda i: rank(0, grow(i)),
                lambda i: rank(0, EVALUATION, io_bytes=10**7 * i),
                lambda i: rank(0, EVALUATION, process(pid=9, cpu_s=3.0 * i)),
                lambda i: rank(0, grow(i // 3), cpu_s=15.0 * i),
            ]
        )
        pause = chance.uniform(120.0, 20 * 60.0)
        streaks: dict[int, RankStreak] = {}
        for index in range(int(pause / interval)):
            moment = at(now + index * interval)
            if not is_late(pace, limits, heartbeat, moment):
                assert find_overdue(pace, limits, moment) is None
                continue
            looked += 1
            looks = [
                busy(index),
                rank(1, collective("barrier", index), cpu_s=15.0 * index),
                rank(2, collective("barrier", index), cpu_s=15.0 * index),
            ]
            streaks = follow_ranks(streaks, looks, index * interval, framed=True)
            assert find_hung_ranks(streaks, range(3), {}) is None
            overdue = find_overdue(pace, limits, moment)
            if overdue is not None:
                assert not overdue.is_stated and overdue.past <= limits.at_most
                assert not is_standstill(streaks, range(3))
    assert looked > 10 * runs
