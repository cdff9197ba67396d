"""Ranks as tasks of ECS, against a double of AWS.

What AWS's documents promise is all that is proven.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import pytest_asyncio

from relaunch.backends.base import (
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
from relaunch.backends.ecs import follow as follow_module
from relaunch.backends.ecs import stream as stream_module
from relaunch.backends.ecs.aws import Aws
from relaunch.backends.ecs.backend import EcsBackend
from relaunch.backends.ecs.launch import stamp
from relaunch.backends.ecs.stream import ECS_SEQ, STALE_POLLS
from relaunch.backends.ecs.tasks import QUARANTINE, build_started_by, job_attribute
from relaunch.generation import Token
from relaunch.spec.fleet import EcsOptions, FleetSpec
from relaunch.spec.job import EcsTask
from tests.doubles.aws import LOST, SERVER_ERROR, THROTTLE, AwsDouble, Delays, error, failure

T = TypeVar("T")
POLL = 0.1
LOGS = {
    "logDriver": "awslogs",
    "options": {"awslogs-group": "/train", "awslogs-stream-prefix": "job"},
}
FOR_EVER = ("sleep", "600")
JOB_NUMBERS = iter(range(1, 10_000))


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AwsDouble]:
    with (
        AwsDouble(
            tmp_path_factory.mktemp("aws"), delays=Delays(stop_timeout=0.3, power_off=0.05)
        ) as double,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in double.environment().items():
            patch.setenv(name, value)
        _share_clients(patch)
        patch.setattr(aws_module, "RATES", {"read": (10_000.0, 100), "modify": (10_000.0, 100)})
        for module in (batch_module, follow_module):
            patch.setattr(module, "GATHER", 0.002)
        patch.setattr(cluster_module, "FIRST_LOOK", 0.05)
        # A busy machine polls late, and must not be mistaken for an AWS that does not answer.
        patch.setattr(stream_module, "STALE_POLLS", 1000.0)
        trainer = {"name": "trainer", "image": "any", "command": ["true"]}
        double.register(
            "train",
            [trainer, {"name": "side", "image": "any", "essential": False, "command": ["true"]}],
            networkMode="host",
        )
        double.register("bridged", [trainer])
        double.register(
            "no-port",
            [{**trainer, "environment": [{"name": "RELAUNCH_AGENT_PORT", "value": "80"}]}],
            networkMode="host",
        )
        double.register("own-address", [trainer], networkMode="awsvpc")
        double.register("two", [trainer, {**trainer, "name": "other"}], networkMode="host")
        double.register("logged", [{**trainer, "logConfiguration": LOGS}], networkMode="host")
        yield double


def _share_clients(patch: pytest.MonkeyPatch) -> None:
    """To make one costs 0.3 s of a core, and there are a hundred workers here."""
    made: dict[str, Any] = {}
    real = aws_module.Aws._client

    def client(aws: aws_module.Aws, service: str) -> Any:
        if service not in made:
            made[service] = real(aws, service)
            aws._clients.clear()  # it outlives this worker
        return made[service]

    patch.setattr(aws_module.Aws, "_client", client)


@pytest.fixture(autouse=True)
def _no_faults(aws: AwsDouble) -> Iterator[None]:
    yield
    aws.faults.clear()
    aws.ecs.scripts.clear()
    aws.ecs.lag = 0.0


class Site:
    """Some instances of their own and a job of their own."""

    def __init__(self, aws: AwsDouble, nodes: int, gpus: int) -> None:
        self.aws = aws
        self.ids = [aws.add_instance(gpus=gpus) for _ in range(nodes)]
        self.job = f"job{next(JOB_NUMBERS)}"
        listed = [
            {"name": f"n{number}", "address": ec2_id, "gpus": gpus}
            for number, ec2_id in enumerate(self.ids, 1)
        ]
        self.spec = FleetSpec.model_validate({"name": "ecs", "backend": "ecs", "nodes": listed})
        self._open: list[EcsBackend] = []
        self.backend = self.again()

    def again(self, poll: float = POLL, settles: float = 0.2, **options: Any) -> EcsBackend:
        """Another worker's."""
        given = EcsOptions(
            **{
                "cluster": self.aws.cluster,
                "task_definition": "train",
                "poll": timedelta(seconds=poll),
                **options,
            }
        )
        self._open.append(EcsBackend(self.spec, given, settles=settles))
        return self._open[-1]

    @property
    def instance(self) -> Any:
        return self.aws.instance(self.ids[0])

    def token(self, generation: int = 1) -> Token:
        return Token("default", self.job, 1763000000000, generation)

    def tasks(self, generation: int | None = None, living: bool = True) -> list[dict[str, Any]]:
        """Of this job, as AWS knows them."""
        found = [task for task in self.aws.tasks() if f"/{self.job}/" in task.get("startedBy", "")]
        if generation is not None:
            found = [
                task
                for task in found
                if task["startedBy"] == build_started_by(self.token(generation))
            ]
        return [task for task in found if not living or task["desiredStatus"] == "RUNNING"]

    async def close(self) -> None:
        for backend in self._open:
            await backend.close()


@pytest_asyncio.fixture
async def make(aws: AwsDouble) -> AsyncIterator[Callable[..., Site]]:
    sites: list[Site] = []

    def made(nodes: int = 1, gpus: int = 0) -> Site:
        sites.append(Site(aws, nodes, gpus))
        return sites[-1]

    yield made
    for site in sites:
        await site.close()


def prepare_order(token: Token, **changes: Any) -> PrepareOrder:
    given: dict[str, Any] = {
        "address": "10.0.0.1",
        "ranks": (0,),
        "lease": 60.0,
        "fence_after": 60.0,
        "stop_grace": 2.0,
        "valid_for": 60.0,
        "heartbeat": 10.0,
        "stuck_after": 5.0,
    }
    return PrepareOrder(token=token, **{**given, **changes})


def start_order(
    token: Token, node: str = "n1", command: Sequence[str] = FOR_EVER, rank: int = 0, **changes: Any
) -> StartOrder:
    given: dict[str, Any] = {
        "command": tuple(command),
        "workdir": None,
        "env": {"WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "10.0.0.1"},
        "rank_env": ({"RANK": str(rank), "RELAUNCH_NODE": node},),
        "peers": (),
        "prepared": stamp(token, node),
        "secret": "",
        "fences": False,
    }
    return StartOrder(token=token, node=node, **{**given, **changes})


def stop_order(token: Token, **changes: Any) -> StopOrder:
    # A machine that starts a whole test run took more than 7 s to end a process.
    return StopOrder(token, **{"stop_grace": 2.0, "stuck_after": 60.0, **changes})


async def launch(
    site: Site,
    generation: int = 1,
    backend: EcsBackend | None = None,
    node: str = "n1",
    **changes: Any,
) -> StartedRanks:
    backend, token = backend or site.backend, site.token(generation)
    done(await backend.prepare(node, prepare_order(token)))
    return done(await backend.start(node, start_order(token, node, **changes)))


def done(answer: T | Refusal) -> T:
    assert not isinstance(answer, Refusal), answer
    return answer


def refusal(answer: object) -> Refusal:
    assert isinstance(answer, Refusal), answer
    return answer


async def until(what: Callable[[], T | Awaitable[T]], within: float = 10.0) -> T:
    end = time.monotonic() + within
    while True:
        found = what()
        value = await found if isinstance(found, Awaitable) else found
        if value:
            return value
        assert time.monotonic() < end, "it did not come to that in time"
        await asyncio.sleep(0.01)


async def read(
    backend: EcsBackend,
    token: Token,
    enough: Callable[[list[Mapping[str, Any]]], bool],
    after_seq: int = 0,
    heartbeat: float = 0.1,
) -> list[Mapping[str, Any]]:
    """Watch until there is enough, or the stream ends."""
    lines: list[Mapping[str, Any]] = []
    async with asyncio.timeout(60), backend.watch("n1", token, after_seq, heartbeat) as stream:
        async for line in stream.lines():
            lines.append(line)
            if enough(lines):
                return lines
    return lines


async def end_of(backend: EcsBackend, token: Token) -> Mapping[str, Any]:
    lines = await read(backend, token, lambda lines: "end" in lines[-1])
    assert "end" in lines[-1] and "observation" in lines[-2], lines
    observation: Mapping[str, Any] = lines[-2]["observation"]
    return observation


# --- a launch


async def test_a_rank_is_one_task_on_its_node_with_the_jobs_command(
    make: Callable[..., Site], aws: AwsDouble
) -> None:
    site = make(nodes=2, gpus=8)
    for node in ("n1", "n2"):
        await launch(
            site,
            node=node,
            rank=int(node == "n2"),
            gpus=4,
            command=("sh", "-c", "env; sleep 600"),
            **_with("CUDA_VISIBLE_DEVICES", "0"),
        )
    tasks = {task["containerInstanceArn"]: task for task in site.tasks()}
    assert set(tasks) == {aws.instance(ec2_id).arn for ec2_id in site.ids}
    task = tasks[site.instance.arn]
    assert task["startedBy"] == build_started_by(site.token())
    assert len(next(one for one in task["containers"] if one["name"] == "trainer")["gpuIds"]) == 4
    printed = await until(lambda: aws.output(task["taskArn"], "trainer"))
    assert (
        "RANK=0" in printed
        and f"RELAUNCH_TOKEN={site.token()}" in printed
        and "CUDA_VISIBLE_DEVICES" not in printed
    )


def _with(name: str, value: str) -> dict[str, Any]:
    return {"env": {"GROUP_WORLD_SIZE": "2", name: value}}


async def test_a_prepared_node_is_found_by_its_private_address(
    make: Callable[..., Site],
) -> None:
    site = make()
    assert site.backend.node("n1").network is None
    prepared = done(await site.backend.prepare("n1", prepare_order(site.token())))
    network = site.backend.node("n1").network
    assert network is not None and network.startswith("127.0.0.")
    assert 20000 <= prepared.master_port < 30000 and prepared.boot_id


async def test_another_worker_prepares_the_same_and_starts_none_twice(
    make: Callable[..., Site],
) -> None:
    site = make()
    prepared = done(await site.backend.prepare("n1", prepare_order(site.token())))
    assert not done(await site.backend.start("n1", start_order(site.token()))).already
    other = site.again()
    assert done(await other.prepare("n1", prepare_order(site.token()))) == prepared
    assert done(await other.start("n1", start_order(site.token(), command=("other",)))).already
    assert len(site.tasks(living=False)) == 1


async def test_a_start_of_another_preparation_or_of_none_is_refused(
    make: Callable[..., Site],
) -> None:
    site = make()
    assert refusal(await site.backend.start("n1", start_order(site.token()))).why == "not_prepared"
    done(await site.backend.prepare("n1", prepare_order(site.token())))
    assert (
        refusal(await site.backend.start("n1", start_order(site.token(), prepared=1.0))).why
        == "expired"
    )
    assert site.tasks(living=False) == []


async def test_a_generation_is_launched_once(make: Callable[..., Site]) -> None:
    site = make()
    await launch(site, command=("true",))
    await until(lambda: not site.tasks())
    await until(lambda: all(task["lastStatus"] == "STOPPED" for task in site.tasks(living=False)))
    again = refusal(await site.backend.prepare("n1", prepare_order(site.token())))
    assert (again.why, again.highest) == ("not_above", (1763000000000, 1))


async def test_a_higher_generation_stops_lower_ones_and_outranks_them(
    make: Callable[..., Site],
) -> None:
    site = make()
    await launch(site, 1)
    await launch(site, 2)
    assert [task["startedBy"] for task in site.tasks()] == [build_started_by(site.token(2))]
    late = refusal(await site.again().prepare("n1", prepare_order(site.token(1))))
    assert (late.why, late.highest) == ("not_above", (1763000000000, 2))
    assert refusal(await site.backend.start("n1", start_order(site.token(1)))).why == "not_above"
    assert [task["startedBy"] for task in site.tasks()] == [build_started_by(site.token(2))]


async def test_a_controller_whose_word_comes_late_takes_it_back(
    make: Callable[..., Site], aws: AwsDouble
) -> None:
    site = make()
    slow, quick = site.again(), site.again()
    held, go_on = asyncio.Event(), asyncio.Event()
    real = slow.cluster.put_attributes

    async def frozen(arn: str, attributes: Mapping[str, str | None]) -> None:
        held.set()
        await go_on.wait()
        await real(arn, attributes)

    slow.cluster.put_attributes = frozen  # type: ignore[method-assign]
    late = asyncio.create_task(slow.prepare("n1", prepare_order(site.token(1))))
    await held.wait()
    await launch(site, 2, quick)
    go_on.set()
    assert refusal(await late).why == "not_above"
    attributes = (await quick.cluster.instance(site.ids[0])).attributes
    assert attributes[job_attribute("default", site.job)] == "prepared.1763000000000.2"
    assert len(site.tasks(2)) == 1


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        (
            {"rank_env": ({"RANK": "0"}, {"RANK": "1"})},
            {},
            "nproc_per_node must be 1",
        ),
        (
            {"ecs": EcsTask(task_definition="no-port")},
            {},
            "RELAUNCH_AGENT_PORT of container trainer",
        ),
        ({"workdir": "/work"}, {}, "workdir '/work'"),
        (
            {"secrets": {"KEY": "x"}},
            {},
            "secrets",
        ),
        ({"inherit_env": False}, {}, "inherit_env"),
        ({"umask": "027"}, {}, "umask"),
        ({"separate_stderr": True}, {}, "output: separate"),
        ({"limits": {"nofile": 300}}, {}, "set limits"),
        (
            {},
            {"task_definition": None},
            "neither the job file",
        ),
        ({}, {"task_definition": "none"}, "task definition 'none'"),
        ({}, {"task_definition": "two"}, "(trainer, other)"),
        ({"ecs": EcsTask(container="x")}, {}, "container 'x'"),
        ({"ecs": EcsTask(task_definition="own-address")}, {}, "networkMode awsvpc"),
        (
            {"ecs": EcsTask(task_definition="bridged"), "env": {"GROUP_WORLD_SIZE": "2"}},
            {},
            "networkMode bridge",
        ),
        ({"env": {"LONG": "x" * 9000}}, {}, " 8192"),
    ],
)
async def test_what_a_task_cannot_be_is_refused_in_a_sentence(
    make: Callable[..., Site], changes: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    site = make()
    backend = site.again(**options)
    refused = refusal(await backend.start("n1", start_order(site.token(), **changes)))
    assert refused.why == "cannot_start" and reason in refused.reason
    assert site.tasks(living=False) == []


async def test_a_name_that_does_not_fit_is_refused_before_any_request(
    make: Callable[..., Site],
) -> None:
    site = make()
    long = Token("n" * 63, "j" * 63, 1763000000000, 1)
    assert "shorter name" in refusal(await site.backend.prepare("n1", prepare_order(long))).reason
    assert not site.backend.aws.calls


async def test_a_job_of_one_node_behind_a_bridge_finds_itself(
    make: Callable[..., Site], aws: AwsDouble
) -> None:
    site = make()
    await launch(
        site,
        ecs=EcsTask(task_definition="bridged"),
        command=("sh", "-c", "echo at $MASTER_ADDR, $PYTHONUNBUFFERED; sleep 600"),
    )
    printed = await until(lambda: aws.output(site.tasks()[0]["taskArn"], "trainer"))
    assert printed == "at 127.0.0.1, 1\n"


async def test_gpus_that_others_have_are_refused_as_held(make: Callable[..., Site]) -> None:
    site = make(gpus=8)
    await launch(site, gpus=8)
    job, site.job = site.job, "other"
    done(await site.backend.prepare("n1", prepare_order(site.token())))
    refused = refusal(await site.backend.start("n1", start_order(site.token(), gpus=1)))
    assert refused.why == "held" and "RESOURCE:GPU" in refused.reason
    site.job = job
    assert len(site.tasks()) == 1


async def test_a_node_that_takes_no_tasks_says_why(
    make: Callable[..., Site], aws: AwsDouble
) -> None:
    site = make()
    backend, arn = site.backend, site.instance.arn
    await backend.cluster.put_attributes(arn, {QUARANTINE: "true"})
    assert (
        "relaunch.quarantine"
        in refusal(await backend.prepare("n1", prepare_order(site.token()))).reason
    )
    await backend.cluster.put_attributes(arn, {QUARANTINE: None})
    state = {"cluster": aws.cluster, "containerInstances": [arn]}
    await backend.aws.call("ecs", "UpdateContainerInstancesState", status="DRAINING", **state)
    refused = refusal(await backend.prepare("n1", prepare_order(site.token())))
    assert "DRAINING" in refused.reason
    await backend.aws.call("ecs", "UpdateContainerInstancesState", status="ACTIVE", **state)
    site.instance.disconnect()
    with pytest.raises(Unreachable, match=r"the ECS agent of i-\w+ is not connected"):
        await backend.prepare("n1", prepare_order(site.token()))
    site.instance.connect()
    # Between the two rounds of a launch: ECS itself places nothing there.
    done(await backend.prepare("n1", prepare_order(site.token())))
    await backend.cluster.put_attributes(arn, {QUARANTINE: "true"})
    assert refusal(await backend.start("n1", start_order(site.token()))).why == "held"
    assert site.tasks(living=False) == []


async def test_a_mark_that_the_fleet_has_yet_to_remove_delays_no_job(
    make: Callable[..., Site],
) -> None:
    site = make()
    await site.backend.cluster.put_attributes(site.instance.arn, {QUARANTINE: site.spec.name})
    done(await site.backend.prepare("n1", prepare_order(site.token())))
    assert not done(await site.backend.start("n1", start_order(site.token()))).already
    assert len(site.tasks()) == 1


async def test_a_machine_without_container_instance_is_unreachable(
    make: Callable[..., Site], aws: AwsDouble
) -> None:
    site = make()
    bare = aws.add_instance(gpus=0, registered=False)
    spec = FleetSpec.model_validate(
        {"name": "bare", "backend": "ecs", "nodes": [{"name": "n1", "address": bare}]}
    )
    backend = EcsBackend(spec, EcsOptions(cluster=aws.cluster, task_definition="train"))
    for call in (
        backend.prepare("n1", prepare_order(site.token())),
        backend.list("n1"),
        backend.stop("n1", stop_order(site.token())),
    ):
        with pytest.raises(
            Unreachable, match="no container instance of ECS cluster training is i-"
        ):
            await call
    await backend.close()


async def test_a_machine_unknown_to_ec2_ended_only_if_others_are_known(
    make: Callable[..., Site],
) -> None:
    """With credentials of another account, EC2 and a cluster of that name know nothing of it."""
    site = make()
    forgotten = [{"name": name, "address": f"i-{name * 9}"} for name in ("a", "b")]
    (known,) = [{"name": node.name, "address": node.address} for node in site.spec.nodes]
    for nodes, is_proof in ((forgotten, False), ([*forgotten, known], True)):
        spec = FleetSpec.model_validate({"name": "ecs", "backend": "ecs", "nodes": nodes})
        backend = EcsBackend(spec, EcsOptions(cluster=site.aws.cluster, task_definition="train"))
        if is_proof:
            assert isinstance(await backend.stop("a", stop_order(site.token())), StopProof)
        else:
            with pytest.raises(Unreachable, match="EC2 knows no machine of the fleet"):
                await backend.stop("a", stop_order(site.token()))
        await backend.close()


async def test_a_node_that_left_the_fleet_file_is_unreachable(make: Callable[..., Site]) -> None:
    site = make()
    for call in (
        site.backend.prepare("n9", prepare_order(site.token())),
        site.backend.list("n9"),
        site.backend.stop("n9", stop_order(site.token())),
        site.backend.probe("n9", 1.0, None),
    ):
        with pytest.raises(Unreachable, match="it is in the fleet file no more"):
            await call


async def test_a_fleet_that_names_no_cluster_has_no_backend(make: Callable[..., Site]) -> None:
    with pytest.raises(ValueError, match=r"fleet ecs: ecs\.cluster is missing"):
        EcsBackend(make().spec, EcsOptions())


async def test_jobs_that_were_on_a_node_do_not_use_up_its_attributes(
    make: Callable[..., Site],
) -> None:
    site = make()
    await launch(site)
    kept = job_attribute("default", site.job)
    for number in range(9):
        other = Token("default", f"{site.job}-{number}", 1763000000001 + number, 1)
        done(await site.backend.prepare("n1", prepare_order(other)))
    attributes = (await site.backend.cluster.instance(site.ids[0])).attributes
    ours = [name for name in attributes if name.startswith("relaunch.")]
    assert len(ours) == 7 and kept in ours  # 10 are all that ECS takes


# --- what AWS may do to a call


async def test_a_lost_answer_of_run_task_is_ambiguous_and_then_found(
    make: Callable[..., Site], aws: AwsDouble
) -> None:
    site = make()
    done(await site.backend.prepare("n1", prepare_order(site.token())))
    aws.faults.add("RunTask", LOST)
    with pytest.raises(Unreachable):
        await site.backend.start("n1", start_order(site.token()))
    assert done(await site.again().start("n1", start_order(site.token()))).already
    assert len(site.tasks(living=False)) == 1


async def test_a_task_missing_in_lists_is_found_by_its_client_token(
    make: Callable[..., Site], aws: AwsDouble
) -> None:
    site = make()
    done(await site.backend.prepare("n1", prepare_order(site.token())))
    aws.ecs.lag = 60.0
    done(await site.backend.start("n1", start_order(site.token())))
    for command in (FOR_EVER, ("sleep", "601")):
        # Other words under the same name: for an attempt before this one, rank 0 had another
        # address.
        assert isinstance(
            await site.again().start("n1", start_order(site.token(), command=command)), StartedRanks
        )
    assert len(site.tasks(living=False)) == 1
    assert aws.calls["RunTask"] >= 3


async def test_a_new_task_missing_in_lists_is_watched_and_stopped(
    make: Callable[..., Site], aws: AwsDouble
) -> None:
    site = make()
    done(await site.backend.prepare("n1", prepare_order(site.token())))
    aws.ecs.lag = 0.15
    done(await site.backend.start("n1", start_order(site.token())))
    for _ in range(2):
        backend = site.again(settles=60.0)  # it waits no longer than the task is missing
        lines = await read(backend, site.token(), lambda lines: "heartbeat" in lines[-1])
        assert lines[0]["hello"]["ranks"] == [0]
    done(await site.backend.prepare("n1", prepare_order(site.token(2))))
    done(await site.backend.start("n1", start_order(site.token(2))))
    assert isinstance(await site.again().stop("n1", stop_order(site.token(2))), StopProof)
    assert site.tasks() == []
    await launch(site, 3)
    done(await site.again().prepare("n1", prepare_order(site.token(4))))
    assert site.tasks() == []


@pytest.mark.parametrize("fault", [THROTTLE, SERVER_ERROR, LOST])
async def test_s1_9_an_answer_that_aws_does_not_give_is_never_assumed(
    make: Callable[..., Site], aws: AwsDouble, fault: Any
) -> None:
    site = make()
    for operation in ("ListContainerInstances", "PutAttributes", "RunTask"):
        aws.faults.add(operation, fault)
    for _ in range(2):
        with pytest.raises(Unreachable):
            await site.backend.prepare("n1", prepare_order(site.token()))
    done(await site.backend.prepare("n1", prepare_order(site.token())))
    with pytest.raises(Unreachable):
        await site.backend.start("n1", start_order(site.token()))
    done(await site.backend.start("n1", start_order(site.token())))
    for operation in ("ListTasks", "StopTask"):
        aws.faults.add(operation, fault)
        with pytest.raises(Unreachable):
            await site.backend.stop("n1", stop_order(site.token()))
    assert isinstance(await site.backend.stop("n1", stop_order(site.token())), StopProof)
    assert site.tasks() == [] and len(site.tasks(living=False)) == 1


async def test_what_aws_refuses_to_relaunch_is_no_fault_of_the_node(
    make: Callable[..., Site], aws: AwsDouble
) -> None:
    site = make()
    aws.faults.add(
        "PutAttributes",
        error("AccessDeniedException", "not authorized to perform ecs:PutAttributes"),
    )
    refused = refusal(await site.backend.prepare("n1", prepare_order(site.token())))
    assert refused.why == "refused_by_aws" and "ecs:PutAttributes" in refused.reason
    done(await site.backend.prepare("n1", prepare_order(site.token())))
    aws.faults.add("RunTask", error("InvalidParameterException", "no"))
    assert refusal(await site.backend.start("n1", start_order(site.token()))).why == "cannot_start"
    aws.faults.add("RunTask", failure("AGENT"))
    with pytest.raises(Unreachable, match="AGENT"):
        await site.backend.start("n1", start_order(site.token()))
    aws.faults.add("RunTask", failure("ATTRIBUTE"))
    assert refusal(await site.backend.start("n1", start_order(site.token()))).why == "held"


async def test_a_run_task_that_arrives_after_a_stop_places_nothing(
    make: Callable[..., Site],
) -> None:
    site = make()
    slow = site.again()
    held, go_on = asyncio.Event(), asyncio.Event()
    real = slow.cluster.run

    async def frozen(request: Mapping[str, Any], at: str = "") -> Any:
        held.set()
        await go_on.wait()
        return await real(request, at)

    slow.cluster.run = frozen  # type: ignore[method-assign]
    done(await slow.prepare("n1", prepare_order(site.token())))
    starting = asyncio.create_task(slow.start("n1", start_order(site.token())))
    await held.wait()
    assert isinstance(await site.backend.stop("n1", stop_order(site.token())), StopProof)
    go_on.set()
    assert refusal(await starting).why == "stopped"
    assert site.tasks(living=False) == []


# --- workers that die


class Killed(Exception):
    """A worker ends here."""


def dies_at(backend: EcsBackend, call: int | str, *, applied: bool) -> list[str]:
    """Kill it at its nth call, or at the first of an operation; return what it calls.

    Before or after AWS has applied it.
    """
    made: list[str] = []
    real = backend.aws.call

    async def counted(service: str, operation: str, **request: Any) -> dict[str, Any]:
        made.append(operation)
        now = len(made) - 1 == call or (operation == call and made.count(operation) == 1)
        if now and not applied:
            raise Killed
        answer = await real(service, operation, **request)
        if now:
            raise Killed
        return answer

    backend.aws.call = counted  # type: ignore[method-assign]
    return made


async def _life(site: Site, backend: EcsBackend, stages: list[str]) -> None:
    """A launch above an older generation, and its stop."""
    done(await backend.prepare("n1", prepare_order(site.token(2))))
    stages.append("prepared")
    done(await backend.start("n1", start_order(site.token(2))))
    stages.append("started")
    assert isinstance(await backend.stop("n1", stop_order(site.token(2))), StopProof)


async def _dies_and_is_replaced(site: Site, call: int | str, applied: bool) -> None:
    await launch(site, 1)
    first, done_by = site.again(), []
    dies_at(first, call, applied=applied)
    with pytest.raises(Killed):
        await _life(site, first, done_by)
    second = site.again()
    if len(done_by) < 2:
        done(await second.prepare("n1", prepare_order(site.token(2))))
        assert site.tasks(1) == []
        done(await second.start("n1", start_order(site.token(2))))
        assert len(site.tasks(2, living=False)) == 1, f"{call} applied={applied}"
    assert isinstance(await second.stop("n1", stop_order(site.token(2))), StopProof)
    assert site.tasks() == [], f"{call} applied={applied}"
    assert len(site.tasks(2, living=False)) == 1


@pytest.mark.parametrize("applied", [False, True])
async def test_s1_11_a_worker_dead_at_any_effect_leaves_single_tasks(
    make: Callable[..., Site], applied: bool
) -> None:
    for operation in ("PutAttributes", "StopTask", "RunTask"):
        await _dies_and_is_replaced(make(), operation, applied)


@pytest.mark.long
async def test_a_worker_dead_between_any_two_calls_leaves_single_tasks(
    make: Callable[..., Site],
) -> None:
    site = make()
    await launch(site, 1)
    counted = dies_at(site.backend, -1, applied=False)
    await _life(site, site.backend, [])
    # Followed tasks are looked at more or less often: the calls up to the last effect are the same
    # each time.
    last = max(index for index, operation in enumerate(counted) if operation == "StopTask")
    assert last > 20
    for call in range(last + 1):
        for applied in (False, True):
            await _dies_and_is_replaced(make(), call, applied)


async def test_a_launch_that_died_before_any_task_is_stopped_for_ever(
    make: Callable[..., Site],
) -> None:
    site = make()
    done(await site.backend.prepare("n1", prepare_order(site.token())))
    assert isinstance(await site.again().stop("n1", stop_order(site.token())), StopProof)
    assert refusal(await site.backend.start("n1", start_order(site.token()))).why == "stopped"
    assert refusal(await site.backend.prepare("n1", prepare_order(site.token()))).why == "stopped"
    await launch(site, 2)
    assert isinstance(await site.backend.stop("n1", stop_order(site.token(1))), StopProof)
    assert len(site.tasks(2)) == 1


# --- stops


async def test_s1_2_a_stop_ends_when_ecs_says_stopped_or_knows_no_task(
    make: Callable[..., Site],
) -> None:
    site = make()
    await launch(site)
    assert isinstance(await site.backend.stop("n1", stop_order(site.token())), StopProof)
    (task,) = site.tasks(living=False)
    assert (task["lastStatus"], task["stoppedReason"]) == ("STOPPED", f"relaunch: {site.token()}")
    assert isinstance(await site.again().stop("n1", stop_order(site.token())), StopProof)


async def test_a_task_that_sigkill_does_not_end_is_stuck(
    make: Callable[..., Site], aws: AwsDouble
) -> None:
    site = make()
    aws.script(lambda task: f"/{site.job}/" in task["startedBy"], after=None, stuck=True)
    await launch(site)
    refused = refusal(
        await site.backend.stop("n1", stop_order(site.token(), stop_grace=0.1, stuck_after=0.4))
    )
    assert refused.why == "stuck" and "not stop task" in refused.reason


async def test_a_stop_on_a_silent_machine_is_ambiguous_until_it_ends(
    make: Callable[..., Site], aws: AwsDouble
) -> None:
    site = make()
    await launch(site)
    site.instance.disconnect()
    order = stop_order(site.token(), stop_grace=0.1, stuck_after=0.2)
    with pytest.raises(
        Unreachable,
        match="ECS agent is not connected, and 1 of its tasks",
    ):
        await site.backend.stop("n1", order)
    await site.backend.aws.call("ec2", "TerminateInstances", InstanceIds=[site.ids[0]])
    await until(lambda: _is_gone(site, order))


async def _is_gone(site: Site, order: StopOrder) -> bool:
    try:
        return isinstance(await site.backend.stop("n1", order), StopProof)
    except Unreachable:
        return False


# --- watches


@pytest.mark.parametrize("code", [0, 3])
async def test_s1_1_a_rank_that_exits_is_reported_with_its_exit_code(
    make: Callable[..., Site], code: int
) -> None:
    site = make()
    await launch(site, command=("sh", "-c", f"exit {code}"))
    told = await end_of(site.backend, site.token())
    assert (told["kind"], told["rank"], told["exit_code"], told["stopped"]) == (
        "RankExited",
        0,
        code,
        False,
    )
    assert told["ecs"]["stop_code"] == "EssentialContainerExited"
    assert await end_of(site.again(), site.token()) == {
        **told,
        "at": pytest.approx(told["at"], abs=60),
        "stamp": pytest.approx(told["stamp"], abs=60),
    }
    assert [
        list(line)
        for line in await read(site.backend, site.token(), lambda lines: False, after_seq=ECS_SEQ)
    ] == [["hello"], ["end"]]


async def test_s1_1_what_ended_a_task_is_reported_without_exit_code(
    make: Callable[..., Site], aws: AwsDouble
) -> None:
    table: list[tuple[dict[str, Any], int | None, str, str]] = [
        (
            {"exit_code": 137, "reason": "OutOfMemoryError: Container killed due to memory usage"},
            137,
            "EssentialContainerExited",
            "OutOfMemory",
        ),
        ({"exit_code": 139}, 139, "EssentialContainerExited", ""),
        ({"exit_code": None}, None, "EssentialContainerExited", ""),
        ({"stop_code": "SpotInterruption", "exit_code": 143}, 143, "SpotInterruption", ""),
        (
            {"stop_code": "TaskFailedToStart", "reason": "CannotPullContainerError: not found"},
            None,
            "TaskFailedToStart",
            "CannotPull",
        ),
    ]
    for script, code, stop_code, reason in table:
        site = make()
        aws.script(lambda task, job=site.job: f"/{job}/" in task["startedBy"], **script)
        await launch(site)
        told = await end_of(site.backend, site.token())
        assert (told["kind"], told["exit_code"], told["ecs"]["stop_code"]) == (
            "RankExited",
            code,
            stop_code,
        ), script
        assert reason in told["ecs"]["reason"]


async def test_s1_1_a_stop_by_a_user_is_distinguished_from_ours(
    make: Callable[..., Site], aws: AwsDouble
) -> None:
    site = make(nodes=1)
    await launch(site)
    await site.backend.aws.call(
        "ecs",
        "StopTask",
        cluster=aws.cluster,
        task=site.tasks()[0]["taskArn"],
        reason="I need the node",
    )
    told = await end_of(site.backend, site.token())
    assert (told["kind"], told["by"]) == ("StoppedByUser", "ECS") and told["reason"].endswith(
        "need the node"
    )
    await launch(site, 2)
    assert isinstance(await site.again().stop("n1", stop_order(site.token(2))), StopProof)
    ours = await end_of(site.backend, site.token(2))
    assert (ours["kind"], ours["stopped"]) == ("RankExited", True)


async def test_a_rank_that_fails_brings_the_last_lines_that_it_printed(
    make: Callable[..., Site],
) -> None:
    site = make()
    await launch(
        site,
        ecs=EcsTask(task_definition="logged"),
        command=("sh", "-c", "echo one; echo RuntimeError: two; exit 1"),
    )
    told = await end_of(site.backend, site.token())
    assert told["log_tail"] == ["one", "RuntimeError: two"]
    where = refusal(await site.backend.logs("n1", site.token(), None, 1000, 0.0, None))
    assert "/train" in where.reason and "job/trainer/" in where.reason


async def test_a_watch_says_hello_and_beats_while_ecs_is_seen(make: Callable[..., Site]) -> None:
    site = make()
    await launch(site)
    lines = await read(
        site.backend, site.token(), lambda lines: sum("heartbeat" in line for line in lines) == 3
    )
    assert [next(iter(line)) for line in lines] == ["hello", "heartbeat", "heartbeat", "heartbeat"]
    assert lines[0]["hello"]["token"]["generation"] == 1
    assert lines[-1]["heartbeat"]["alive"] == [0] and lines[-1]["heartbeat"]["lease_left"] is None


async def test_s1_9_a_task_that_is_hinted_at_is_looked_at_at_once(
    make: Callable[..., Site], aws: AwsDouble
) -> None:
    site = make()
    backend = site.again(poll=60.0)
    await launch(site, backend=backend)
    arn = site.tasks()[0]["taskArn"]
    assert not backend.cluster.hint(arn)  # no watch is open
    async with asyncio.timeout(60), backend.watch("n1", site.token(), 0, 60.0) as stream:
        lines = stream.lines()
        assert "hello" in await anext(lines) and "heartbeat" in await anext(lines)
        following = asyncio.ensure_future(anext(lines))
        await aws_stops(site, arn)
        assert backend.cluster.hint(arn)
        assert (await following)["observation"]["kind"] == "StoppedByUser"


async def aws_stops(site: Site, arn: str) -> None:
    await site.backend.aws.call(
        "ecs", "StopTask", cluster=site.aws.cluster, task=arn, reason="a person"
    )
    await until(
        lambda: any(
            task["taskArn"] == arn and task["lastStatus"] == "STOPPED"
            for task in site.tasks(living=False)
        )
    )


async def test_s1_9_an_aws_that_does_not_answer_is_no_news_of_a_node(
    make: Callable[..., Site], aws: AwsDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = make()
    await launch(site)
    seen: list[Mapping[str, Any]] = []
    throttled: list[Any] = []

    async def watched() -> None:
        async with site.backend.watch("n1", site.token(), 0, 0.02) as stream:
            async for line in stream.lines():
                seen.append(line)

    async def throttle() -> None:
        await until(lambda: len(seen) == 3)
        aws.faults.add(
            "DescribeTasks", THROTTLE, times=None, when=lambda call: not throttled.append(call)
        )
        await until(lambda: throttled)
        monkeypatch.setattr(stream_module, "STALE_POLLS", STALE_POLLS)

    async def silent() -> None:
        async with asyncio.timeout(60):
            await asyncio.gather(watched(), throttle())

    with pytest.raises(Unreachable, match="ThrottlingException"):
        await silent()
    assert {next(iter(line)) for line in seen} == {"hello", "heartbeat"}
    assert len(seen) < 13  # after 1.5 polls what was seen is old; 7 beats are as long
    aws.faults.clear()
    monkeypatch.setattr(stream_module, "STALE_POLLS", 1000.0)
    lines = await read(site.backend, site.token(), lambda lines: "heartbeat" in lines[-1])
    assert "hello" in lines[0]


async def test_s1_6_an_agent_away_briefly_is_no_news_but_then_silence(
    make: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is brief is set by hand, so that a busy machine does not decide it.
    monkeypatch.setattr(stream_module, "AGENT_FLAPS", 1000.0)
    site = make()
    await launch(site)
    async with asyncio.timeout(60), site.backend.watch("n1", site.token(), 0, 0.05) as stream:
        lines = stream.lines()
        await anext(lines)
        site.instance.disconnect()
        for _ in range(4):
            assert "heartbeat" in await anext(lines)
        site.instance.connect()
        await until(lambda: _connected(site))
        assert "heartbeat" in await anext(lines)
        monkeypatch.setattr(stream_module, "AGENT_FLAPS", 0.6)
        site.instance.disconnect()
        with pytest.raises(Unreachable, match=r"the ECS agent of i-\w+ has not been connected for"):
            assert {next(iter(line)) async for line in lines} == {"heartbeat"}
    with pytest.raises(Unreachable, match="has not been connected"):
        await read(site.backend, site.token(), lambda lines: True)
    site.instance.connect()
    assert "hello" in (await until(lambda: _greeted(site)))[0]
    assert len(site.tasks()) == 1


async def _greeted(site: Site) -> list[Mapping[str, Any]]:
    """Connect again until it answers, as a worker does that follows a node."""
    try:
        return await read(site.backend, site.token(), lambda lines: "heartbeat" in lines[-1])
    except Unreachable:
        return []


async def _connected(site: Site) -> bool:
    return site.backend.cluster.silent_for(site.instance.arn) == 0.0


@pytest.mark.parametrize("operation", ["TerminateInstances", "StopInstances"])
async def test_a_machine_that_ec2_has_ended_took_its_rank_with_it(
    make: Callable[..., Site], operation: str
) -> None:
    site = make()
    await launch(site)
    ended, told = False, None
    async with asyncio.timeout(120):
        while told is None:
            # A double that is slow for a moment ends a watch, and an activity opens the next one.
            with contextlib.suppress(Unreachable):
                async with site.backend.watch("n1", site.token(), 0, 0.1) as stream:
                    async for line in stream.lines():
                        if not ended:
                            await site.backend.aws.call("ec2", operation, InstanceIds=[site.ids[0]])
                            ended = True
                        if told := line.get("observation"):
                            break
    words = told["reason"] if told["kind"] == "RanksVanished" else told["ecs"]["reason"]
    assert ("stopped" in words or "terminated" in words) and site.ids[0] in words
    assert told["kind"] == "RanksVanished" or told["exit_code"] != 0


async def test_a_task_that_ecs_has_forgotten_is_unknown_and_no_success(
    make: Callable[..., Site], aws: AwsDouble
) -> None:
    site = make()
    await launch(site, command=("true",))
    await until(lambda: all(task["lastStatus"] == "STOPPED" for task in site.tasks(living=False)))
    aws.expire(site.tasks(living=False)[0]["taskArn"])
    for backend, words in (
        (site.backend, "does not know task"),
        (site.again(), "knows no task of"),
    ):
        told = await end_of(backend, site.token())
        assert told["kind"] == "RanksVanished" and words in told["reason"]


async def test_a_machine_registered_again_is_found_with_its_tasks(
    make: Callable[..., Site],
) -> None:
    site = make()
    await launch(site)
    new = site.instance.reregister()
    instance = await until(lambda: _registered(site, new))
    assert instance.arn == new
    assert [task.started_by for task in await site.backend.cluster.tasks_on(site.ids[0])] == [
        build_started_by(site.token())
    ]


async def is_unreachable(site: Site, generation: int, match: str, **order: Any) -> None:
    with pytest.raises(Unreachable, match=match):
        await site.again().stop("n1", stop_order(site.token(generation), **order))
    with pytest.raises(Unreachable, match=match):
        await site.again().prepare("n1", prepare_order(site.token(generation + 1)))


async def launch_and_forget(site: Site) -> str:
    """Launch a task; have its ECS agent lose its memory and register the machine again.

    Return the container instance that has the task and no agent any more.
    """
    await launch(site)
    await until(lambda: site.tasks()[0]["lastStatus"] == "RUNNING")
    ghost, new = site.instance.arn, site.instance.reregister(reboots=False)
    await until(lambda: _registered(site, new))
    return ghost


async def deregister(site: Site, aws: AwsDouble, arn: str) -> None:
    gone = {"cluster": aws.cluster, "containerInstance": arn, "force": True}
    await site.backend.aws.call("ecs", "DeregisterContainerInstance", **gone)


@pytest.mark.parametrize("is_tried", [False, True], ids=["at once", "after a stop"])
async def test_a_task_deregistered_by_force_is_not_proven_stopped(
    make: Callable[..., Site], aws: AwsDouble, is_tried: bool
) -> None:
    """Its agent has lost its memory, and an operator removes what is left of that in ECS."""
    site = make()
    ghost = await launch_and_forget(site)
    new, pid = site.instance.arn, aws.pids(site.tasks(living=False)[0]["taskArn"])["trainer"]
    if is_tried:  # it leaves its word on the machine, and its reason in the task
        stuck = stop_order(site.token(), stop_grace=0.1, stuck_after=0.2)
        assert refusal(await site.backend.stop("n1", stuck)).why == "stuck"
    await deregister(site, aws, ghost)
    (task,) = site.tasks(living=False)
    assert task["lastStatus"] == "STOPPED" and _lives(pid)
    told = await end_of(site.backend, site.token())
    assert (told["kind"], told["exit_code"]) == ("RankExited", None)
    may_run = "it may be ranks, up to generation 1; stop and start i-"
    await is_unreachable(site, 1, may_run)
    aws.expire(task["taskArn"])  # what ECS has forgotten, the machine has not
    await is_unreachable(site, 1, may_run)
    await is_unreachable(site, 2, may_run)
    # A job that was never there is not held up.
    other = make()
    other.ids, other.spec = site.ids, site.spec
    assert isinstance(await other.again().stop("n1", stop_order(other.token())), StopProof)
    await restart(site)
    assert not _lives(pid)
    await until(lambda: _registered(site, new))
    assert isinstance(await site.again().stop("n1", stop_order(site.token())), StopProof)
    assert refusal(await site.backend.prepare("n1", prepare_order(site.token()))).why == "stopped"
    await launch(site, 2)


async def test_a_stopped_task_on_fargate_keeps_no_job_from_a_node(
    make: Callable[..., Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service was scaled in before its task had started: it has no container instance."""
    site = make()
    arn = "arn:aws:ecs:eu-central-1:123456789012:task/training/0123456789abcdef0123456789abcdef"
    foreign = {
        "taskArn": arn,
        "startedBy": "ecs-svc/1234567890",
        "launchType": "FARGATE",
        "lastStatus": "STOPPED",
        "desiredStatus": "STOPPED",
        "stopCode": "ServiceSchedulerInitiated",
        "containers": [{"name": "web"}],
    }
    call = Aws.call

    async def call_with_foreign(
        self: Aws, service: str, operation: str, **request: Any
    ) -> dict[str, Any]:
        if operation == "DescribeTasks" and arn in request["tasks"]:
            others = [one for one in request["tasks"] if one != arn]
            known = (
                await call(self, service, operation, **{**request, "tasks": others})
                if others
                else {}
            )
            return {**known, "tasks": [*known.get("tasks", ()), foreign]}
        answer = await call(self, service, operation, **request)
        if operation == "ListTasks" and request.get("desiredStatus") == "STOPPED":
            answer = {**answer, "taskArns": [*answer["taskArns"], arn]}
        return answer

    monkeypatch.setattr(Aws, "call", call_with_foreign)
    await launch(site)
    assert isinstance(await site.again().stop("n1", stop_order(site.token())), StopProof)


async def test_a_generation_that_was_only_prepared_hides_no_orphan(
    make: Callable[..., Site], aws: AwsDouble
) -> None:
    site = make()
    ghost = await launch_and_forget(site)
    # It writes that it has prepared, and finds then that the older generation does not end.
    stuck = prepare_order(site.token(2), stop_grace=0.1, stuck_after=0.2)
    assert refusal(await site.backend.prepare("n1", stuck)).why == "stuck"
    await deregister(site, aws, ghost)
    with pytest.raises(Unreachable, match="deregistered by force"):
        await site.again().stop("n1", stop_order(site.token(2)))


async def test_a_task_deregistered_during_a_stop_is_no_proof(
    make: Callable[..., Site], aws: AwsDouble
) -> None:
    site = make()
    ghost = await launch_and_forget(site)
    order = stop_order(site.token(), stop_grace=30.0, stuck_after=30.0)
    stopping = asyncio.create_task(site.backend.stop("n1", order))
    await until(lambda: site.tasks(living=False)[0]["desiredStatus"] == "STOPPED")
    await deregister(site, aws, ghost)
    with pytest.raises(Unreachable, match="deregistered by force"):
        await stopping


async def test_a_task_of_a_forgotten_registration_ends_with_the_power(
    make: Callable[..., Site],
) -> None:
    site = make()
    await launch(site)
    await until(lambda: site.tasks()[0]["lastStatus"] == "RUNNING")
    new = site.instance.reregister()
    await until(lambda: _registered(site, new))
    stuck = stop_order(site.token(), stop_grace=0.1, stuck_after=0.2)
    refused = refusal(await site.backend.stop("n1", stuck))
    assert refused.why == "stuck" and refused.reason.endswith(f"stop and start {site.ids[0]}")
    await restart(site)
    await until(lambda: _registered(site, new))
    assert [task["lastStatus"] for task in site.tasks(living=False)] == ["RUNNING"]
    assert isinstance(await site.backend.stop("n1", stuck), StopProof)
    await launch(site, 2)


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def restart(site: Site) -> None:
    """Stop and start a machine, as a person does."""
    began = time.time()
    await until(lambda: time.time() > began + 2.0)  # EC2 gives whole seconds
    for operation, state in (("StopInstances", "stopped"), ("StartInstances", "running")):
        await site.backend.aws.call("ec2", operation, InstanceIds=[site.ids[0]])
        await until(lambda state=state: _has_power(site, state))


async def _has_power(site: Site, state: str) -> bool:
    return await site.backend.cluster.ec2_state(site.ids[0]) == state


async def _registered(site: Site, arn: str) -> Any:
    instance = await site.backend.cluster.instance(site.ids[0])
    return instance if instance.agent_connected and instance.arn == arn else None


# --- lists


async def test_a_list_has_ranks_of_every_controller_and_unknown_gpus(
    make: Callable[..., Site],
) -> None:
    site = make()
    await launch(site)
    listed = await site.again().list("n1", gpus=True)
    (job,) = listed["jobs"]
    assert (job["namespace"], job["job"]) == ("default", site.job)
    assert job["generations"] == [
        {
            "submission": 1763000000000,
            "generation": 1,
            "state": "running",
            "ranks": [{"rank": 0, "pid": None, "alive": True}],
            "fleet": "",
        }
    ]
    assert listed["held"] is None and "unreadable" in listed["gpus"]
    assert isinstance(await site.backend.stop("n1", stop_order(site.token())), StopProof)
    (after,) = (await site.backend.list("n1"))["jobs"]
    assert (after["prepared"], after["stopped"]) == (None, [1763000000000, 1])
    assert not after["generations"][0]["ranks"][0]["alive"]


async def test_a_stack_is_refused_in_a_sentence(make: Callable[..., Site]) -> None:
    site = make()
    assert "own container" in refusal(await site.backend.stacks("n1", site.token(), 0)).reason
    assert (
        "no task"
        in refusal(await site.backend.logs("n1", site.token(), None, 1000, 0.0, None)).reason
    )


def test_it_never_takes_silence_for_proof() -> None:
    assert EcsBackend.fences is False
