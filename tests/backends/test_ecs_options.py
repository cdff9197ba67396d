"""What a fleet of ECS finds in its file and in the environment (S1.10).

And the sentence for what cannot be.
"""

from __future__ import annotations

from typing import Any

import pytest

from relaunch.backends.ecs.options import options
from relaunch.spec.fleet import EcsTables, FleetSpec

TOPIC = "arn:aws:sns:eu-west-1:123456789012:people"
EVERYTHING = {
    "TASK_TABLE_NAME": "ecs_task",
    "JOB_TABLE_NAME": "ecs_job",
    "NODE_TABLE_NAME": "ecs_node",
    "ECS_CLUSTER_NAME": "training",
    "DCGM_HEALTH_CHECK_TASK": (
        "arn:aws:ecs:eu-west-1:123456789012:task-definition/dcgm-health-check:11"
    ),
    "SNS_TOPIC_ARN": TOPIC,
}


def fleet(address: str = "i-0123456789abcdef0", **ecs: Any) -> FleetSpec:
    return FleetSpec.model_validate(
        {
            "name": "gpus",
            "backend": "ecs",
            "nodes": [{"name": "n1", "address": address}],
            "ecs": ecs,
        }
    )


def refused(spec: FleetSpec, **environ: str) -> str:
    with pytest.raises(ValueError, match=r"^fleet gpus: ") as caught:
        options(spec, {"ECS_CLUSTER_NAME": "training", **environ})
    said = str(caught.value)
    assert "\n" not in said
    return said.removeprefix("fleet gpus: ")


def test_s1_10_names_of_the_reference_fill_gaps_of_the_file() -> None:
    found = options(fleet(), EVERYTHING)
    assert found.cluster == "training"
    assert found.health_check == EVERYTHING["DCGM_HEALTH_CHECK_TASK"]
    assert found.topic == TOPIC
    assert found.tables == EcsTables(task="ecs_task", job="ecs_job", node="ecs_node")


def test_the_fleet_file_precedes_the_environment_table_by_table() -> None:
    found = options(fleet(cluster="mine", tables={"job": "jobs"}, health_check="check"), EVERYTHING)
    assert (found.cluster, found.health_check, found.topic) == ("mine", "check", TOPIC)
    assert found.tables == EcsTables(task="ecs_task", job="jobs", node="ecs_node")


def test_a_blank_variable_is_none() -> None:
    found = options(fleet(cluster="mine"), dict.fromkeys(EVERYTHING, ""))
    assert (found.cluster, found.health_check, found.topic, found.tables) == (
        "mine",
        None,
        None,
        EcsTables(),
    )


def test_what_the_environment_does_not_name_stays_as_in_the_file() -> None:
    given = fleet(
        cluster="mine",
        region="eu-west-1",
        queue="https://sqs.eu-west-1.amazonaws.com/123456789012/events",
        poll="5s",
        container="t",
    )
    assert options(given, {}) == given.ecs


def test_without_a_cluster_the_sentence_names_both_places_for_it() -> None:
    with pytest.raises(
        ValueError,
        match=r"^fleet gpus: ecs\.cluster is missing, expected .* or in ECS_CLUSTER_NAME$",
    ):
        options(fleet(), {"ECS_CLUSTER_NAME": ""})


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.11",
        "gpu-01",
        "i-0123456789ABCDEF0",
        "i-0123456789abcdef",
        "i-012345",
        "mi-0123456789abcdef0",
    ],
)
def test_a_node_whose_address_is_no_instance_id_is_named(address: str) -> None:
    said = (
        f"the address of node n1 is '{address}', expected the id of its EC2 instance, such as "
        "i-0123456789abcdef0"
    )
    assert refused(fleet(address)) == said


@pytest.mark.parametrize("address", ["i-0123abcd", "i-0123456789abcdef0"])
def test_old_and_new_instance_ids_are_taken(address: str) -> None:
    assert options(fleet(address), EVERYTHING).cluster == "training"


@pytest.mark.parametrize(
    ("ecs", "said"),
    [
        ({"cluster": "a b"}, "ecs.cluster is 'a b', expected the name or ARN of an ECS cluster"),
        (
            {"queue": "events"},
            "ecs.queue is 'events', expected the URL of an SQS queue, which starts with https://",
        ),
        (
            {"queue": "https://sqs.eu-west-1.amazonaws.com"},
            "ecs.queue is 'https://sqs.eu-west-1.amazonaws.com', expected the URL of",
        ),
        ({"queue": "https://[x/1/q"}, "ecs.queue is 'https://[x/1/q', expected the URL of"),
        ({"topic": "people"}, "ecs.topic is 'people', expected the ARN of a standard SNS topic"),
        # Publish to one of those needs a group, and it takes no e-mail.
        (
            {"topic": f"{TOPIC}.fifo"},
            f"ecs.topic is '{TOPIC}.fifo', expected the ARN of a standard SNS topic",
        ),
        (
            {"node_task": "a/b"},
            "ecs.node_task is 'a/b', expected a task definition: family, family:revision, or ARN",
        ),
        (
            {"task_definition": "train:0"},
            "ecs.task_definition is 'train:0', expected a task definition",
        ),
        (
            {"tables": {"job": "x"}},
            "ecs.tables.job is 'x', expected the name or ARN of a DynamoDB table",
        ),
        ({"poll": "0s"}, "ecs.poll is '0s', expected 1s or more"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(ecs: dict[str, Any], said: str) -> None:
    assert refused(fleet(**ecs)).startswith(said)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SNS_TOPIC_ARN", "people"),
        ("DCGM_HEALTH_CHECK_TASK", "a b"),
        ("NODE_TABLE_NAME", "?"),
        ("ECS_CLUSTER_NAME", "?"),
    ],
)
def test_a_variable_that_cannot_be_is_named_as_what_it_is(variable: str, value: str) -> None:
    assert refused(fleet(), **{variable: value}).startswith(f"{variable} is '{value}', expected ")
