"""What only a simulated fleet can do.

Follow a script, lose messages, skip time, and keep a record that can be judged.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from relaunch.backends.base import (
    Peer,
    Preparation,
    PrepareOrder,
    Refusal,
    StartOrder,
    StopOrder,
    Unreachable,
)
from relaunch.generation import Token
from relaunch.spec.fleet import FleetSpec
from tests.fakes.nodes import (
    Chaos,
    Cut,
    Exit,
    Fault,
    Life,
    Lingers,
    ManualClock,
    Obeyed,
    Progress,
    Reboot,
    Refuse,
    Script,
    ShimDies,
    SimulatedBackend,
)
from tests.invariants import alive, assert_invariants, started_before_all_prepared, violations

pytestmark = pytest.mark.asyncio

Line = Mapping[str, Any]


def fleet(nodes: int) -> FleetSpec:
    named = [
        {"name": f"n{one}", "address": f"10.0.{one // 250}.{one % 250}"}
        for one in range(1, nodes + 1)
    ]
    return FleetSpec.model_validate({"name": "test", "backend": "simulated", "nodes": named})


def token(generation: int) -> Token:
    return Token("default", "job", 100, generation)


def prepare_order(
    generation: int, *ranks: int, lease: float = 60.0, fence_after: float = 60.0
) -> PrepareOrder:
    return PrepareOrder(token(generation), "10.0.0.1", ranks, lease, fence_after, 15.0, 60.0, 10.0)


def start_order(
    generation: int, node: str, gang: tuple[str, ...], ranks: int, prepared: object
) -> StartOrder:
    assert isinstance(prepared, Preparation), prepared
    peers = tuple(Peer(other, "10.0.0.1", 1) for other in gang[:17] if other != node)[:16]
    return StartOrder(
        token(generation),
        node,
        ("train",),
        None,
        {},
        ({},) * ranks,
        peers,
        prepared.stamp,
        "5ec7e7",
        True,
    )


async def launch(
    backend: SimulatedBackend,
    generation: int,
    nodes: tuple[str, ...],
    ranks: int = 2,
    **durations: float,
) -> None:
    prepared: dict[str, object] = {}
    for index, node in enumerate(nodes):
        mine = range(index * ranks, index * ranks + ranks)
        prepared[node] = await backend.prepare(node, prepare_order(generation, *mine, **durations))
    for node in nodes:
        assert not isinstance(
            await backend.start(node, start_order(generation, node, nodes, ranks, prepared[node])),
            Refusal,
        )


async def read(
    backend: SimulatedBackend,
    node: str,
    generation: int,
    enough: Callable[[Line], bool],
    after: int = 0,
) -> list[Line]:
    lines: list[Line] = []
    async with backend.watch(node, token(generation), after, 10.0) as stream:
        async for line in stream.lines():
            lines.append(line)
            if enough(line):
                return lines
    return lines


def kinds(lines: list[Line]) -> list[str]:
    return [line["observation"]["kind"] for line in lines if "observation" in line]


def is_heartbeat(line: Line) -> bool:
    return "heartbeat" in line


# --- the script -----------------------------------------------------------------------------------


async def test_what_happens_at_once_needs_no_time_at_all() -> None:
    clock = ManualClock()
    backend = SimulatedBackend(
        fleet(2),
        Script((Exit(generation=1, node="n2", rank=3, exit_code=7),), then="succeed"),
        clock,
    )
    await launch(backend, 1, ("n1", "n2"))
    lines = await read(backend, "n2", 1, is_heartbeat)
    exits = [line["observation"] for line in lines if "observation" in line]
    assert [(one["rank"], one["exit_code"], one["signal"]) for one in exits] == [
        (3, 7, None),
        (2, None, 15),
    ]
    assert kinds(await read(backend, "n1", 1, is_heartbeat)) == []
    await launch(backend, 2, ("n1", "n2"))
    lines = await read(backend, "n1", 2, is_heartbeat)
    assert [line["observation"]["exit_code"] for line in lines if "observation" in line] == [0, 0]
    assert clock.time() == 0.0
    assert_invariants(backend, all_ended=True)


async def test_a_watch_waits_for_what_comes_later() -> None:
    clock = ManualClock()
    backend = SimulatedBackend(fleet(1), Script((Exit(rank=1, signal=9, after=90.0),)), clock)
    await launch(backend, 1, ("n1",), lease=1000.0)
    watch = asyncio.create_task(read(backend, "n1", 1, lambda line: "observation" in line))
    await clock.advance(89.0)
    assert not watch.done()
    await clock.advance(1.0)
    lines = await watch
    assert lines[-1]["observation"]["signal"] == 9
    assert sum(is_heartbeat(line) for line in lines) == 9


async def test_progress_advances_by_the_clock_and_a_hang_stays_flat() -> None:
    clock = ManualClock()
    script = Script(
        (Progress(rank=0, rate=2.0), Progress(rank=1, steps=((0.0, 0), (5.0, 10)), hangs=True))
    )
    backend = SimulatedBackend(fleet(1), script, clock)
    await launch(backend, 1, ("n1",))
    seen = []
    for _ in range(3):
        (beat,) = [
            line["heartbeat"]
            for line in await read(backend, "n1", 1, is_heartbeat)
            if is_heartbeat(line)
        ]
        seen.append([(report["step"], report["age"]) for report in beat["progress"].values()])
        await clock.advance(10.0)
    assert seen == [[(0, 0.0), (0, 0.0)], [(20, 0.0), (10, 5.0)], [(40, 0.0), (10, 15.0)]]


async def test_heartbeats_come_with_steps_but_at_most_once_a_second() -> None:
    clock = ManualClock()
    backend = SimulatedBackend(fleet(1), Script((Progress(rate=50.0),)), clock)
    await launch(backend, 1, ("n1",))
    lines: list[Line] = []

    async def collect() -> None:
        async with backend.watch("n1", token(1), 0, 10.0) as stream:
            async for line in stream.lines():
                lines.append(line)

    collecting = asyncio.create_task(collect())
    await clock.advance(5.0)
    assert sum(is_heartbeat(line) for line in lines) == 6
    collecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await collecting


async def test_a_scripted_refusal_ends_when_its_times_are_over() -> None:
    backend = SimulatedBackend(
        fleet(1), Script((Refuse(node="n1", command="prepare", why="stuck", times=1),))
    )
    first = await backend.prepare("n1", prepare_order(1, 0))
    assert isinstance(first, Refusal) and first.why == "stuck"
    assert isinstance(await backend.prepare("n1", prepare_order(1, 0)), Preparation)
    assert [call.outcome for call in backend.calls] == ["refused:stuck", "done"]


async def test_a_node_goes_away_and_returns_as_scripted() -> None:
    clock = ManualClock()
    backend = SimulatedBackend(fleet(1), Script((Cut(generation=1, after=5.0, lasts=20.0),)), clock)
    await launch(backend, 1, ("n1",))
    watch = asyncio.create_task(read(backend, "n1", 1, lambda line: False))
    await clock.advance(5.0)
    with pytest.raises(Unreachable):
        await watch
    with pytest.raises(Unreachable):
        await backend.list("n1")
    await clock.advance(20.0)
    assert (await read(backend, "n1", 1, is_heartbeat))[-1]["heartbeat"]["alive"] == [0, 1]


async def test_a_node_lost_while_it_is_prepared_never_got_the_order() -> None:
    backend = SimulatedBackend(fleet(1), Script((Cut(generation=1, when="prepare"),)))
    with pytest.raises(Unreachable):
        await backend.prepare("n1", prepare_order(1, 0))
    assert backend.orders == []


@pytest.mark.parametrize(
    ("happening", "kind", "boots"),
    [
        (Reboot(after=1.0, down_for=30.0), "RanksVanished", 2),
        (ShimDies(after=1.0), "ShimDied", 1),
    ],
)
async def test_ranks_that_ended_unseen_are_reported(
    happening: Reboot | ShimDies, kind: str, boots: int
) -> None:
    clock = ManualClock()
    backend = SimulatedBackend(fleet(1), Script((happening,)), clock)
    await launch(backend, 1, ("n1",))
    await clock.advance(40.0)
    lines = await read(backend, "n1", 1, lambda line: False)
    assert kinds(lines) == [kind] and "end" in lines[-1]
    assert lines[0]["hello"]["boot_id"] == f"n1-boot-{boots}"
    assert alive(backend.lives) == ()


async def test_lingering_ranks_delay_a_prepare_stuck_ones_refuse_it() -> None:
    clock = ManualClock()
    script = Script(
        (
            Lingers(generation=1, rank=0, seconds=7.0),
            Lingers(generation=2, rank=1, seconds=math.inf),
        )
    )
    backend = SimulatedBackend(fleet(1), script, clock)
    await launch(backend, 1, ("n1",))
    preparing = asyncio.create_task(backend.prepare("n1", prepare_order(2, 0, 1)))
    await clock.advance(6.9)
    assert not preparing.done()
    await clock.advance(0.1)
    await backend.start("n1", start_order(2, "n1", ("n1",), 2, await preparing))
    preparing = asyncio.create_task(backend.prepare("n1", prepare_order(3, 0, 1)))
    await clock.advance(45.0)
    answer = await preparing
    assert isinstance(answer, Refusal) and answer.why == "stuck"
    assert [rank for _, _, rank in alive(backend.lives)] == [1]


# --- lease and fence ------------------------------------------------------------------------------


async def renew_once(backend: SimulatedBackend, *nodes: str) -> None:
    for node in nodes:
        async with backend.watch(node, token(1), 0, 10.0) as stream:
            async for line in stream.lines():
                if "heartbeat" in line:
                    await stream.renew(line["heartbeat"]["stamp"])
                    break


def ended(backend: SimulatedBackend) -> list[tuple[str, float]]:
    begin = backend.lives[0].at
    return [
        (life.node, round(life.at - begin, 3)) for life in backend.lives if life.kind == "ended"
    ]


async def test_a_whole_gang_outlives_its_controller_a_split_does_not() -> None:
    clock = ManualClock()
    backend = SimulatedBackend(fleet(3), Script((Lingers(node="n3", seconds=100.0),)), clock)
    await launch(backend, 1, ("n1", "n2", "n3"), ranks=1)
    await renew_once(backend, "n1", "n2", "n3")
    await clock.advance(2_000.0)
    assert ended(backend) == []
    backend.cut("n3")
    await clock.advance(200.0)
    # The last answers came within a second before the cut; fence_after is 60 s; n3 takes its whole
    # grace of 15 s.
    first, last = ended(backend)[0], ended(backend)[-1]
    assert [node for node, _ in ended(backend)] == ["n1", "n2", "n3"]
    assert first[1] in (2_059.0, 2_060.0)
    assert last[1] - first[1] == 15.0
    assert kinds(await read(backend, "n1", 1, lambda line: False))[0] == "Fenced"


async def test_two_nodes_that_never_heard_the_third_do_not_live_on() -> None:
    clock = ManualClock()
    backend = SimulatedBackend(fleet(3), Script(), clock)
    await launch(backend, 1, ("n1", "n2", "n3"), ranks=1)
    await renew_once(backend, "n1", "n2", "n3")
    backend.cut("n3")
    await clock.advance(500.0)
    assert sorted(ended(backend)) == [("n1", 120.0), ("n2", 120.0), ("n3", 120.0)]


async def test_one_leased_peer_keeps_a_node_alive_after_a_loss() -> None:
    clock = ManualClock()
    backend = SimulatedBackend(fleet(3), Script(), clock)
    await launch(backend, 1, ("n1", "n2", "n3"), ranks=1)
    await renew_once(backend, "n1", "n2", "n3")
    backend.cut("n3")
    for _ in range(50):
        await clock.advance(10.0)
        await renew_once(backend, "n1")
    assert ended(backend) == [("n3", 120.0)]
    await clock.advance(500.0)
    # n1 was renewed at 500 for the last time: leased until 560, which n2 hears until then, and both
    # wait fence_after.
    ends = dict(ended(backend))
    assert ends["n1"] == 620.0 and 618.0 <= ends["n2"] <= 620.0


async def test_a_renewal_that_is_late_extends_only_from_its_own_stamp() -> None:
    clock = ManualClock()
    backend = SimulatedBackend(
        fleet(1), Script(faults=(Fault(kind="delay", command="renew", seconds=50.0),)), clock
    )
    await launch(backend, 1, ("n1",), ranks=1)
    await renew_once(backend, "n1")
    await clock.advance(500.0)
    assert ended(backend) == [("n1", 120.0)]


# --- the network ----------------------------------------------------------------------------------


async def test_a_lost_order_was_not_carried_out_and_a_lost_answer_was() -> None:
    faults = (
        Fault(kind="lose_order", command="prepare", node="n1"),
        Fault(kind="lose_answer", command="prepare", node="n2"),
    )
    backend = SimulatedBackend(fleet(2), Script(faults=faults))
    for node, ranks in (("n1", (0, 1)), ("n2", (2, 3))):
        with pytest.raises(Unreachable):
            await backend.prepare(node, prepare_order(1, *ranks))
    assert [(order.node, order.command, order.outcome) for order in backend.orders] == [
        ("n2", "prepare", "done")
    ]
    await launch(backend, 1, ("n1", "n2"))
    assert_invariants(backend)


async def test_a_late_copy_of_a_stop_does_not_touch_what_is_above_it() -> None:
    fault = Fault(kind="double", command="stop", generation=1, after_orders=2)
    backend = SimulatedBackend(fleet(1), Script(faults=(fault,)))
    await launch(backend, 1, ("n1",))
    await backend.stop("n1", StopOrder(token(1), 15.0))
    await launch(backend, 2, ("n1",))
    await backend.settled()
    assert [(one.command, one.copy) for one in backend.orders][-2:] == [
        ("start", False),
        ("stop", True),
    ]
    assert {one[0].generation for one in alive(backend.lives)} == {2}
    assert_invariants(backend)


async def test_a_late_start_does_not_start_a_shim_of_a_late_prepare() -> None:
    clock = ManualClock()
    faults = (
        Fault(kind="double", command="prepare", seconds=100.0),
        Fault(kind="delay", command="start", seconds=110.0),
    )
    backend = SimulatedBackend(fleet(1), Script(faults=faults), clock)
    prepared = await backend.prepare("n1", prepare_order(1, 0))
    with pytest.raises(Unreachable):
        await backend.start("n1", start_order(1, "n1", ("n1",), 1, prepared))
    await clock.advance(200.0)
    assert [(one.command, one.outcome) for one in backend.orders] == [
        ("prepare", "done"),
        ("prepare", "done"),
        ("start", "refused:expired"),
    ]
    assert backend.lives == []


async def test_a_watch_that_breaks_resumes_where_it_was() -> None:
    backend = SimulatedBackend(
        fleet(1), Script((Exit(rank=0),), (Fault(kind="break", command="watch", lines=2),))
    )
    await launch(backend, 1, ("n1",))
    seen: list[Line] = []
    async with backend.watch("n1", token(1), 0, 10.0) as stream:
        with pytest.raises(Unreachable):  # noqa: PT012 - checks the lines before the break, too
            async for line in stream.lines():
                seen.append(line)
    seen += await read(backend, "n1", 1, is_heartbeat, after=1)
    assert [line["observation"]["seq"] for line in seen if "observation" in line] == [1, 2]


async def persistent(call: Callable[..., Any], *given: Any) -> Any:
    while True:
        try:
            return await call(*given)
        except Unreachable:
            continue


@pytest.mark.parametrize("seed", range(20))
async def test_a_careful_controller_keeps_every_invariant_under_chaos(seed: int) -> None:
    chaos = Chaos(
        seed=seed,
        lose_order=0.2,
        lose_answer=0.2,
        double=0.4,
        delay=0.3,
        seconds=0.001,
        after_orders=6,
    )
    backend = SimulatedBackend(fleet(4), Script(chaos=chaos, timeout=0.0005))
    nodes = ("n1", "n2", "n3", "n4")

    async def obey(generation: int) -> None:
        prepares = [
            persistent(backend.prepare, node, prepare_order(generation, rank))
            for rank, node in enumerate(nodes)
        ]
        answers = await asyncio.gather(*prepares)
        orders = [
            start_order(generation, node, nodes, 1, one)
            for node, one in zip(nodes, answers, strict=True)
        ]
        starts = [persistent(backend.start, order.node, order) for order in orders]
        await asyncio.gather(*starts)

    for generation in range(1, 6):
        await obey(generation)
        assert sum(
            life.kind == "started" and life.token == token(generation) for life in backend.lives
        ) == len(nodes)
    for node in nodes:
        await persistent(backend.stop, node, StopOrder(token(5), 15.0))
    await backend.settled()
    assert any(order.copy for order in backend.orders)
    assert any(call.outcome == "unreachable" for call in backend.calls)
    assert_invariants(backend, all_ended=True)


async def test_the_same_seed_gives_the_same_faults() -> None:
    async def outcomes(seed: int) -> list[str]:
        backend = SimulatedBackend(
            fleet(1), Script(chaos=Chaos(seed=seed, lose_order=0.3, lose_answer=0.3))
        )
        for generation in range(1, 40):
            try:
                await backend.prepare("n1", prepare_order(generation, 0))
            except Unreachable:
                continue
        return [call.outcome for call in backend.calls]

    assert await outcomes(1) == await outcomes(1) != await outcomes(2)


async def test_an_order_whose_sender_left_is_carried_out_as_cancelled() -> None:
    clock = ManualClock()
    backend = SimulatedBackend(fleet(1), Script((Lingers(seconds=5.0),)), clock)
    await launch(backend, 1, ("n1",))
    stopping = asyncio.create_task(backend.stop("n1", StopOrder(token(1), 15.0)))
    await clock.advance(1.0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    await clock.advance(10.0)
    assert backend.calls[-1].outcome == "cancelled"
    assert backend.orders[-1].outcome == "done"
    assert alive(backend.lives) == ()


# --- the judge ------------------------------------------------------------------------------------


async def test_the_invariants_see_a_careless_controller() -> None:
    backend = SimulatedBackend(fleet(2))
    await launch(backend, 1, ("n1",))
    await launch(backend, 2, ("n2",))
    found = violations(backend.calls, backend.orders, backend.lives)
    assert found == (
        "default/job/100/2 started on n2 while rank 0 of default/job/100/1 lived on n1",
    )
    with pytest.raises(
        AssertionError, match="rank 1 of default/job/100/2 on n2 is alive at the end"
    ):
        assert_invariants(backend, all_ended=True)
    with pytest.raises(AssertionError, match="while rank 0"):
        assert_invariants(backend)


async def test_the_invariants_see_a_controller_that_goes_back() -> None:
    backend = SimulatedBackend(fleet(2))
    await backend.prepare("n1", prepare_order(2, 0))
    await backend.prepare("n2", prepare_order(1, 1))
    found = violations(backend.calls, backend.orders, backend.lives)
    assert found == (
        "prepare of default/job/100/1 was sent to n2 after default/job/100/2 had been",
    )


async def test_the_invariants_see_a_launch_without_a_barrier() -> None:
    backend = SimulatedBackend(fleet(2))
    await launch(backend, 1, ("n1",))
    await launch(backend, 1, ("n2",))
    found = violations(backend.calls, backend.orders, backend.lives)
    assert found == (
        "rank 0 of default/job/100/1 started on n2 and had started on n1 before",
        "rank 1 of default/job/100/1 started on n2 and had started on n1 before",
        "default/job/100/1 started on n1 before n2 was prepared for it",
    )


async def test_the_invariants_see_nodes_that_break_their_word() -> None:
    stop = Obeyed(1, 0.0, "n1", "stop", token(2), "done", False)
    lives = (Life(2, 0.0, "started", token(1), "n1", 0), Life(3, 0.0, "ended", token(1), "n1", 0))
    assert violations((), (stop,), lives) == (
        "default/job/100/1 started on n1, which was never prepared for it",
        "default/job/100/1 started on n1 after default/job/100/2 was stopped there for ever",
    )
    assert (
        started_before_all_prepared(
            (Obeyed(1, 0.0, "n1", "prepare", token(1), "done", False),), lives
        )
        == ()
    )


# --- size -----------------------------------------------------------------------------------------


@pytest.mark.long
async def test_of_two_thousand_nodes_the_failing_one_is_heard() -> None:
    nodes = tuple(f"n{one}" for one in range(1, 2049))
    script = Script((Exit(node="n77", exit_code=1, rank=610), Progress(steps=((0.0, 5),))))
    backend = SimulatedBackend(fleet(2048), script)
    ranks = {node: range(index * 8, index * 8 + 8) for index, node in enumerate(nodes)}
    answers = await asyncio.gather(
        *(backend.prepare(node, prepare_order(1, *ranks[node])) for node in nodes)
    )
    prepared = dict(zip(nodes, answers, strict=True))
    await asyncio.gather(
        *(backend.start(one, start_order(1, one, nodes, 8, prepared[one])) for one in nodes)
    )
    watches = [
        asyncio.create_task(read(backend, node, 1, lambda line: "observation" in line))
        for node in nodes
    ]
    done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.gather(*(backend.stop(node, StopOrder(token(1), 15.0)) for node in nodes))
    await asyncio.gather(*watches)
    assert len(done) == 1 and (await done.pop())[-1]["observation"]["rank"] == 610
    assert len(backend.lives) == 2 * 2048 * 8
    assert_invariants(backend, all_ended=True)
