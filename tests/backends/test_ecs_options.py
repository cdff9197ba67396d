"""What a fleet of ECS finds in its file and in the environment (S1.10).

And the sentence for what cannot be.
"""

from __future__ import annotations

from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from relaunch.backends.ecs.options import options
from relaunch.spec.fleet import EcsTables, FleetSpec

TOPIC = "arn:aws:sns:eu-west-1:123456789012:people"
EVERYTHING = {
    "TASK_TABLE_NAME": "ecs_task",
    "JOB_TABLE_NAME": "ecs_job",
    "NODE_TABLE_NAME": "ecs_node",
    "TRAINING_JOB_TABLE_NAME": "ecs-job-sub",
    "CONTAINER_INSTANCE_TABLE_NAME": "ecs_container_instance",
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
    assert found.tables == EcsTables(
        task="ecs_task",
        job="ecs_job",
        node="ecs_node",
        training_job="ecs-job-sub",
        container_instance="ecs_container_instance",
    )


def test_the_fleet_file_precedes_the_environment_table_by_table() -> None:
    found = options(fleet(cluster="mine", tables={"job": "jobs"}, health_check="check"), EVERYTHING)
    assert (found.cluster, found.health_check, found.topic) == ("mine", "check", TOPIC)
    assert (found.tables.task, found.tables.job) == ("ecs_task", "jobs")


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
    assert f"node n1 is '{address}'" in refused(fleet(address))


@pytest.mark.parametrize("address", ["i-0123abcd", "i-0123456789abcdef0"])
def test_old_and_new_instance_ids_are_taken(address: str) -> None:
    assert options(fleet(address), EVERYTHING).cluster == "training"


MISTAKES: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"cluster": "a b"}, "cluster", "a b"),
    ({"queue": "events"}, "queue", "events"),
    (
        {"queue": "https://sqs.eu-west-1.amazonaws.com"},
        "queue",
        "https://sqs.eu-west-1.amazonaws.com",
    ),
    ({"queue": "https://[x/1/q"}, "queue", "https://[x/1/q"),
    ({"topic": "people"}, "topic", "people"),
    # Publish to one of those needs a group, and it takes no e-mail.
    ({"topic": f"{TOPIC}.fifo"}, "topic", f"{TOPIC}.fifo"),
    ({"node_task": "a/b"}, "node_task", "a/b"),
    ({"task_definition": "train:0"}, "task_definition", "train:0"),
    ({"tables": {"job": "x"}}, "tables.job", "x"),
    ({"poll": "0s"}, "poll", "0s"),
)


@pytest.mark.parametrize(("ecs", "key", "value"), MISTAKES)
def test_what_cannot_be_is_refused_in_one_sentence(
    ecs: dict[str, Any], key: str, value: str
) -> None:
    said = refused(fleet(**ecs))
    assert said.startswith(f"ecs.{key} is '{value}', expected ") and "\n" not in said


def test_the_sentences_of_mistakes_in_ecs_options(page: SnapshotAssertion) -> None:
    assert "\n".join(refused(fleet(**ecs)) for ecs, _, _ in MISTAKES) == page


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SNS_TOPIC_ARN", "people"),
        ("DCGM_HEALTH_CHECK_TASK", "a b"),
        ("NODE_TABLE_NAME", "?"),
        ("TRAINING_JOB_TABLE_NAME", "?"),
        ("ECS_CLUSTER_NAME", "?"),
    ],
)
def test_a_variable_that_cannot_be_is_named_as_what_it_is(variable: str, value: str) -> None:
    assert refused(fleet(), **{variable: value}).startswith(f"{variable} is '{value}', expected ")
