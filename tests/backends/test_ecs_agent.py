"""The agent inside a rank's container on ECS: real processes below a double of AWS.

Its reports are laid over those of ECS.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from syrupy.assertion import SnapshotAssertion

from relaunch.backends import session as session_module
from relaunch.backends.base import (
    Logs,
    PrepareOrder,
    Refusal,
    StartedRanks,
    StartOrder,
    StopOrder,
    StopProof,
    Unreachable,
)
from relaunch.backends.ecs import aws as aws_module
from relaunch.backends.ecs import batch as batch_module
from relaunch.backends.ecs import cluster as cluster_module
from relaunch.backends.ecs import container
from relaunch.backends.ecs import follow as follow_module
from relaunch.backends.ecs import stream as stream_module
from relaunch.backends.ecs.backend import EcsBackend
from relaunch.backends.ecs.follow import FollowedTask
from relaunch.backends.ecs.launch import stamp
from relaunch.backends.ecs.stream import ECS_SEQ
from relaunch.backends.ecs.tasks import Task, read_definition, read_task
from relaunch.generation import Token
from relaunch.spec.fleet import EcsOptions, FleetSpec
from relaunch.spec.job import SecretReference
from tests.agent_key import make_key
from tests.chaos.world import free_port
from tests.doubles.aws import SERVER_ERROR, AwsDouble, Delays

KEY = make_key()
FOR_EVER = ("sleep", "600")
NUMBERS = iter(range(1, 10_000))
PATIENCE = 120.0
POLL, BEAT = 0.4, 0.4
"""Seconds."""
PATIENT = 60
"""Polls without an answer of AWS that break a watch, and beats without one of the agent that break
its connection. Production takes three of each; here a busy machine must not be mistaken for
silence."""
Line = Mapping[str, Any]
SAID = {"ranks": [0], "port": 29400}
WITH_AGENT = {
    "containerOverrides": [
        {
            "name": "c",
            "environment": [
                {"name": "RANK", "value": "0"},
                {"name": container.ORDER, "value": json.dumps(SAID)},
            ],
        }
    ]
}


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory, agent: Path) -> Iterator[AwsDouble]:
    delays = Delays(stop_timeout=3.0, power_off=0.05)
    with (
        AwsDouble(tmp_path_factory.mktemp("aws"), agent=agent, delays=delays) as double,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in double.environment().items():
            patch.setenv(name, value)
        patch.setattr(aws_module, "RATES", {"read": (10_000.0, 100), "modify": (10_000.0, 100)})
        for module in (batch_module, follow_module):
            patch.setattr(module, "GATHER", 0.002)
        patch.setattr(cluster_module, "FIRST_LOOK", 0.05)
        patch.setattr(container, "RETRY", (0.05, 0.2))
        patch.setattr(stream_module, "STALE_POLLS", PATIENT)
        for module in (container, session_module):
            patch.setattr(module, "SILENT_BEATS", PATIENT)
        patch.setattr(container, "DRAIN_TIMEOUT", PATIENCE)
        patch.setenv("KEY_OF_TESTS", f"{KEY}\n")
        patch.setenv("ANOTHER_KEY", make_key())
        yield double


class Site:
    """One instance, a task definition with the agent in it on a separate port, and a job."""

    def __init__(self, aws: AwsDouble, key: str = KEY) -> None:
        self.aws, number = aws, next(NUMBERS)
        self.port = str(free_port())
        # A folder of the container alone, as each has.
        variables = {
            container.PORT: self.port,
            "RELAUNCH_AGENT_KEY": key,
            "RELAUNCH_AGENT_STATE": "state",
        }
        trainer = {
            "name": "trainer",
            "image": "of the user's, with the agent",
            "entryPoint": [sys.executable, "-S", str(aws._agent_path()), "container"],
            "environment": [
                {"name": name, "value": value} for name, value in variables.items() if value
            ],
        }
        self.family = f"train{number}"
        aws.register(self.family, [trainer], networkMode="host")
        self.token = Token("default", f"job{number}", 1763000000000, 1)
        self.id = aws.add_instance(gpus=0)
        nodes = [{"name": "n1", "address": self.id, "network": "127.0.0.1"}]
        self.spec = FleetSpec.model_validate({"name": "ecs", "backend": "ecs", "nodes": nodes})
        self._open: list[EcsBackend] = []
        self.backend = self.again()

    def again(self, variable: str | None = "KEY_OF_TESTS") -> EcsBackend:
        """Another worker, which has its key there."""
        options = EcsOptions(
            cluster=self.aws.cluster,
            task_definition=self.family,
            poll=timedelta(seconds=POLL),
            agent_key=None if variable is None else SecretReference(env=variable),
        )
        self._open.append(EcsBackend(self.spec, options, settles=0.2))
        return self._open[-1]

    async def launch(
        self, command: Sequence[str], ranks: int = 1, **rank_env: str
    ) -> StartedRanks | Refusal:
        order = PrepareOrder(
            self.token, "10.0.0.1", tuple(range(ranks)), 60.0, 60.0, 1.0, 60.0, 0.2, 5.0
        )
        assert not isinstance(await self.backend.prepare("n1", order), Refusal)
        own = tuple(
            {"RANK": str(rank), "LOCAL_RANK": str(rank), "RELAUNCH_NODE": "n1", **rank_env}
            for rank in range(ranks)
        )
        env = {"WORLD_SIZE": str(ranks), "GROUP_WORLD_SIZE": "1"}
        start = StartOrder(
            self.token,
            "n1",
            tuple(command),
            None,
            env,
            own,
            (),
            stamp(self.token, "n1"),
            "",
            False,
            r"step (?P<step>\d+)",
        )
        return await self.backend.start("n1", start)

    @property
    def task(self) -> dict[str, Any]:
        return self.aws.tasks(self.family)[-1]

    async def watch(
        self,
        enough: Callable[[Line], bool] = lambda line: False,
        after_seq: int = 0,
        backend: EcsBackend | None = None,
    ) -> list[Line]:
        lines: list[Line] = []
        async with (
            asyncio.timeout(PATIENCE),
            (backend or self.backend).watch("n1", self.token, after_seq, BEAT) as stream,
        ):
            async for line in stream.lines():
                lines.append(line)
                if enough(line):
                    break
        return lines

    async def close(self) -> None:
        for backend in self._open:
            await backend.close()


@pytest_asyncio.fixture
async def make(aws: AwsDouble) -> AsyncIterator[Callable[..., Site]]:
    sites: list[Site] = []

    def make(**how: str) -> Site:
        sites.append(Site(aws, **how))
        return sites[-1]

    yield make
    aws.faults.clear()
    for site in sites:
        aws.instance(site.id).kill()
        await site.close()


def observations(lines: Sequence[Line]) -> list[dict[str, Any]]:
    return [dict(line["observation"]) for line in lines if "observation" in line]


def steps(line: Line) -> dict[str, Any]:
    return {
        rank: one.get("step")
        for rank, one in (line.get("heartbeat") or {}).get("progress", {}).items()
    }


def python(text: str) -> list[str]:
    return [sys.executable, "-S", "-c", f"import json, os, time\nrank = os.environ['RANK']\n{text}"]


# --- what the agent reports


async def test_progress_and_error_file_of_two_ranks_in_a_task_arrive(
    make: Callable[..., Site], tmp_path: Path
) -> None:
    site, go = make(), tmp_path / "go"
    code = f"""
if rank == '0':
    print('step 12', flush=True)
    time.sleep(1000)
with open(os.environ['RELAUNCH_PROGRESS_FILE'], 'w') as file: \
json.dump({{'step': 11, 'loss': 2.5}}, file)
while not os.path.exists({str(go)!r}): time.sleep(0.01)
with open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w') as file: \
json.dump({{'message': 'of rank 1'}}, file)
os._exit(3)
"""
    assert isinstance(await site.launch(python(code), ranks=2), StartedRanks)

    def enough(line: Line) -> bool:
        if steps(line) == {"0": 12, "1": 11}:
            go.touch()
        return False

    lines = await site.watch(enough)
    assert [line["hello"]["ranks"] for line in lines if "hello" in line] == [
        [0, 1]
    ] and "hello" in lines[0]
    first, second = observations(lines)
    assert (first["seq"], first["rank"], first["exit_code"], first["stopped"], first["error"]) == (
        1,
        1,
        3,
        False,
        {"message": "of rank 1", "timestamp": None},
    )
    assert (second["seq"], second["rank"], second["stopped"]) == (2, 0, True)
    assert "end" in lines[-1]
    await _stopped(
        site
    )  # what the ranks print comes through the log driver, after the agent's own lines
    assert "0] step 12" in site.aws.output(site.task["taskArn"], "trainer")


async def test_the_first_heartbeat_of_a_later_watch_has_past_progress(
    make: Callable[..., Site],
) -> None:
    site = make()
    await site.launch(python("print('step 7', flush=True); time.sleep(1000)"))
    await site.watch(lambda line: steps(line) == {"0": 7})
    heartbeats = [
        line for line in await site.watch(lambda line: "heartbeat" in line) if "heartbeat" in line
    ]
    assert steps(heartbeats[0]) == {"0": 7}
    assert heartbeats[0]["heartbeat"]["lease_left"] is None


async def test_the_end_is_reported_once_by_the_first_to_see_it(make: Callable[..., Site]) -> None:
    site = make()
    await site.launch(("sh", "-c", "sleep 0.5; exit 0"), ranks=2)
    lines = await site.watch()
    assert {one["rank"]: one["exit_code"] for one in observations(lines)} == {0: 0, 1: 0}
    assert [one["seq"] for one in observations(lines)] == [1, 2]
    # After the end of the container ECS reports the exits that were not reported before.
    await _stopped(site)
    assert [(one["seq"], one["rank"]) for one in observations(await site.watch(after_seq=1))] == [
        (ECS_SEQ, 0),
        (ECS_SEQ + 1, 1),
    ]
    assert observations(await site.watch(after_seq=ECS_SEQ + 1)) == []


async def _stopped(site: Site) -> None:
    task = site.task["taskArn"]
    assert (await site.backend.cluster.wait_stopped([task], PATIENCE))[task] is not None


@pytest.mark.parametrize("key", [pytest.param(None, marks=pytest.mark.long), "ANOTHER_KEY"])
async def test_an_agent_that_cannot_be_reached_costs_progress_only(
    make: Callable[..., Site],
    key: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(container, "COMPLAIN_AFTER", 0.0)
    caplog.set_level(logging.WARNING)
    site = make()
    worker = site.again(key)
    await site.launch(FOR_EVER, ranks=2)
    beats = iter(range(3))
    lines = await site.watch(
        lambda line: (
            "heartbeat" in line and line["heartbeat"]["alive"] == [0, 1] and next(beats) == 2
        ),
        0,
        worker,
    )
    assert {json.dumps(line["heartbeat"]["progress"]) for line in lines if "heartbeat" in line} == {
        "{}"
    }
    await site.watch(lambda line: "heartbeat" in line, 0, worker)
    (said,) = [
        record.getMessage()
        for record in caplog.records
        if "the agent in task" in record.getMessage()
    ]
    assert "is unreachable" in said and KEY not in said


@pytest.mark.parametrize(
    ("variable", "reason"),
    [
        ("SHORT_KEY", "SHORT_KEY has no private keys in PEM, expected one"),
        ("NO_SUCH_VARIABLE", "NO_SUCH_VARIABLE cannot be read by the worker"),
    ],
)
async def test_a_key_that_the_worker_does_not_have_is_named(
    variable: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHORT_KEY", "short")

    async def address(node: str) -> str:
        return "127.0.0.1"

    agents = container.Agents(SecretReference(env=variable), address)
    async with agents.session(
        "n1", read_task({"taskArn": "a/1", "overrides": WITH_AGENT})
    ) as session:
        with pytest.raises(Unreachable, match=f"ecs.agent_key: variable {reason}"):
            await session.list()


async def test_a_certificate_that_ends_soon_is_warned_of_once(
    make: Callable[..., Site],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    soon = make_key(ends=timedelta(days=20))
    monkeypatch.setenv("KEY_THAT_ENDS", soon)
    site = make(key=soon)
    worker = site.again("KEY_THAT_ENDS")
    await site.launch(python("print('step 7', flush=True); time.sleep(1000)"))
    for _ in range(2):  # a connection each
        await site.watch(lambda line: steps(line) == {"0": 7}, 0, worker)
    (said,) = [
        record.getMessage() for record in caplog.records if "expires at" in record.getMessage()
    ]
    assert said.startswith("ecs.agent_key: the certificate") and soon not in said


@pytest.mark.parametrize(
    ("code", "ranks"), [pytest.param(0, [0, 1], marks=pytest.mark.long), (3, [0])]
)
async def test_of_a_port_that_is_not_there_ecs_tells_the_end(
    make: Callable[..., Site], code: int, ranks: list[int]
) -> None:
    site = make(key="")
    await site.launch(("sh", "-c", f"exit {code}"), ranks=2)
    lines = await site.watch()
    assert [(one["rank"], one["exit_code"], one["seq"]) for one in observations(lines)] == [
        (rank, code, ECS_SEQ + number) for number, rank in enumerate(ranks)
    ]


async def test_the_user_who_stops_a_task_is_reported_from_ecs(make: Callable[..., Site]) -> None:
    site = make()
    await site.launch(("sh", "-c", 'trap "exit 0" TERM; echo step 1; while :; do sleep 0.05; done'))

    async def by_a_person() -> None:
        await site.backend.aws.call(
            "ecs", "StopTask", cluster=site.aws.cluster, task=site.task["taskArn"], reason="enough"
        )

    orders: list[asyncio.Task[None]] = []

    def enough(line: Line) -> bool:
        if steps(line) == {"0": 1} and not orders:
            orders.append(asyncio.create_task(by_a_person()))
        return False

    (end,) = observations(await site.watch(enough))
    assert (end["kind"], end["seq"]) == ("StoppedByUser", ECS_SEQ) and "enough" in end["reason"]
    await orders[0]


async def test_ranks_that_relaunch_stops_are_reported_as_stopped(make: Callable[..., Site]) -> None:
    site, ready = make(), asyncio.Event()
    await site.launch(("sh", "-c", "echo step 1; exec sleep 600"), ranks=2)

    def enough(line: Line) -> bool:
        if steps(line) == {"0": 1, "1": 1}:
            ready.set()
        return False

    watching = asyncio.create_task(site.watch(enough))
    async with asyncio.timeout(PATIENCE):
        await ready.wait()
    assert isinstance(await site.backend.stop("n1", StopOrder(site.token, 1.0, 10.0)), StopProof)
    assert [(one["kind"], one["stopped"]) for one in observations(await watching)] == [
        ("RankExited", True)
    ]


async def test_a_rank_that_is_heard_lives_whatever_aws_does(
    make: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "STALE_POLLS", 3)
    site = make()
    await site.launch(
        python("for step in range(100000): print('step', step, flush=True); time.sleep(0.05)")
    )
    reached: list[int] = []

    def enough(line: Line) -> bool:
        if steps(line) and not reached:
            site.aws.faults.add("DescribeTasks", SERVER_ERROR, times=1000)
        reached.extend(steps(line).values())
        # One step a second arrives: by the third, a watch without an agent has counted as broken.
        return len(set(reached)) >= 3

    assert not any("end" in line for line in await site.watch(enough))


async def test_logs_and_stacks_are_the_agents_while_it_lives(make: Callable[..., Site]) -> None:
    site = make()
    await site.launch(("sh", "-c", "echo step 1; exec sleep 600"))
    await site.watch(lambda line: steps(line) == {"0": 1})
    logs = await site.backend.logs("n1", site.token, None, 65536, 5.0, None)
    assert isinstance(logs, Logs) and [chunk.data for chunk in logs.chunks] == ["step 1\n"]
    stacks = await site.backend.stacks("n1", site.token, 0)
    assert not isinstance(stacks, Refusal) and stacks["stacks"][0]["rank"] == 0
    assert isinstance(await site.backend.stop("n1", StopOrder(site.token, 1.0, 10.0)), StopProof)
    gone = await site.backend.logs("n1", site.token, None, 65536, 0.0, None)
    assert isinstance(gone, Refusal) and "CloudWatch Logs" in gone.reason
    assert isinstance(await site.backend.stacks("n1", site.token, 0), Refusal)


# --- whose word it is


class AnotherAgent:
    """An agent in the task, whose lines are of another generation after an honest hello."""

    def __init__(self, said: list[Line]) -> None:
        self.said = said
        self.sessions = 0
        self.complaints: list[str] = []

    @asynccontextmanager
    async def session(self, node: str, task: Task) -> AsyncIterator[AnotherAgent]:
        self.sessions += 1
        yield self

    @asynccontextmanager
    async def watch(
        self, token: Token, after_seq: int, heartbeat: float
    ) -> AsyncIterator[AnotherAgent]:
        yield self

    async def lines(self) -> AsyncIterator[Line]:
        for line in self.said:
            yield line

    def complain(self, node: str, task: Task, reason: str) -> None:
        self.complaints.append(reason)


@pytest.mark.parametrize(
    "line",
    [
        {"heartbeat": {"stamp": 2.0, "alive": [0], "progress": {"0": {"step": 900, "age": 0.1}}}},
        {"observation": {"seq": 1, "kind": "RankExited", "rank": 0, "local_rank": 0}},
        {"end": {"seq": 0}},
    ],
    ids=["heartbeat", "observation", "end"],
)
async def test_s2_6_an_agent_of_another_container_is_not_believed(
    line: Line, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    monkeypatch.setattr(container, "RETRY", (0.01, 0.02))
    monkeypatch.setattr(container, "COMPLAIN_AFTER", 0.0)
    token = {"namespace": "d", "job": "j", "submission": 1, "generation": 2}
    sender = {"token": token, "node": "n1", "shim": None}
    hello = {"token": token, "boot_id": "b", "state": "running", "ranks": [0], "stamp": 1.0}
    another = {**sender, "token": {**token, "generation": 1}}
    agent: Any = AnotherAgent([{"hello": hello, "sender": sender}, {**line, "sender": another}])
    followed = FollowedTask("a/1")
    task = read_task({"taskArn": "a/1", "lastStatus": "RUNNING", "overrides": WITH_AGENT})
    followed.record_poll(task, None)
    feed = container.Feed(agent, followed, "n1", Token("d", "j", 1, 2), 0, 1.0)
    feed.begin(task)
    async with asyncio.timeout(PATIENCE):
        while agent.sessions < 3:
            await followed.wait_for_change()
    assert feed.next() is None
    assert agent.complaints[0] == snapshot
    await feed.close()


# --- what is ordered


async def test_what_does_not_fit_is_refused_in_a_sentence(make: Callable[..., Site]) -> None:
    refused = await make().launch(FOR_EVER, ranks=200)
    assert isinstance(refused, Refusal) and " 8192" in refused.reason


def test_an_order_says_what_the_environment_does_not() -> None:
    own = tuple(
        {"RANK": str(rank), "NODE_RANK": "1", "CUDA_VISIBLE_DEVICES": str(rank)} for rank in (8, 9)
    )
    start = StartOrder(Token("d", "j", 1, 2), "n2", ("true",), None, {}, own, (), 0.0, "", False)
    text = container.order(start, 29400, 15.0, 10.0)
    assert json.loads(text) == {
        "token": {"namespace": "d", "job": "j", "submission": 1, "generation": 2},
        "node": "n2",
        "ranks": [8, 9],
        "rank_env": [{}, {"RANK": "9"}],
        "log_pattern": None,
        "stop_grace": 15.0,
        "heartbeat": 10.0,
        "port": 29400,
    }
    environment = [{"name": "RANK", "value": "8"}, {"name": container.ORDER, "value": text}]
    task = read_task(
        {
            "taskArn": "a/1",
            "overrides": {"containerOverrides": [{"name": "trainer", "environment": environment}]},
        }
    )
    assert (task.rank, task.ranks, task.port, task.trainer) == (8, (8, 9), 29400, "trainer")
    plain = read_task(
        {
            "taskArn": "a/1",
            "overrides": {
                "containerOverrides": [{"name": "trainer", "environment": environment[:1]}]
            },
        }
    )
    assert (plain.rank, plain.ranks, plain.port) == (8, (8,), None)


@pytest.mark.parametrize(
    ("written", "port"),
    [(None, None), ("29400", 29400), ("1023", ""), ("65536", ""), ("x", ""), ("", "")],
)
def test_the_port_of_a_task_definition_is_one_anybody_may_open(
    written: str | None, port: int | str | None
) -> None:
    environment = [] if written is None else [{"name": container.PORT, "value": written}]
    definition = read_definition(
        {
            "taskDefinitionArn": "train:1",
            "containerDefinitions": [{"name": "c", "environment": environment}],
        }
    )
    if port != "":
        assert container.port_of(definition, "c") == port
        return
    with pytest.raises(
        ValueError,
        match=f"container c of train:1 is '{written}'",
    ):
        container.port_of(definition, "c")
