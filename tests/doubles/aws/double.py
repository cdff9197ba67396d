"""AWS for tests: one region of one account, one ECS cluster, its machines."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.doubles.aws.clockwork import Clockwork
from tests.doubles.aws.containers import CannotStart, Spawner
from tests.doubles.aws.ecs import HOUR, Ecs
from tests.doubles.aws.events import Events
from tests.doubles.aws.faults import Faults
from tests.doubles.aws.front import Call, Front, Server
from tests.doubles.aws.groups import Group, Groups
from tests.doubles.aws.machines import Delays, Machine, Node
from tests.doubles.aws.moto_side import Moto, MotoRefusal
from tests.doubles.aws.power import Power
from tests.doubles.aws.scripts import Script
from tests.doubles.aws.values import REGION, Cluster, Container, ContainerInstance, Task

_SERVING: list[AwsDouble] = []
"""Those of this process, which share moto: queues and tables of one are seen in another."""


class Instance:
    """A test's hand on one machine."""

    def __init__(self, aws: AwsDouble, machine: Machine) -> None:
        self._aws, self.machine = aws, machine
        self.ec2_id, self.state, self.folder = machine.ec2_id, machine.state, machine.folder

    @property
    def arn(self) -> str:
        return self.machine.registered.arn

    @property
    def boot_id(self) -> str:
        """The part that the double plays; the agent puts the kernel's before it."""
        return self.machine.boot_id

    @property
    def boots(self) -> int:
        return self.machine.boots

    def disconnect(self) -> None:
        """The agent's connection; what runs goes on and is not told of."""
        with self._aws.lock:
            self.machine.connects = False
            self.machine.connect(False)

    def connect(self) -> None:
        with self._aws.lock:
            self.machine.connects = True
            self.machine.connect(True)

    def kill(self) -> None:
        """Its power is gone, and EC2 says `running` all the same; a reboot brings it back."""
        with self._aws.lock:
            self.machine.lose_power()

    def never_returns(self, returns: bool = False) -> None:
        """From its next reboot or start."""
        with self._aws.lock:
            self.machine.returns = returns

    def reregister(self, *, reboots: bool = True) -> str:
        """The agent lost its memory: another ARN for the same machine.

        The old one stays, disconnected, its tasks as they were. Unless the machine reboots, what
        runs in them runs on.
        """
        with self._aws.lock:
            old = self.machine.registered
            if reboots:
                self.machine.lose_power()
            self.machine.connect(False)
            self.machine.registration = self._aws.new_registration(old.cluster, self.machine)
            self._aws.changed(self.machine.registration)
            return self.machine.registration.arn

    def health(self, word: str) -> None:
        """OK, IMPAIRED, INSUFFICIENT_DATA, INITIALIZING: of the container runtime."""
        with self._aws.lock:
            self.machine.registered.health = word

    def status(self, system: str = "ok", instance: str = "ok", event: str | None = None) -> None:
        """What DescribeInstanceStatus says.

        ok or impaired, and a scheduled event such as instance-retirement.
        """
        with self._aws.lock:
            self._aws.power.statuses[self.ec2_id] = (system, instance, event)


class AwsDouble:
    """See the package."""

    def __init__(
        self,
        folder: Path,
        cluster: str = "training",
        port: int = 0,
        agent: Path | None = None,
        delays: Delays | None = None,
    ) -> None:
        self.folder, self.cluster = folder, cluster
        self.lock = threading.RLock()
        self.delays = delays or Delays()
        self.log_delay: float | None = 0.0
        """Seconds until lines of containers are in CloudWatch Logs; None: they never come."""
        self._port, self._agent = port, agent
        self._machines: dict[str, Machine] = {}
        self.power = Power(self._machines, self.lock)
        self._server: Server | None = None

    def __enter__(self) -> AwsDouble:
        self._moto = Moto()
        if not _SERVING:
            self._moto.forget()
        _SERVING.append(self)
        self._clockwork = Clockwork(self.lock)
        self._spawner = Spawner()
        self.events = Events(self._moto.send_message, self._clockwork.now)
        self.ecs = Ecs(self._clockwork, self.changed, self.lock)
        self.ecs.clusters[self.cluster] = Cluster(self.cluster)
        self._groups = Groups(
            self._machines, self.lock, self._clockwork, self.delays, self._moto.set_state
        )
        self._front = Front(self.ecs, self._moto.app, self.power, self._groups)
        self._node = Node(
            self._clockwork,
            self._spawner,
            self.delays,
            self.changed,
            self._agent_path,
            self._logs,
            self._moto.set_state,
            self._groups.fail_health_check,
        )
        self._server = Server(self._front, self._port)
        self._moto.url = self._server.url
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """No process of it stays."""
        if self._server is None:
            return
        with self.lock:
            for machine in self._machines.values():
                machine.returns = False
                machine.lose_power()
        self._server.close()
        self._server = None
        _SERVING.remove(self)
        self._clockwork.close()
        self.events.close()
        self._spawner.close()

    @property
    def url(self) -> str:
        assert self._server is not None, "the double serves only inside `with`"
        return self._server.url

    @property
    def faults(self) -> Faults:
        return self._front.faults

    @property
    def calls(self) -> Counter[str]:
        """How often each operation was called so far, refused ones too."""
        return self._front.calls

    @property
    def requests(self) -> list[Call]:
        """Each of them."""
        return self._front.log

    def environment(self) -> dict[str, str]:
        """Return the variables of a process that uses this instead of AWS."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "double",
            "AWS_SECRET_ACCESS_KEY": "double",
            "AWS_DEFAULT_REGION": REGION,
            "AWS_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    # What tests arrange.

    def add_instance(
        self,
        gpus: int = 8,
        name: str | None = None,
        agent_state: Path | None = None,
        environment: Mapping[str, str] | None = None,
        address: str | None = None,
        registered: bool = True,
    ) -> str:
        """Its EC2 id.

        `environment` is that of every container there, as a GPU runtime's mounts would be;
        `address` is its private one; a machine that is not `registered` is EC2's alone.
        """
        number = len(self._machines) + 1
        kind = "p4d.24xlarge" if gpus else "c5.large"
        ec2_id = self._moto.run_instance(kind, address or f"127.0.0.{number + 1}")
        folder = self.folder / (name or ec2_id)
        names = tuple(f"GPU-{number:08x}-{index:04x}" for index in range(gpus))
        machine = Machine(
            self._node,
            ec2_id,
            folder,
            agent_state or folder / "state",
            names,
            environment or {},
            kind,
        )
        with self.lock:
            self._machines[ec2_id] = machine
            if registered:
                machine.registration = self.new_registration(
                    self.ecs.clusters[self.cluster], machine
                )
                self.changed(machine.registration)
        return ec2_id

    def new_registration(self, cluster: Cluster, machine: Machine) -> ContainerInstance:
        registration = ContainerInstance(cluster, machine, self._clockwork.now())
        cluster.instances[registration.id] = registration
        return registration

    def add_group(
        self, name: str, ec2_ids: Sequence[str], min_size: int = 0, max_size: int = 100
    ) -> Group:
        """An Auto Scaling group that has these instances in service."""
        states = dict.fromkeys(ec2_ids, "InService")
        with self.lock:
            group = Group(name, min_size, max_size, len(ec2_ids), states)
            self._groups.groups[name] = group
        return group

    def instance(self, ec2_id: str) -> Instance:
        return Instance(self, self._machines[ec2_id])

    def register(
        self, family: str, containers: Sequence[Mapping[str, Any]], **definition: Any
    ) -> str:
        """The ARN of a new revision; log groups that it names are there afterwards."""
        rows = [dict(one) for one in containers]
        for row in rows:
            options = row.get("logConfiguration", {}).get("options", {})
            if "awslogs-group" in options:
                self._moto.create_log_group(options["awslogs-group"])
        answer = self.ecs.answer(
            "RegisterTaskDefinition", {"family": family, "containerDefinitions": rows, **definition}
        )
        return str(answer["taskDefinition"]["taskDefinitionArn"])

    def script(
        self,
        wanted: str | Callable[[Mapping[str, Any]], bool],
        *,
        exit_code: int | None = None,
        reason: str | None = None,
        stop_code: str | None = None,
        stopped_reason: str | None = None,
        never_starts: bool = False,
        after: float | None = 0.05,
        stdout: Sequence[str] = (),
        stubborn: bool = False,
        stuck: bool = False,
        times: int | None = None,
    ) -> Script:
        """Tasks of this family run nothing and go like this.

        Or those that the predicate picks, given the task as DescribeTasks has it.

        `exit_code` None: the container has none. `after` None: it runs until it is stopped.
        `stubborn`: SIGTERM does nothing to it; `stuck`: SIGKILL neither.
        `stop_code="TaskFailedToStart"`: it never ran. `times`: for so many tasks; the script
        that was set first counts first.
        """
        script = Script(
            wanted,
            exit_code,
            reason,
            stop_code,
            stopped_reason,
            never_starts,
            after,
            tuple(stdout),
            stubborn,
            stuck,
            times,
        )
        return self.ecs.scripts.add(script)

    def create_queue(self, name: str) -> str:
        """The URL of an SQS queue."""
        return str(self._moto.json("sqs", "CreateQueue", {"QueueName": name})["QueueUrl"])

    def events_to(self, queue_url: str) -> None:
        self.events.to(queue_url)

    def advance(self, seconds: float) -> None:
        """Put AWS's clock forward: stopped tasks and client tokens are forgotten by it."""
        self._clockwork.advance(seconds)

    def expire(self, task_arn: str) -> None:
        """Make a stopped task one that DescribeTasks does not know any more."""
        task = self._task(task_arn)
        assert task.stopped_at is not None, (
            f"{task_arn} is {task.last_status}; only a stopped task ages out"
        )
        task.stopped_at -= HOUR

    # What tests look at.

    def tasks(
        self, family: str | None = None, status: str | None = None
    ) -> tuple[dict[str, Any], ...]:
        """Every task there ever was, as DescribeTasks would tell it with tags.

        `status` is its last one.
        """
        with self.lock:
            tasks = [
                task for cluster in self.ecs.clusters.values() for task in cluster.tasks.values()
            ]
            return tuple(
                task.describe(tags=True)
                for task in tasks
                if (family is None or task.definition.family == family)
                and (status is None or task.last_status == status)
            )

    def pids(self, task_arn: str) -> dict[str, int]:
        """Of the containers that run, by name."""
        running = {one.name: one.process for one in self._task(task_arn).containers}
        return {
            name: process.pid
            for name, process in running.items()
            if process and process.pid and not process.ended
        }

    def output(self, task_arn: str, container: str) -> str:
        """What a container of a real process has printed."""
        task = self._task(task_arn)
        path = task.instance.machine.folder / task.id / f"{container}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def _task(self, task_arn: str) -> Task:
        with self.lock:
            return next(
                cluster.tasks[task_arn.rsplit("/", 1)[-1]]
                for cluster in self.ecs.clusters.values()
                if f"/{cluster.name}/" in task_arn
            )

    # What its parts ask of each other.

    def changed(self, one: Task | ContainerInstance) -> None:
        self.events.changed(one)

    def _agent_path(self) -> Path:
        if self._agent is None:
            from relaunch.backends.artifact import build_agent

            self._agent = build_agent(self.folder / "agent")
        return self._agent

    def _logs(self, task: Task, container: Container) -> Callable[[list[str]], None] | None:
        configured = container.definition.get("logConfiguration", {})
        if configured.get("logDriver") != "awslogs":
            return None
        options = configured["options"]
        group = options["awslogs-group"]
        stream = f"{options['awslogs-stream-prefix']}/{container.name}/{task.id}"
        if options.get("awslogs-create-group") == "true":
            self._moto.create_log_group(group)
        try:
            self._moto.create_log_stream(group, stream)
        except MotoRefusal:
            raise CannotStart(
                "failed to initialize logging driver: failed to create Cloudwatch log stream: "
                "ResourceNotFoundException: "
                "The specified log group does not exist."
            ) from None

        def log_lines(lines: list[str]) -> None:
            delay = self.log_delay
            if delay is None:
                return
            if delay == 0:
                self._moto.put_lines(group, stream, lines, self._clockwork.now())
            else:
                self._clockwork.later(
                    delay, lambda: self._moto.put_lines(group, stream, lines, self._clockwork.now())
                )

        return log_lines
