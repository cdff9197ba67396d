"""One double of AWS for its tests, which use instances and families of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.doubles.aws import AwsDouble
from tests.doubles.aws_caller import Caller


@pytest.fixture(scope="session")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AwsDouble]:
    with AwsDouble(tmp_path_factory.mktemp("aws")) as double:
        yield double


@pytest.fixture(autouse=True)
def _nothing_told(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "aws" in request.fixturenames:
        double = request.getfixturevalue("aws")
        double.faults.clear()
        double.ecs.scripts.clear()


@pytest.fixture(scope="session")
def caller(aws: AwsDouble) -> Caller:
    return Caller(aws)


@pytest.fixture
def node(aws: AwsDouble) -> str:
    return aws.add_instance(gpus=2)
