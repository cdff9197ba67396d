"""A fleet on the double of AWS to hold the contract against.

The agent is in each container, and ECS starts, stops and fences.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from relaunch.backends.base import Backend
from relaunch.backends.ecs import aws as aws_module
from relaunch.backends.ecs import container
from relaunch.backends.ecs.backend import EcsBackend
from relaunch.generation import Token
from relaunch.spec.fleet import EcsOptions, FleetSpec
from relaunch.spec.job import SecretReference
from tests.agent_key import agent_key
from tests.backends.fleets import PATIENT, Does, RealRanks
from tests.chaos.world import free_port
from tests.doubles.aws import AwsDouble, Delays


@contextmanager
def playing_aws(folder: Path, agent: Path) -> Iterator[AwsDouble]:
    with (
        AwsDouble(folder, agent=agent, delays=Delays(stop_timeout=8.0)) as double,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in (*double.environment().items(), ("KEY_OF_CONTRACT", agent_key())):
            patch.setenv(name, value)
        patch.setattr(aws_module, "RATES", {"read": (10_000.0, 100), "modify": (10_000.0, 100)})
        patch.setattr(container, "RETRY", (0.05, 0.2))
        yield double


class EcsFleet(RealRanks):
    def __init__(self, does: Mapping[int, Does], nodes: int, folder: Path, aws: AwsDouble) -> None:
        self.does = does
        self.stamps: dict[tuple[str, Token], float] = {}
        self.state = folder
        self.visitors = []
        self._aws = aws
        port = str(free_port())
        variables = {
            container.PORT: port,
            "RELAUNCH_AGENT_KEY": agent_key(),
            "RELAUNCH_AGENT_STATE": "state",
        }
        trainer = {
            "name": "trainer",
            "image": "of the user's, with the agent",
            "entryPoint": [sys.executable, "-S", str(aws._agent_path()), "container"],
            "environment": [{"name": name, "value": value} for name, value in variables.items()],
        }
        self._family = f"contract-{folder.name[-40:].replace('.', '-')}"
        aws.register(self._family, [trainer], networkMode="host")
        self._ids = {f"n{number}": aws.add_instance(gpus=0) for number in range(1, nodes + 1)}
        named = [
            {"name": name, "address": id, "network": f"127.0.0.{number}"}
            for number, (name, id) in enumerate(self._ids.items(), 1)
        ]
        self._spec = FleetSpec.model_validate(
            {"name": "contract", "backend": "ecs", "nodes": named}
        )
        self._opened: list[EcsBackend] = []
        self.backend: Backend = self.again()

    def again(self, answer_within: float = PATIENT) -> EcsBackend:
        options = EcsOptions(
            cluster=self._aws.cluster,
            task_definition=self._family,
            poll=timedelta(seconds=0.4),
            agent_key=SecretReference(env="KEY_OF_CONTRACT"),
        )
        self._opened.append(EcsBackend(self._spec, options, settles=0.2))
        return self._opened[-1]

    def cut(self, node: str) -> None:
        self._aws.instance(self._ids[node]).disconnect()

    def heal(self, node: str) -> None:
        self._aws.instance(self._ids[node]).connect()

    def reboot(self, node: str) -> None:
        self._aws.instance(self._ids[node]).kill()

    async def close(self) -> None:
        for node in self._ids:
            self.reboot(node)
        for backend in self._opened:
            await backend.close()
