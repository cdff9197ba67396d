"""An EC2 instance as a container instance.

Its power, its boot id, the ECS agent on it, and the containers that the agent runs.

Chosen here, as no document says it: a container that a reboot ends has exit code 137, and its task
is STOPPED when the agent is back; a task of an instance without power stays RUNNING for ever, until
the agent is back or the instance is terminated.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.doubles.aws.clockwork import Clockwork
from tests.doubles.aws.containers import (
    CannotStart,
    ContainerProcess,
    Spawner,
    container_environment,
)
from tests.doubles.aws.scripts import ScriptedProcess
from tests.doubles.aws.values import Changed, Container, ContainerInstance, Task

NODE_IMAGE = "relaunch-node"
"""The image whose containers run the agent's zipapp on their command."""


@dataclass
class Delays:
    """Seconds, in place of AWS's own, which are minutes for what concerns the power."""

    start: float = 0.02
    """From RunTask until the agent starts the containers."""
    stop_timeout: float = 1.0
    """From SIGTERM to SIGKILL, where the task definition has no stopTimeout;
    ECS_CONTAINER_STOP_TIMEOUT is 30."""
    reboot: float = 0.3
    """From RebootInstances, which only queues, to the end of what runs; the agent is connected that
    long."""
    boot: float = 0.5
    """Until the agent is connected again."""
    power_off: float = 0.2
    """Of StopInstances: `stopping` for so long."""
    terminated: float = 0.2
    """Until ECS notices that an instance was terminated."""
    standby: float = 0.1
    """From an order to an Auto Scaling group until an instance is in Standby, or in service."""


@dataclass
class Node:
    """What the machines of one double have in common."""

    clockwork: Clockwork
    spawner: Spawner
    delays: Delays
    changed: Changed
    agent: Callable[[], Path]
    """Path of the zipapp that is in the node image."""
    logs: Callable[[Task, Container], Callable[[list[str]], None] | None]
    """Where a container's lines go; raises CannotStart where the log group is missing."""
    ec2: Callable[[str, str], None]
    """Tells EC2 of an instance's state."""
    fails: Callable[[str], None] = lambda ec2_id: None
    """Tells the Auto Scaling group of an instance that it goes down."""


@dataclass
class Machine:
    node: Node
    ec2_id: str
    folder: Path
    state: Path
    gpus: tuple[str, ...]
    environment: Mapping[str, str]
    type: str = "p4d.24xlarge"
    capacity: Mapping[str, int] = field(default_factory=lambda: {"CPU": 98304, "MEMORY": 1_179_648})
    registration: ContainerInstance | None = None
    power: str = "running"
    returns: bool = True
    connects: bool = True
    """False: the agent stays away although the machine runs."""
    boots: int = 0
    _life: int = 0
    """Counts orders to its power: a reboot that another one overtook does nothing."""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.new_boot()

    @property
    def boot_id(self) -> str:
        return (self.state / "boot_id").read_text()

    def new_boot(self) -> None:
        self.boots += 1
        (self.state / "boot_id").write_text(uuid.uuid4().hex[:12])

    # The agent.

    def place(self, task: Task) -> None:
        """The scheduler chose this instance; the agent gets to know of it."""
        self.node.clockwork.later(self.node.delays.start, lambda: self.advance(task))

    def advance(self, task: Task) -> None:
        """Reconcile what ECS knows with what runs here, as far as the agent's connection goes."""
        if task.over or not task.instance.agent_connected:
            return
        if task.last_status == "PENDING":
            if task.desired_status == "RUNNING":
                self._start(task)
            if task.desired_status == "STOPPED" and not any(
                container.process for container in task.containers
            ):
                self._over(task)
            return
        self._collect(task)
        if task.desired_status == "STOPPED":
            self._stop(task)

    def _start(self, task: Task) -> None:
        if task.script is not None and task.script.never_starts:
            return
        for container in task.containers:
            try:
                self._run(task, container)
            except CannotStart as reason:
                container.reason = (
                    f"CannotStartContainerError: Error response from daemon: {reason}"
                )
                self.end(task, "TaskFailedToStart", "Task failed to start")
                break
        if not any(container.process for container in task.containers):
            return
        task.started_at = self.node.clockwork.now()
        task.last_status = "RUNNING"
        for container in task.containers:
            container.last_status = "RUNNING" if container.process else "PENDING"
        self._changed(task)
        self.advance(task)

    def _run(self, task: Task, container: Container) -> None:
        def ended() -> None:
            self.node.clockwork.later(0.0, lambda: self.advance(task))

        said = self.node.logs(task, container)
        if task.script is not None:
            if task.script.stop_code == "TaskFailedToStart":
                self.end(
                    task, "TaskFailedToStart", task.script.stopped_reason or "Task failed to start"
                )
                container.reason = task.script.reason
                return
            container.process = ScriptedProcess(
                task.script, self.node.clockwork, said or (lambda lines: None), ended
            )
            return
        environment = container_environment(
            self.environment, environment_of(container), container.gpu_ids, task.id
        )
        if container.definition.get("image") == NODE_IMAGE:
            environment["RELAUNCH_AGENT_STATE"] = str(self.state)
            # Where tests install doubles of dcgmi and of NVML's library.
            environment["PATH"] = f"{self.state / 'bin'}:{environment['PATH']}"
            environment["LD_LIBRARY_PATH"] = str(self.state / "lib")
        folder = self.folder / task.id
        container.process = ContainerProcess(
            self.node.spawner,
            self._argv(container),
            environment,
            folder,
            container.name,
            said,
            ended,
        )

    def _argv(self, container: Container) -> Sequence[str]:
        entry = container.definition.get("entryPoint") or []
        if container.definition.get("image") == NODE_IMAGE and not entry:
            entry = [sys.executable, str(self.node.agent()), "task"]
        argv = [
            *entry,
            *(container.override.get("command") or container.definition.get("command") or []),
        ]
        if not argv:
            raise CannotStart("no command specified")
        return argv

    def _collect(self, task: Task) -> None:
        for container in task.containers:
            process = container.process
            if process is None or not process.ended or container.last_status == "STOPPED":
                continue
            container.last_status, container.exit_code = "STOPPED", process.exit_code
            container.reason = process.reason
            if container.essential and task.desired_status == "RUNNING":
                script = task.script
                self.end(
                    task,
                    (script and script.stop_code) or "EssentialContainerExited",
                    (script and script.stopped_reason) or "Essential container in task exited",
                )

    def end(self, task: Task, stop_code: str, why: str) -> None:
        """Set its desired status to STOPPED; it may run on for a while."""
        if task.desired_status == "STOPPED":
            return
        task.desired_status, task.stop_code, task.stopped_reason = "STOPPED", stop_code, why
        task.stopping_at = self.node.clockwork.now()
        self._changed(task)

    def _stop(self, task: Task) -> None:
        live = [
            container
            for container in task.containers
            if container.process and not container.process.ended
        ]
        if not live:
            self._over(task)
        for container in live:
            process = container.process
            assert process is not None
            if container.last_status != "STOPPING":
                container.last_status = "STOPPING"
                process.ask()
                seconds = container.definition.get("stopTimeout", self.node.delays.stop_timeout)
                self.node.clockwork.later(
                    seconds, lambda process=process: None if process.ended else process.kill()
                )  # type: ignore[misc]

    def _over(self, task: Task) -> None:
        task.last_status, task.stopped_at = "STOPPED", self.node.clockwork.now()
        for container in task.containers:
            container.last_status = "STOPPED"
        self._changed(task)
        self.registered.version += 1
        self.node.changed(self.registered)

    def orphan(self, task: Task) -> None:
        """ECS forgets a task, whose processes run on."""
        self.end(task, "UserInitiated", "Container instance deregistration forced by user")
        task.last_status, task.stopped_at = "STOPPED", self.node.clockwork.now()
        for container in task.containers:
            container.last_status = "STOPPED"
        self._changed(task)

    def _changed(self, task: Task) -> None:
        task.version += 1
        self.node.changed(task)

    @property
    def registered(self) -> ContainerInstance:
        assert self.registration is not None, f"{self.ec2_id} is not a container instance"
        return self.registration

    def connect(self, connected: bool) -> None:
        if self.registration is None or self.registration.agent_connected == connected:
            return
        self.registration.agent_connected = connected
        self.registration.version += 1
        self.node.changed(self.registration)
        if connected:
            for task in self.registration.tasks():
                self.advance(task)

    # The power.

    def lose_power(self) -> None:
        self._life += 1
        for task in self.registration.cluster.tasks.values() if self.registration else []:
            if task.instance.machine is not self:
                continue
            for container in task.containers:
                if container.process is not None and not container.process.ended:
                    container.process.lose_power()
        self.connect(False)

    def reboot(self) -> None:
        self._life += 1
        self._after(self.node.delays.reboot, self._reboot_now)

    def _reboot_now(self) -> None:
        self.lose_power()
        self.node.fails(self.ec2_id)
        if self.power != "terminated":
            self._boot()

    def stop(self) -> None:
        self.power = "stopping"
        self.node.ec2(self.ec2_id, "stopping")
        self.lose_power()
        self._after(self.node.delays.power_off, self._stopped)
        self.node.fails(self.ec2_id)

    def _stopped(self) -> None:
        self.power = "stopped"
        self.node.ec2(self.ec2_id, "stopped")

    def start(self) -> None:
        self._life += 1
        self.power = "pending"
        self.node.ec2(self.ec2_id, "pending")
        self._boot()

    def terminate(self) -> None:
        known = self.registration is not None and self.registration.agent_connected
        self.power = "terminated"
        self.lose_power()
        if known:
            self._after(self.node.delays.terminated, self._deregister)

    def _deregister(self) -> None:
        for task in self.registered.tasks():
            self.end(task, "TerminationNotice", f"Host EC2 (instance {self.ec2_id}) terminated.")
            self._over(task)
        self.registered.status = "INACTIVE"
        self.registered.version += 1
        self.node.changed(self.registered)

    def _boot(self) -> None:
        if self.returns:
            self._after(self.node.delays.boot, self._booted)

    def _booted(self) -> None:
        self.new_boot()
        if self.power == "pending":
            self.power = "running"
            self.node.ec2(self.ec2_id, "running")
        if self.connects:
            self.connect(True)

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        life = self._life
        self.node.clockwork.later(seconds, lambda: action() if life == self._life else None)


def environment_of(container: Container) -> dict[str, str]:
    given = [
        *container.definition.get("environment", []),
        *container.override.get("environment", []),
    ]
    return {one["name"]: one["value"] for one in given}
