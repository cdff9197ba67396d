"""What every backend promises, held against each of them.

docs/reference/agent-protocol.md from the controller's side.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
import pytest_asyncio

from relaunch.backends.base import (
    Backend,
    Logs,
    Peer,
    Preparation,
    PrepareOrder,
    Refusal,
    StartedRanks,
    StartOrder,
    StopOrder,
    StopProof,
    Unreachable,
)
from relaunch.generation import Token
from tests.backends.fleets import (
    RUNS,
    SSH_FLEETS,
    Does,
    Fleet,
    LocalFleet,
    SimulatedFleet,
)

pytestmark = pytest.mark.asyncio

T = TypeVar("T")
Line = Mapping[str, Any]
Make = Callable[..., Fleet]
PATIENCE = 60.0
"""Seconds after which a test has failed. Each takes a fraction of it on an idle machine; this is
for a loaded one."""
SECRET = "5ec7e7"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every backend that has agents on its nodes.

    Of ECS, where a container has one and AWS the rest, what it promises as well. Of the SSH servers
    the first in `make test`, all in `make long`.
    """
    if "make" in metafunc.fixturenames:
        first, *others = SSH_FLEETS
        if metafunc.definition.get_closest_marker("also_ecs"):
            others.append("ecs")
        long = [pytest.param(name, marks=pytest.mark.long) for name in others]
        metafunc.parametrize("make", ["simulated", "local", first, *long], indirect=True)


@pytest.fixture
def aws(tmp_path_factory: pytest.TempPathFactory, agent: Path) -> Iterator[Any]:
    """One a test: ECS remembers by its client token what every test calls the same."""
    from tests.backends.ecs_fleet import playing_aws

    with playing_aws(tmp_path_factory.mktemp("aws"), agent) as double:
        yield double


@pytest_asyncio.fixture
async def make(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Make]:
    fleets: list[Fleet] = []

    def made(does: Mapping[int, Does] | None = None, nodes: int = 1) -> Fleet:
        fleet: Fleet
        if request.param == "simulated":
            fleet = SimulatedFleet(does or {1: RUNS}, nodes)
        elif request.param == "ecs":
            from tests.backends.ecs_fleet import EcsFleet

            fleet = EcsFleet(does or {1: RUNS}, nodes, tmp_path, request.getfixturevalue("aws"))
        else:
            real = LocalFleet if request.param == "local" else SSH_FLEETS[request.param]
            fleet = real(does or {1: RUNS}, nodes, tmp_path, request.getfixturevalue("agent"))
        fleets.append(fleet)
        return fleet

    yield made
    for fleet in fleets:
        await fleet.close()


def token(generation: int, submission: int = 100) -> Token:
    return Token("default", "contract", submission, generation)


def prepare_order(of: Token, ranks: tuple[int, ...] = (0, 1), **changes: Any) -> PrepareOrder:
    given: dict[str, Any] = {
        "address": "127.0.0.1",
        "lease": 60.0,
        "fence_after": 60.0,
        "stop_grace": 5.0,
        "valid_for": 60.0,
        "heartbeat": 10.0,
    }
    return PrepareOrder(token=of, ranks=ranks, **{**given, **changes})


def start_order(
    fleet: Fleet, of: Token, node: str = "n1", ranks: tuple[int, ...] = (0, 1), **changes: Any
) -> StartOrder:
    given: dict[str, Any] = {
        "command": fleet.command(of.generation),
        "workdir": fleet.workdir(of.generation),
        "env": {"WORLD_SIZE": str(len(ranks))},
        "rank_env": tuple({"RANK": str(rank)} for rank in ranks),
        "peers": (),
        "prepared": fleet.stamps.get((node, of), 0.0),
        "secret": SECRET,
        "fences": True,
    }
    return StartOrder(token=of, node=node, **{**given, **changes})


async def prepare(
    fleet: Fleet, node: str, order: PrepareOrder, backend: Backend | None = None
) -> Preparation | Refusal:
    answer = await (backend or fleet.backend).prepare(node, order)
    if isinstance(answer, Preparation):
        fleet.stamps[node, order.token] = answer.stamp
    return answer


def stop_order(of: Token) -> StopOrder:
    return StopOrder(of, stop_grace=5.0)


def done(answer: T | Refusal) -> T:
    assert not isinstance(answer, Refusal), answer
    return answer


def refusal(answer: object) -> Refusal:
    assert isinstance(answer, Refusal), answer
    return answer


async def launch(fleet: Fleet, generation: int = 1, **changes: Any) -> StartedRanks:
    done(await prepare(fleet, "n1", prepare_order(token(generation), **changes)))
    return done(await fleet.backend.start("n1", start_order(fleet, token(generation))))


async def read(
    backend: Backend,
    of: Token,
    enough: Callable[[list[Line]], bool],
    after_seq: int = 0,
    heartbeat: float = 0.1,
    node: str = "n1",
    stamp: Callable[[float], float] | None = None,
) -> list[Line]:
    """Watch until enough has been seen or the watch ends.

    Renew with `stamp(the heartbeat's own)`.
    """
    lines: list[Line] = []
    async with asyncio.timeout(PATIENCE), backend.watch(node, of, after_seq, heartbeat) as stream:
        async for line in stream.lines():
            lines.append(line)
            if "heartbeat" in line and stamp is not None:
                await stream.renew(stamp(line["heartbeat"]["stamp"]))
            if enough(lines):
                break
    return lines


def observed(lines: list[Line]) -> list[Line]:
    return [line["observation"] for line in lines if "observation" in line]


def heartbeats(lines: list[Line]) -> list[Line]:
    return [line["heartbeat"] for line in lines if "heartbeat" in line]


def exits(lines: list[Line]) -> dict[int, Line]:
    return {seen["rank"]: seen for seen in observed(lines) if seen["kind"] == "RankExited"}


def both_exited(lines: list[Line]) -> bool:
    return len(exits(lines)) == 2


async def alive(backend: Backend, generation: int, node: str = "n1") -> list[int]:
    jobs = (await backend.list(node))["jobs"]
    return [
        rank["rank"]
        for job in jobs
        for one in job["generations"]
        if one["generation"] == generation
        for rank in one["ranks"]
        if rank["alive"]
    ]


# --- launching ------------------------------------------------------------------------------------


async def test_a_rank_that_exits_is_seen_and_ends_its_neighbours(make: Make) -> None:
    fleet = make({1: Does(prints="step 1\nout of luck\n", exits={0: 3})})
    started = await launch(fleet)
    assert sorted(started.pids) == [0, 1] and not started.already
    seen = exits(await read(fleet.backend, token(1), both_exited))
    assert (seen[0]["exit_code"], seen[0]["signal"], seen[0]["stopped"]) == (3, None, False)
    assert seen[0]["log_tail"] == ["step 1", "out of luck"]
    assert (seen[0]["local_rank"], seen[0]["pid"]) == (0, started.pids[0])
    assert (seen[1]["exit_code"], seen[1]["signal"], seen[1]["stopped"]) == (None, 15, True)
    assert seen[1]["log_tail"] == []
    assert isinstance(seen[0]["kernel"], list)  # what it holds is this machine's
    assert (seen[1]["kernel"], seen[1]["kernel_unreadable"]) == ([], None)


@pytest.mark.also_ecs
async def test_a_rank_that_a_signal_ends_is_seen_with_the_signal(make: Make) -> None:
    fleet = make({1: Does(exits={1: -9})})
    await launch(fleet)
    seen = exits(await read(fleet.backend, token(1), both_exited))
    assert (seen[1]["exit_code"], seen[1]["signal"], seen[1]["stopped"]) == (None, 9, False)


@pytest.mark.also_ecs
async def test_the_error_file_of_a_rank_comes_with_its_exit(make: Make) -> None:
    fleet = make({1: Does(error="CUDA error: out of luck", exits={0: 1})})
    await launch(fleet)
    seen = exits(await read(fleet.backend, token(1), both_exited))
    assert seen[0]["error"]["message"]["message"] == "CUDA error: out of luck"
    assert seen[1]["error"] is None


@pytest.mark.also_ecs
async def test_ranks_that_succeed_do_not_take_the_others_with_them(make: Make) -> None:
    fleet = make({1: Does(exits={0: 0})})
    await launch(fleet)
    lines = await read(
        fleet.backend,
        token(1),
        lambda lines: any(beat["alive"] == [1] for beat in heartbeats(lines)),
    )
    assert list(exits(lines)) == [0] and exits(lines)[0]["exit_code"] == 0


@pytest.mark.also_ecs
async def test_prepare_is_idempotent(make: Make) -> None:
    fleet = make()
    first = done(await prepare(fleet, "n1", prepare_order(token(1))))
    assert isinstance(first, Preparation) and first.boot_id and first.nonce
    assert first.master_port != first.peer_port
    assert await prepare(fleet, "n1", prepare_order(token(1))) == first
    await fleet.backend.start("n1", start_order(fleet, token(1)))
    assert await prepare(fleet, "n1", prepare_order(token(1))) == first
    assert await alive(fleet.backend, 1) == [0, 1]


@pytest.mark.also_ecs
async def test_start_is_idempotent_also_when_the_ranks_have_ended(make: Make) -> None:
    fleet = make({1: RUNS, 2: Does(exits={0: 0, 1: 0})})
    started = await launch(fleet)
    again = done(await fleet.backend.start("n1", start_order(fleet, token(1))))
    assert again == StartedRanks("n1", started.pids, already=True)
    short = await launch(fleet, 2)
    await read(fleet.backend, token(2), both_exited)
    again = done(await fleet.backend.start("n1", start_order(fleet, token(2))))
    assert again == StartedRanks("n1", short.pids, already=True)


@pytest.mark.also_ecs
async def test_stop_is_idempotent_and_what_is_gone_is_done(make: Make) -> None:
    fleet = make()
    await launch(fleet)
    assert await fleet.backend.stop("n1", stop_order(token(1))) == StopProof("n1")
    assert await alive(fleet.backend, 1) == []
    assert await fleet.backend.stop("n1", stop_order(token(1))) == StopProof("n1")


@pytest.mark.also_ecs
async def test_a_new_token_stops_the_ranks_of_the_old_one(make: Make) -> None:
    fleet = make({1: RUNS, 2: RUNS})
    await launch(fleet)
    done(await prepare(fleet, "n1", prepare_order(token(2))))
    assert await alive(fleet.backend, 1) == []
    seen = exits(await read(fleet.backend, token(1), both_exited))
    assert all(one["stopped"] for one in seen.values())
    done(await fleet.backend.start("n1", start_order(fleet, token(2))))
    assert await alive(fleet.backend, 2) == [0, 1]


# --- refusals -------------------------------------------------------------------------------------


async def test_a_token_below_the_highest_prepared_is_refused_with_it(make: Make) -> None:
    fleet = make({1: RUNS, 2: RUNS, 3: RUNS})
    await launch(fleet, 2)
    for lower in (token(1), token(3, submission=99)):
        refused = refusal(await prepare(fleet, "n1", prepare_order(lower)))
        assert (refused.node, refused.why, refused.highest) == ("n1", "not_above", (100, 2))
        assert (
            refusal(await fleet.backend.start("n1", start_order(fleet, lower))).why == "not_above"
        )
    done(await prepare(fleet, "n1", prepare_order(token(1, submission=101))))


async def test_a_stop_forbids_a_generation_and_all_below_for_ever(make: Make) -> None:
    fleet = make({1: RUNS, 2: RUNS, 3: RUNS})
    await launch(fleet, 1)
    assert await fleet.backend.stop("n1", stop_order(token(2))) == StopProof("n1")
    assert await alive(fleet.backend, 1) == []
    for backend in (fleet.backend, fleet.again()):
        for forbidden in (1, 2):
            refused = refusal(await prepare(fleet, "n1", prepare_order(token(forbidden)), backend))
            assert (refused.why, refused.highest) == ("stopped", (100, 2))
            assert (
                refusal(await backend.start("n1", start_order(fleet, token(forbidden)))).why
                == "stopped"
            )
    await launch(fleet, 3)
    assert await alive(fleet.backend, 3) == [0, 1]


async def test_a_start_without_prepare_is_refused(make: Make) -> None:
    fleet = make({1: RUNS, 2: RUNS})
    assert (
        refusal(await fleet.backend.start("n1", start_order(fleet, token(1)))).why == "not_prepared"
    )
    await launch(fleet, 1)
    assert (
        refusal(await fleet.backend.start("n1", start_order(fleet, token(2)))).why == "not_prepared"
    )
    assert await alive(fleet.backend, 1) == [0, 1]


async def test_a_start_that_comes_too_late_is_refused(make: Make) -> None:
    fleet = make()
    done(await prepare(fleet, "n1", prepare_order(token(1), valid_for=0.3)))
    lines = await read(fleet.backend, token(1), lambda lines: False)
    assert "end" in lines[-1] and observed(lines) == []
    try:
        refused = refusal(await fleet.backend.start("n1", start_order(fleet, token(1))))
    except (
        Unreachable
    ):  # its shim was on its way out, and took the order along: ambiguous, so it is asked again
        refused = refusal(await fleet.backend.start("n1", start_order(fleet, token(1))))
    assert refused.why == "expired"
    assert await alive(fleet.backend, 1) == []


@pytest.mark.also_ecs
async def test_a_start_that_belongs_to_another_preparation_is_refused(make: Make) -> None:
    fleet = make()
    prepared = done(await prepare(fleet, "n1", prepare_order(token(1))))
    other = start_order(fleet, token(1), prepared=prepared.stamp - 1.0)
    assert refusal(await fleet.backend.start("n1", other)).why == "expired"
    assert await alive(fleet.backend, 1) == []
    done(await fleet.backend.start("n1", start_order(fleet, token(1))))


@pytest.mark.parametrize("why", ["command_not_found", "workdir_missing"])
async def test_what_cannot_be_started_is_refused_each_time(make: Make, why: str) -> None:
    fleet = make({1: Does(refused=why), 2: RUNS})
    done(await prepare(fleet, "n1", prepare_order(token(1))))
    for _ in range(2):
        refused = refusal(await fleet.backend.start("n1", start_order(fleet, token(1))))
        assert (refused.why, bool(refused.reason)) == (why, True)
    assert await alive(fleet.backend, 1) == []
    await launch(fleet, 2)


# --- watching -------------------------------------------------------------------------------------


async def test_a_watch_greets_then_tells_then_beats(make: Make) -> None:
    fleet = make({1: Does(step=12)})
    await launch(fleet)
    lines = await read(
        fleet.backend,
        token(1),
        lambda lines: any(len(beat["progress"]) == 2 for beat in heartbeats(lines)),
    )
    hello = lines[0]["hello"]
    assert hello["token"] == {
        "namespace": "default",
        "job": "contract",
        "submission": 100,
        "generation": 1,
    }
    assert (hello["state"], hello["ranks"]) == ("running", [0, 1])
    beat = heartbeats(lines)[-1]
    assert sorted(beat["alive"]) == [0, 1] and beat["stamp"] >= hello["stamp"]
    assert 50 < beat["lease_left"] <= 60
    assert {rank: report["step"] for rank, report in beat["progress"].items()} == {"0": 12, "1": 12}


async def test_a_watch_of_a_prepared_generation_sees_it_start(make: Make) -> None:
    fleet = make({1: Does(exits={0: 3})})
    done(await prepare(fleet, "n1", prepare_order(token(1))))
    async with asyncio.timeout(PATIENCE), fleet.backend.watch("n1", token(1), 0, 0.1) as stream:
        lines = stream.lines()
        assert (await anext(lines))["hello"]["state"] == "prepared"
        done(await fleet.backend.start("n1", start_order(fleet, token(1))))
        seen: list[Line] = []
        while not both_exited(seen):
            seen.append(await anext(lines))
    assert exits(seen)[0]["exit_code"] == 3


async def test_a_watch_resumes_after_what_was_acknowledged(make: Make) -> None:
    fleet = make({1: Does(exits={0: 3})})
    await launch(fleet)
    whole = observed(await read(fleet.backend, token(1), both_exited))
    assert [seen["seq"] for seen in whole] == list(range(1, len(whole) + 1))
    for after in range(len(whole)):
        rest = observed(
            await read(fleet.backend, token(1), both_rest(len(whole) - after), after_seq=after)
        )
        assert rest == whole[after:]
    lines = await read(
        fleet.again(), token(1), lambda lines: len(heartbeats(lines)) == 2, after_seq=len(whole)
    )
    assert observed(lines) == []


def both_rest(count: int) -> Callable[[list[Line]], bool]:
    return lambda lines: len(observed(lines)) == count


async def test_a_stopped_generation_says_why_and_ends_its_watch(make: Make) -> None:
    fleet = make()
    await launch(fleet)
    async with asyncio.timeout(PATIENCE), fleet.backend.watch("n1", token(1), 0, 10.0) as stream:
        lines = stream.lines()
        await anext(lines)
        stopping = asyncio.create_task(fleet.backend.stop("n1", stop_order(token(1))))
        seen = [line async for line in lines]
        assert await stopping == StopProof("n1")
    assert "end" in seen[-1]
    assert [one["kind"] for one in observed(seen)] == ["Stopped", "RankExited", "RankExited"]
    assert all(one["stopped"] for one in exits(seen).values())
    afterwards = await read(fleet.backend, token(1), lambda lines: False)
    assert afterwards[0]["hello"]["state"] == "gone" and observed(afterwards) == observed(seen)


async def test_a_watch_of_an_unknown_generation_is_refused(make: Make) -> None:
    fleet = make()
    lines = await read(fleet.backend, token(7), lambda lines: False)
    assert [(line["outcome"], line["why"]) for line in lines] == [("refused", "no_such_generation")]


async def test_two_watchers_see_the_same(make: Make) -> None:
    fleet = make({1: Does(exits={0: 3})})
    done(await prepare(fleet, "n1", prepare_order(token(1))))
    watches = [
        asyncio.create_task(read(backend, token(1), both_exited))
        for backend in (fleet.backend, fleet.again())
    ]
    done(await fleet.backend.start("n1", start_order(fleet, token(1))))
    first, second = await asyncio.gather(*watches)
    assert observed(first) == observed(second)


# --- lease and fence ------------------------------------------------------------------------------


def fenced(lines: list[Line]) -> bool:
    return any(seen["kind"] == "Fenced" for seen in observed(lines)) and both_exited(lines)


async def test_a_generation_without_renewals_stops_itself(make: Make) -> None:
    fleet = make()
    await launch(fleet, lease=0.4, fence_after=0.2)
    lines = await read(fleet.backend, token(1), fenced)
    assert [seen["kind"] for seen in observed(lines)] == ["Fenced", "RankExited", "RankExited"]
    assert observed(lines)[0]["why"] == "never_watched"
    assert all(one["stopped"] for one in exits(lines).values())


async def test_renewing_with_an_old_stamp_extends_nothing(make: Make) -> None:
    fleet = make()
    await launch(fleet, lease=4.0, fence_after=1.0)  # the first renewal may be late
    stamps: list[float] = []

    def first(stamp: float) -> float:
        stamps.append(stamp)
        return stamps[0]

    lines = await read(fleet.backend, token(1), fenced, stamp=first)
    fence = observed(lines)[0]
    assert (fence["kind"], fence["why"]) == ("Fenced", "isolated")
    assert fence["stamp"] - stamps[0] >= 5.0  # were it extended, it would not end
    assert len(stamps) > 3


async def test_a_renewal_ahead_of_the_nodes_clock_extends_nothing(make: Make) -> None:
    fleet = make()
    await launch(fleet, lease=0.4, fence_after=0.2)
    lines = await read(fleet.backend, token(1), fenced, stamp=lambda stamp: stamp + 1000.0)
    assert observed(lines)[0]["why"] == "never_watched"


async def test_renewed_leases_hold(make: Make) -> None:
    fleet = make()
    await launch(fleet, lease=3.0, fence_after=1.0)  # renewals are late on a busy machine
    lines = await read(
        fleet.backend,
        token(1),
        lambda lines: (
            bool(beats := heartbeats(lines)) and beats[-1]["stamp"] > beats[0]["stamp"] + 4.5
        ),
        heartbeat=0.5,
        stamp=lambda stamp: stamp,
    )
    assert observed(lines) == []
    beats = heartbeats(lines)
    assert sorted(beats[-1]["alive"]) == [0, 1]


async def test_a_node_whose_peer_is_leased_runs_on(make: Make) -> None:
    fleet = make(nodes=2)
    prepared = {}
    for node, ranks in (("n1", (0,)), ("n2", (1,))):
        address = fleet.backend.node(node).address
        order = prepare_order(token(1), ranks, address=address, lease=3.0, fence_after=1.5)
        prepared[node] = Peer(node, address, done(await prepare(fleet, node, order)).peer_port)
    for node, ranks, other in (("n1", (0,), "n2"), ("n2", (1,), "n1")):
        start = start_order(fleet, token(1), node, ranks, peers=(prepared[other],))
        done(await fleet.backend.start(node, start))
    first: list[float] = []

    def only_once(stamp: float) -> float:
        first.append(stamp)
        return first[0]

    held = asyncio.create_task(
        read(fleet.backend, token(1), lambda lines: False, node="n1", stamp=lambda stamp: stamp)
    )
    lines = await read(
        fleet.backend,
        token(1),
        lambda lines: bool(heartbeats(lines)) and heartbeats(lines)[-1]["stamp"] > first[0] + 5.5,
        node="n2",
        stamp=only_once,
    )
    assert observed(lines) == [] and heartbeats(lines)[-1]["lease_left"] == 0.0
    held.cancel()
    with pytest.raises(asyncio.CancelledError):
        await held


# --- reaching -------------------------------------------------------------------------------------


async def test_a_node_that_is_cut_off_is_silent_and_its_ranks_run_on(make: Make) -> None:
    fleet = make()
    started = await launch(fleet)
    async with asyncio.timeout(PATIENCE), fleet.backend.watch("n1", token(1), 0, 0.1) as stream:
        lines = stream.lines()
        await anext(lines)
        fleet.cut("n1")
        with pytest.raises(Unreachable) as broken:
            async for _ in lines:
                pass
    assert broken.value.node == "n1"
    other = fleet.again(answer_within=0.6)
    with pytest.raises(Unreachable):
        await other.list("n1")
    with pytest.raises(Unreachable):
        await read(other, token(1), lambda lines: False)
    fleet.heal("n1")
    assert await reached(lambda: alive(fleet.backend, 1)) == [0, 1]
    assert done(await fleet.backend.start("n1", start_order(fleet, token(1)))).pids == started.pids


async def reached(call: Callable[[], Awaitable[T]]) -> T:
    """Ask until the node answers: an order that was sent into a cut may still be in the way."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                return await call()
            except Unreachable:
                await asyncio.sleep(0.01)


async def test_a_reboot_is_reported_and_spends_the_generation(make: Make) -> None:
    fleet = make({1: RUNS, 2: RUNS})
    before = done(await prepare(fleet, "n1", prepare_order(token(1))))
    done(await fleet.backend.start("n1", start_order(fleet, token(1))))
    fleet.reboot("n1")
    lines = await reached(lambda: read(fleet.backend, token(1), lambda lines: False))
    assert [seen["kind"] for seen in observed(lines)] == ["RanksVanished"] and "end" in lines[-1]
    assert observed(lines)[0]["rebooted"] is True
    assert lines[0]["hello"]["boot_id"] != before.boot_id
    assert observed(await read(fleet.backend, token(1), lambda lines: False)) == observed(lines)
    refused = refusal(await prepare(fleet, "n1", prepare_order(token(1))))
    assert (refused.why, refused.highest) == ("not_above", (100, 1))
    assert (
        done(await prepare(fleet, "n1", prepare_order(token(2)))).boot_id
        == lines[0]["hello"]["boot_id"]
    )


@pytest.mark.also_ecs
async def test_closing_leaves_the_ranks_running(make: Make) -> None:
    fleet = make()
    started = await launch(fleet)
    await fleet.backend.close()
    other = fleet.again()
    assert await alive(other, 1) == [0, 1]
    assert done(await other.start("n1", start_order(fleet, token(1)))) == StartedRanks(
        "n1", started.pids, already=True
    )


async def test_calls_at_the_same_time_do_not_hinder_each_other(make: Make) -> None:
    fleet = make(nodes=2)
    orders = [
        prepare(fleet, node, prepare_order(token(1))) for node in ("n1", "n2") for _ in range(3)
    ]
    answers = [done(answer) for answer in await asyncio.gather(*orders)]
    assert answers[0] == answers[1] == answers[2] and answers[3] == answers[4] == answers[5]
    starts = [
        fleet.backend.start(node, start_order(fleet, token(1), node))
        for node in ("n1", "n2")
        for _ in range(3)
    ]
    started = [done(answer) for answer in await asyncio.gather(*starts)]
    for node in ("n1", "n2"):
        mine = [one for one in started if one.node == node]
        assert sorted(one.already for one in mine) == [False, True, True]
        assert mine[0].pids == mine[1].pids == mine[2].pids
        assert await alive(fleet.backend, 1, node) == [0, 1]


# --- asking ---------------------------------------------------------------------------------------


async def test_list_tells_newest_generations_and_living_ranks(make: Make) -> None:
    fleet = make({1: RUNS, 2: RUNS})
    assert (await fleet.backend.list("n1"))["jobs"] == []
    await launch(fleet, 1)
    started = await launch(fleet, 2)
    other = Token("default", "other", 5, 1)
    done(await prepare(fleet, "n1", prepare_order(other)))
    assert await fleet.backend.stop("n1", stop_order(token(1))) == StopProof("n1")
    listed = await fleet.backend.list("n1")
    assert listed["boot_id"] and listed["protocol"] == 1
    jobs = {job["job"]: job for job in listed["jobs"]}
    assert jobs["contract"]["prepared"] == [100, 2] and jobs["contract"]["stopped"] == [100, 1]
    assert jobs["other"]["prepared"] == [5, 1] and jobs["other"]["stopped"] is None
    (running,) = jobs["contract"]["generations"]
    assert (running["generation"], running["state"]) == (2, "running")
    assert {rank["rank"]: rank["pid"] for rank in running["ranks"]} == started.pids
    assert all(rank["alive"] for rank in running["ranks"])
    await fleet.backend.stop("n1", stop_order(other))
    over: dict[str, Any] = {}
    async with asyncio.timeout(PATIENCE):
        while over.get("state") != "gone":  # a stop is answered before the shim has ended
            after = {job["job"]: job for job in (await fleet.backend.list("n1"))["jobs"]}
            (over,) = after["other"]["generations"]
            await asyncio.sleep(0.02)
    assert (over["ranks"], after["other"]["stopped"]) == ([], [5, 1])


async def test_logs_are_read_on_from_an_offset_until_they_end(make: Make) -> None:
    fleet = make({1: Does(prints="one\ntwo\nthrée\n", exits={0: 0, 1: 0})})
    await launch(fleet)
    await read(fleet.backend, token(1), both_exited)
    text, offset, ended = "", 0, False
    everything = len("one\ntwo\nthrée\n".encode())
    async with asyncio.timeout(PATIENCE):
        while not ended:
            logs = done(
                await fleet.backend.logs(
                    "n1", token(1), {0: everything, 1: offset, 99: 0}, 5, 0.0, None
                )
            )
            assert isinstance(logs, Logs)
            for chunk in logs.chunks:
                assert (chunk.rank, chunk.offset) == (1, offset) and len(chunk.data.encode()) <= 5
                text, offset = text + chunk.data, chunk.next
            ended = logs.ended
    assert text == "one\ntwo\nthrée\n"
    tail = done(await fleet.backend.logs("n1", token(1), None, 65536, 0.0, 2))
    assert {chunk.rank: chunk.data for chunk in tail.chunks} == {
        0: "two\nthrée\n",
        1: "two\nthrée\n",
    }
    assert tail.ended


async def test_logs_of_running_ranks_are_open_and_unknown_ones_refused(
    make: Make,
) -> None:
    fleet = make({1: Does(prints="hello\n")})
    await launch(fleet)
    offsets: dict[int, int] = {}
    async with asyncio.timeout(PATIENCE):
        while len(offsets) < 2:
            # A rank that is not in `offsets` is read from its beginning: it may print for the first
            # time at any moment.
            logs = done(await fleet.backend.logs("n1", token(1), offsets, 65536, PATIENCE, None))
            assert isinstance(logs, Logs)
            assert {(chunk.data, chunk.next) for chunk in logs.chunks} == {
                ("hello\n", 6)
            } and not logs.ended
            offsets |= {chunk.rank: chunk.next for chunk in logs.chunks}
    more = done(await fleet.backend.logs("n1", token(1), offsets, 65536, 0.0, None))
    assert more == Logs((), ended=False)
    refused = refusal(await fleet.backend.logs("n1", token(7), None, 65536, 0.0, None))
    assert refused.why == "no_such_generation"
