"""Ask real AWS, on one instance, what the double of tests/doubles/aws assumes of it.

Never part of `make test`.

    CLUSTER=training TASK_DEFINITION=train NODE_TASK=relaunch-node INSTANCE=i-0123456789abcdef0 make
    aws-smoke [REBOOT=1]

It runs tasks named after a job `smoke-...` on that instance, stops them, and takes its attribute
away again; with REBOOT=1 it also reboots the instance, on which nothing else of relaunch may run.
The caller needs credentials and a region as boto3 finds them, with the policy that
deploy/ecs/relaunch.yaml makes (for the reboot with AllowRepairs, and the tag `relaunch` on the
instance). TASK_DEFINITION is any with one essential container, `sh` in its image, no entry point,
and network mode host or bridge; NODE_TASK is that template's. INSTANCE is a container instance of
CLUSTER with some CPU and memory to spare. It takes some three minutes, with a reboot ten: of a
g4dn.xlarge, 0.53 USD an hour on demand in us-east-1 (price as of 2026, to be checked), that is less
than 0.10 USD; API calls cost nothing, logs next to nothing.

Each row says what relaunch expects and what AWS said. `DIFFERS` is worth an issue:
relaunch/backends/ecs is built on what was expected.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from relaunch.backends.base import (
    BackendError,
    PrepareOrder,
    Refusal,
    StartOrder,
    StopOrder,
    StopProof,
    Unreachable,
)
from relaunch.backends.ecs.aws import AwsError
from relaunch.backends.ecs.backend import EcsBackend
from relaunch.backends.ecs.cluster import UnknownInstance
from relaunch.backends.ecs.fence import Fence, only_for
from relaunch.backends.ecs.launch import stamp
from relaunch.backends.ecs.options import options
from relaunch.backends.ecs.stream import SETTLES
from relaunch.backends.ecs.tasks import (
    RunTaskFailure,
    Task,
    build_started_by,
    job_attribute,
    stop_reason,
)
from relaunch.generation import Token
from relaunch.spec.fleet import EcsOptions, FleetSpec

NEEDED = {
    "CLUSTER": "name or ARN of an ECS cluster",
    "TASK_DEFINITION": "task definition that training is run by, with sh in its image",
    "NODE_TASK": "task definition of the node image",
    "INSTANCE": "EC2 id of a container instance of the cluster",
}
POLL = timedelta(seconds=2)
"""Between two looks at a task: one worker polls, and a person waits for the table."""
NODE = "n1"
END_TIMEOUT = 120.0
"""Seconds for a task to be placed, pulled, run and reported: the first pull of an image is the
longest part."""
ROUNDS = 5
"""Times that an attribute's way to the scheduler is measured."""
TRY_AGAIN = 0.05
VISIBILITY_TIMEOUT = 30.0
"""Seconds: six times what relaunch waits, so that a number comes out where it is too short."""
PROBE_TIMEOUT = 30.0
REBOOT_TIMEOUT, REBOOT_LOOK = 1500.0, 5.0
"""Seconds: as a policy's `reboot` has it, and between two probes."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    expected: str
    said: str
    ok: bool


@dataclass(slots=True)
class Smoke:
    backend: EcsBackend
    ec2_id: str
    rows: list[Row] = field(default_factory=list)
    job: str = field(default_factory=lambda: f"smoke-{uuid.uuid4().hex[:8]}")
    submission: int = field(default_factory=lambda: int(time.time() * 1000))
    asked: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """The RunTasks of the backend itself, by startedBy."""

    def token(self, generation: int) -> Token:
        return Token("aws-smoke", self.job, self.submission, generation)

    @property
    def attribute(self) -> str:
        return job_attribute("aws-smoke", self.job)

    def say(self, what: str, expected: str, said: object, ok: bool) -> None:
        self.rows.append(Row(what, expected, str(said), ok))

    async def row(
        self, what: str, expected: str, look: Callable[[], Awaitable[tuple[object, bool]]]
    ) -> None:
        """Add what was found; an error of AWS is something that was found, too."""
        try:
            said, ok = await look()
        except (BackendError, AwsError, UnknownInstance, TimeoutError, Differs) as error:
            said, ok = getattr(error, "reason", "") or f"{type(error).__name__} {error}", False
        self.say(what, expected, said, ok)

    # --- what a worker does

    async def start(self, generation: int, command: str, backend: EcsBackend | None = None) -> Any:
        token, by = self.token(generation), backend or self.backend
        prepare = PrepareOrder(
            token,
            "",
            (0,),
            lease=60.0,
            fence_after=60.0,
            stop_grace=15.0,
            valid_for=60.0,
            heartbeat=10.0,
            stuck_after=30.0,
        )
        answered(await by.prepare(NODE, prepare))
        start = StartOrder(
            token=token,
            node=NODE,
            command=("sh", "-c", command),
            workdir=None,
            env={"WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1"},
            rank_env=({"RANK": "0", "RELAUNCH_NODE": NODE},),
            peers=(),
            prepared=stamp(token, NODE),
            secret="",
            fences=False,
        )
        return answered(await by.start(NODE, start))

    async def stop(self, generation: int) -> object:
        return await self.backend.stop(NODE, StopOrder(self.token(generation), stop_grace=15.0))

    async def end_of(self, generation: int) -> Mapping[str, Any]:
        async with (
            asyncio.timeout(END_TIMEOUT),
            self.backend.watch(NODE, self.token(generation), 0, 10.0) as stream,
        ):
            async for line in stream.lines():
                if "observation" in line:
                    return dict(line["observation"])
        raise Differs("its watch ended without saying how it ended")

    async def task(self, generation: int) -> Task:
        found = await self.backend.cluster.task_of(
            self.ec2_id, build_started_by(self.token(generation))
        )
        if found is None:
            raise Differs(f"ECS knows no task of {self.token(generation)}")
        return found

    async def run_again(self, generation: int, **changes: Any) -> Task | RunTaskFailure:
        """Send the RunTask of a generation once more."""
        request = {**self.asked[build_started_by(self.token(generation))], **changes}
        return await self.backend.cluster.run(
            request, (await self.backend.cluster.instance(self.ec2_id)).arn
        )


class Differs(Exception):
    pass


def answered(answer: T | Refusal) -> T:
    if isinstance(answer, Refusal):
        raise Differs(f"refused ({answer.why}): {answer.reason}")
    return answer


# --- what is asked


async def exit_codes(smoke: Smoke) -> None:
    for generation, code in ((1, 3), (2, 0)):

        async def ended(generation: int = generation, code: int = code) -> tuple[object, bool]:
            await smoke.start(generation, f"exit {code}")
            end = await smoke.end_of(generation)
            return (
                f"{end.get('kind')}, exit code {end.get('exit_code')}, {end.get('ecs')}",
                end.get("exit_code") == code,
            )

        await smoke.row(
            f"RunTask by ec2InstanceId and attribute, `exit {code}`",
            f"exit code {code}, EssentialContainerExited",
            ended,
        )


async def names(smoke: Smoke) -> None:
    """Generation 3 runs from here on."""
    token = smoke.token(3)

    async def listed() -> tuple[object, bool]:
        await smoke.start(3, "sleep 300")
        begun, arn = time.monotonic(), ""
        while not arn and time.monotonic() - begun < VISIBILITY_TIMEOUT:
            answer = await smoke.backend.aws.call(
                "ecs",
                "ListTasks",
                cluster=smoke.backend.cluster.name,
                startedBy=build_started_by(token),
            )
            arn = next(iter(answer.get("taskArns") or ()), "")
        took = time.monotonic() - begun
        return f"{arn or 'nothing'} after {took:.2f} s", bool(arn) and took <= SETTLES

    async def again() -> tuple[object, bool]:
        known, repeated = await smoke.task(3), await smoke.run_again(3)
        return describe(repeated), isinstance(repeated, Task) and repeated.arn == known.arn

    async def other_words() -> tuple[object, bool]:
        try:
            placed = await smoke.run_again(3, overrides={})
        except AwsError as error:
            named = list(error.response.get("resourceIds") or ())
            return f"{error.reason}; resourceIds {named}", error.code == "ConflictException" and (
                await smoke.task(3)
            ).arn in named
        return describe(placed), False

    async def another_worker() -> tuple[object, bool]:
        other = EcsBackend(spec_of(smoke.ec2_id), smoke.backend.options, SETTLES)
        try:
            started = await smoke.start(3, "sleep 300", other)
        finally:
            await other.close()
        return f"already: {started.already}", bool(started.already)

    await smoke.row(
        "ListTasks by startedBy, from RunTask's answer on",
        f"the task, within {SETTLES:g} s",
        listed,
    )
    await smoke.row("RunTask again, same clientToken", "the same ARN", again)
    await smoke.row(
        "RunTask again, same clientToken, other words",
        "ConflictException with the ARN in resourceIds",
        other_words,
    )
    await smoke.row("a launch of it by another worker", "already: True", another_worker)


async def stopped(smoke: Smoke) -> None:
    reason = stop_reason(smoke.token(3))

    async def stop() -> tuple[object, bool]:
        answer = await smoke.stop(3)
        task = await smoke.task(3)
        codes = [one.exit_code for one in task.containers]
        said = f"{task.last_status}, {task.stop_code}, {task.stopped_reason!r}, exit codes {codes}"
        return said, isinstance(
            answer, StopProof
        ) and task.stopped and task.stopped_reason == reason and task.stop_code == "UserInitiated"

    async def late() -> tuple[object, bool]:
        answer = await smoke.run_again(3, clientToken=uuid.uuid4().hex)
        if isinstance(answer, Task):
            await smoke.backend.cluster.stop(answer.arn, reason)
        return describe(answer), isinstance(answer, RunTaskFailure) and answer.reason.startswith(
            "MemberOf"
        )

    await smoke.row(
        "StopTask with our mark, told back", f"STOPPED, UserInitiated, {reason!r}", stop
    )
    await smoke.row(
        "RunTask after the stop, as a frozen worker sends it",
        "MemberOf placement constraint unsatisfied.",
        late,
    )


async def attribute_is_seen(smoke: Smoke) -> None:
    """The undocumented number: how long after PutAttributes the scheduler goes by what was put."""
    arn = (await smoke.backend.cluster.instance(smoke.ec2_id)).arn
    delays: dict[bool, list[float]] = {True: [], False: []}

    async def until(generation: int, placed: bool) -> None:
        token = smoke.token(generation)
        word = Fence.from_token(token, "prepared" if placed else "stopped")
        await smoke.backend.cluster.put_attributes(arn, {smoke.attribute: str(word)})
        constraint = f"ec2InstanceId == {smoke.ec2_id} and {only_for(smoke.attribute, token)}"
        begun = time.monotonic()
        while time.monotonic() - begun < VISIBILITY_TIMEOUT:
            asked = time.monotonic()
            answer = await smoke.run_again(
                1,
                clientToken=uuid.uuid4().hex,
                startedBy=build_started_by(token),
                placementConstraints=[{"type": "memberOf", "expression": constraint}],
            )
            if isinstance(answer, RunTaskFailure) and not answer.reason.startswith("MemberOf"):
                raise Differs(f"it cannot be measured: {describe(answer)}")
            if isinstance(answer, Task) is placed:
                # When it was asked: that much later it is known to count.
                delays[placed].append(asked - begun)
                return
            await asyncio.sleep(TRY_AGAIN)
        raise Differs(f"not seen within {VISIBILITY_TIMEOUT:g} s")

    async def measured(placed: bool) -> tuple[object, bool]:
        seen = delays[placed]
        said = ", ".join(f"{one:.2f}" for one in seen)
        return f"{said} s", len(seen) == ROUNDS and max(seen) <= (SETTLES if placed else 0.05)

    async def opened() -> tuple[object, bool]:
        for generation in range(4, 4 + ROUNDS):
            await until(generation, placed=True)
            await until(generation, placed=False)
        return await measured(True)

    await smoke.row(
        "from PutAttributes until the scheduler places by it",
        f"at most {SETTLES:g} s, which a launch waits for it",
        opened,
    )
    await smoke.row(
        "from PutAttributes until the scheduler refuses by it",
        "at once: a stop looks again for what slips through",
        lambda: measured(False),
    )


async def examined(smoke: Smoke) -> str:
    """Return the boot id."""
    found: dict[str, Any] = {}

    async def probe() -> tuple[object, bool]:
        begun = time.monotonic()
        found.update(await smoke.backend.probe(NODE, PROBE_TIMEOUT, None))
        return f"boot {found.get('boot_id')} after {time.monotonic() - begun:.1f} s", bool(
            found.get("boot_id")
        )

    await smoke.row("a probe by the node task, read from its log", "a boot id", probe)
    return str(found.get("boot_id") or "")


async def rebooted(smoke: Smoke, before: str) -> None:
    async def reboot() -> tuple[object, bool]:
        id, begun = f"smoke/{smoke.job}", time.monotonic()
        ordered = answered(await smoke.backend.reboot(NODE, id, before, "make aws-smoke REBOOT=1"))
        said = "it did not answer"
        while time.monotonic() - begun < REBOOT_TIMEOUT:
            await asyncio.sleep(REBOOT_LOOK)
            try:
                after = str((await smoke.backend.probe(NODE, PROBE_TIMEOUT, None)).get("boot_id"))
            except Unreachable as error:
                said = error.reason
                continue
            return (
                f"ordered on boot {ordered['boot_id']}, boot {after} after "
                f"{time.monotonic() - begun:.0f} s",
                after != before,
            )
        return f"not within {REBOOT_TIMEOUT:g} s: {said}", False

    await smoke.row("a reboot, proven by the boot id", "another boot id", reboot)


# --- all of it


def describe(answer: Task | RunTaskFailure) -> str:
    return (
        f"placed {answer.arn}"
        if isinstance(answer, Task)
        else ": ".join(filter(None, (answer.reason, answer.detail)))
    )


def spec_of(ec2_id: str, **ecs: Any) -> FleetSpec:
    node = {"name": NODE, "address": ec2_id}
    return FleetSpec.model_validate(
        {"name": "smoke", "backend": "ecs", "nodes": [node], "ecs": {"poll": POLL, **ecs}}
    )


@asynccontextmanager
async def opened(given: EcsOptions, ec2_id: str) -> AsyncIterator[Smoke]:
    """What it leaves on the instance is taken away."""
    backend = EcsBackend(spec_of(ec2_id), given, SETTLES)
    smoke = Smoke(backend, ec2_id)
    call = backend.aws.call

    async def noted(service: str, operation: str, **request: Any) -> dict[str, Any]:
        if operation == "RunTask":
            smoke.asked.setdefault(request["startedBy"], request)
        return await call(service, operation, **request)

    backend.aws.call = noted  # type: ignore[method-assign]
    try:
        yield smoke
        # A generation above all that were run: its stop ends them.
        gone = await smoke.stop(1000)
        smoke.say(
            "the tasks of it that are left are stopped",
            "all",
            "all" if isinstance(gone, StopProof) else gone,
            isinstance(gone, StopProof),
        )
        arn = (await backend.cluster.instance(ec2_id)).arn
        await backend.cluster.put_attributes(arn, {smoke.attribute: None})
    finally:
        await backend.close()


async def smoke(given: EcsOptions, ec2_id: str, reboot: bool) -> Sequence[Row]:
    """Ask it all.

    Raises:
        BackendError, AwsError, UnknownInstance: it could not begin, or not tidy up.
    """
    async with opened(given, ec2_id) as smoke:
        listed = await smoke.backend.list(NODE)
        if reboot and (listed["jobs"] or listed["held"]):
            living = [
                one["job"]
                for one in listed["jobs"]
                if any(each["state"] == "running" for each in one["generations"])
            ]
            if living or listed["held"]:
                raise Unreachable(
                    NODE,
                    f"{ec2_id} is in use ({', '.join(living) or listed['held']}), so it is not "
                    "rebooted: expected nothing there",
                )
        await exit_codes(smoke)
        await names(smoke)
        await stopped(smoke)
        await attribute_is_seen(smoke)
        before = await examined(smoke)
        if reboot:
            await rebooted(smoke, before)
    return tuple(smoke.rows)


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title="what relaunch expects of AWS, and what AWS says")
    for column in ("", "asked", "expected", "AWS said"):
        shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row("ok" if row.ok else "DIFFERS", row.what, row.expected, row.said)
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make aws-smoke", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--reboot", action="store_true", help="also reboot the instance")
    reboot = parser.parse_args(arguments).reboot
    if missing := [name for name in NEEDED if not os.environ.get(name)]:
        expected = "; ".join(f"{name}: {NEEDED[name]}" for name in missing)
        print(
            f"aws-smoke: {', '.join(missing)} not set in the environment, expected {expected}",
            file=sys.stderr,
        )
        return 2
    cluster, definition, node_task, ec2_id = (os.environ[name] for name in NEEDED)
    try:
        given = options(
            spec_of(ec2_id, cluster=cluster, task_definition=definition, node_task=node_task), {}
        )
        rows = asyncio.run(smoke(given, ec2_id, reboot))
    except ValueError as error:
        print(f"aws-smoke: {error}", file=sys.stderr)
        return 2
    except (BackendError, AwsError, UnknownInstance) as error:
        print(f"aws-smoke: {error.reason}", file=sys.stderr)
        return 2
    Console(width=160).print(table(rows))
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
