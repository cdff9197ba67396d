"""The double of AWS runs containers, reboots instances and cuts them off.

As AWS documents it, and as it says where AWS does not.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.doubles.aws import AwsDouble
from tests.doubles.aws_caller import Caller, lives, logs_in, new_family, refused, register, until


def test_exit_codes_are_those_of_the_processes(aws: AwsDouble, caller: Caller, node: str) -> None:
    for script, expected in (("exit 0", 0), ("exit 3", 3), ("kill -ABRT $$", 134)):
        family = register(aws, "sh", "-c", script)
        ended = caller.until(caller.run(node, family)["tasks"][0]["taskArn"], "STOPPED")
        assert (ended["stopCode"], ended["containers"][0]["exitCode"]) == (
            "EssentialContainerExited",
            expected,
        )
    family = register(aws, "/nonexistent/program")
    ended = caller.until(caller.run(node, family)["tasks"][0]["taskArn"], "STOPPED")
    assert (ended["stopCode"], "exitCode" in ended["containers"][0]) == ("TaskFailedToStart", False)
    assert ended["containers"][0]["reason"].startswith("CannotStartContainerError")


def test_a_container_has_its_own_environment_and_command(
    aws: AwsDouble, caller: Caller, node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_MACHINE", "1")
    family = register(
        aws, "false", environment=[{"name": "A", "value": "1"}, {"name": "B", "value": "1"}]
    )
    override = {
        "name": "trainer",
        "command": [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"],
        "environment": [{"name": "B", "value": "2"}],
        "resourceRequirements": [{"type": "GPU", "value": "1"}],
    }
    arn = caller.run(node, family, overrides={"containerOverrides": [override]})["tasks"][0][
        "taskArn"
    ]
    gpus = caller.until(arn, "STOPPED")["containers"][0]["gpuIds"]
    had = json.loads(aws.output(arn, "trainer"))
    assert (had["A"], had["B"], had["NVIDIA_VISIBLE_DEVICES"], "OF_THE_MACHINE" in had) == (
        "1",
        "2",
        gpus[0],
        False,
    )


def ignores_term(aws: AwsDouble, arn: str) -> bool:
    (pid,) = aws.pids(arn).values()
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(line for line in status if line.startswith("SigIgn")).split()[1]
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


def test_a_stop_is_asynchronous_and_says_who_and_why(
    aws: AwsDouble, caller: Caller, node: str
) -> None:
    aws.delays.stop_timeout = 0.3
    family = register(aws, "sh", "-c", "trap '' TERM; while :; do sleep 0.05; done")
    task = caller.run(node, family, tags=[{"key": "job", "value": "x"}])["tasks"][0]
    assert task["tags"] == [{"key": "job", "value": "x"}]
    caller.until(task["taskArn"], "RUNNING")
    until(lambda: ignores_term(aws, task["taskArn"]))  # its shell has come to `trap`
    asked = caller.ecs.stop_task(
        cluster="training", task=task["taskArn"], reason="relaunch: a/b/1/2"
    )["task"]
    assert (asked["lastStatus"], asked["desiredStatus"], asked["tags"]) == (
        "RUNNING",
        "STOPPED",
        [],
    )
    assert (
        task["taskArn"]
        in caller.ecs.list_tasks(cluster="training", desiredStatus="STOPPED", family=family)[
            "taskArns"
        ]
    )
    ended = caller.until(task["taskArn"], "STOPPED")
    assert (ended["stopCode"], ended["stoppedReason"]) == ("UserInitiated", "relaunch: a/b/1/2")
    assert ended["containers"][0]["exitCode"] == 137, "it did not heed the SIGTERM"
    assert ended["version"] > asked["version"] > task["version"]
    assert not lives(aws, task["taskArn"])


def test_nothing_of_a_container_outlives_it(aws: AwsDouble, caller: Caller, node: str) -> None:
    family = register(aws, "sh", "-c", "setsid sleep 1000 & echo $!; exit 0")
    arn = caller.run(node, family)["tasks"][0]["taskArn"]
    caller.until(arn, "STOPPED")
    child = int(aws.output(arn, "trainer"))
    until(lambda: _is_gone(child))


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_the_node_image_runs_the_agent_and_logs_its_lines(
    aws: AwsDouble, caller: Caller, node: str
) -> None:
    family = new_family()
    aws.register(
        family,
        [
            {
                "name": "node",
                "image": "relaunch-node",
                "command": ["no-such-command"],
                "logConfiguration": logs_in("nodes"),
            }
        ],
    )
    arn = caller.run(node, family)["tasks"][0]["taskArn"]
    ended = caller.until(arn, "STOPPED")
    stream = f"p/node/{arn.rsplit('/', 1)[-1]}"
    events = caller.logs.get_log_events(logGroupName="nodes", logStreamName=stream)["events"]
    assert ended["containers"][0]["exitCode"] != 0
    assert [one["message"] for one in events] == aws.output(arn, "node").splitlines() != []


def test_a_container_does_not_start_without_its_log_group(
    aws: AwsDouble, caller: Caller, node: str
) -> None:
    family = new_family()
    rows = [
        {
            "name": "trainer",
            "image": "any",
            "memory": 64,
            "command": ["true"],
            "logConfiguration": logs_in("missing"),
        }
    ]
    caller.ecs.register_task_definition(family=family, containerDefinitions=rows)
    ended = caller.until(caller.run(node, family)["tasks"][0]["taskArn"], "STOPPED")
    assert (ended["stopCode"], "log group does not exist" in ended["containers"][0]["reason"]) == (
        "TaskFailedToStart",
        True,
    )


def test_a_reboot_ends_what_runs_and_gives_a_new_boot_id(
    aws: AwsDouble, caller: Caller, node: str
) -> None:
    instance = aws.instance(node)
    family = register(aws, "sleep", "1000")
    arn = caller.run(node, family)["tasks"][0]["taskArn"]
    caller.until(arn, "RUNNING")
    before = instance.boot_id
    caller.ec2.reboot_instances(InstanceIds=[node])
    assert caller.node(instance.arn)["agentConnected"], "it is only queued"
    until(lambda: not caller.node(instance.arn)["agentConnected"])
    assert caller.task(arn)["lastStatus"] == "RUNNING", "no agent is there to report its end"
    assert not lives(aws, arn)
    ended = caller.until(arn, "STOPPED")
    assert (ended["containers"][0]["exitCode"], caller.node(instance.arn)["agentConnected"]) == (
        137,
        True,
    )
    assert (
        instance.boot_id != before,
        instance.boots,
        caller.node(instance.arn)["runningTasksCount"],
    ) == (True, 2, 0)


def test_a_node_without_power_or_network_runs_its_tasks_for_ecs(
    aws: AwsDouble, caller: Caller, node: str
) -> None:
    instance = aws.instance(node)
    family = register(aws, "sleep", "1000")
    arn = caller.run(node, family)["tasks"][0]["taskArn"]
    caller.until(arn, "RUNNING")
    instance.disconnect()
    caller.ecs.stop_task(cluster="training", task=arn)
    assert (caller.task(arn)["lastStatus"], caller.task(arn)["desiredStatus"], lives(aws, arn)) == (
        "RUNNING",
        "STOPPED",
        True,
    )
    instance.connect()
    caller.until(arn, "STOPPED")

    arn = caller.run(node, family)["tasks"][0]["taskArn"]
    caller.until(arn, "RUNNING")
    instance.never_returns()
    instance.kill()
    assert (caller.task(arn)["lastStatus"], lives(aws, arn)) == ("RUNNING", False)
    ghost = instance.arn
    instance.never_returns(False)
    assert instance.reregister() != ghost
    found = caller.ecs.list_container_instances(
        cluster="training", filter=f"ec2InstanceId == {node}"
    )["containerInstanceArns"]
    assert [caller.node(one)["agentConnected"] for one in found] == [False, True]


def test_a_forced_deregistration_stops_tasks_for_ecs_only(
    aws: AwsDouble, caller: Caller, node: str
) -> None:
    instance = aws.instance(node)
    arn = caller.run(node, register(aws, "sleep", "1000"))["tasks"][0]["taskArn"]
    caller.until(arn, "RUNNING")
    named = {"cluster": "training", "containerInstance": instance.arn}
    with pytest.raises(ClientError, match="Found running tasks"):
        caller.ecs.deregister_container_instance(**named)
    caller.ecs.deregister_container_instance(**named, force=True)
    task = caller.task(arn)
    assert (task["lastStatus"], lives(aws, arn)) == ("STOPPED", True)
    assert task["stoppedReason"] == "Container instance deregistration forced by user"
    assert "exitCode" not in task["containers"][0]
    assert caller.node(named["containerInstance"])["status"] == "INACTIVE"
    assert not caller.ecs.list_container_instances(
        cluster="training", filter=f"ec2InstanceId == {node}"
    )["containerInstanceArns"]
    instance.kill()
    assert not lives(aws, arn)


def describe_instance(caller: Caller, node: str) -> dict[str, Any]:
    return dict(
        caller.ec2.describe_instances(InstanceIds=[node])["Reservations"][0]["Instances"][0]
    )


def test_an_instance_that_is_stopping_cannot_be_started(
    aws: AwsDouble, caller: Caller, node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aws.delays, "power_off", 1000.0)
    caller.ec2.stop_instances(InstanceIds=[node])
    assert describe_instance(caller, node)["State"]["Name"] == "stopping"
    with pytest.raises(ClientError) as error:
        caller.ec2.start_instances(InstanceIds=[node])
    assert refused(error) == "IncorrectInstanceState"


def test_a_stop_and_start_is_a_new_boot(aws: AwsDouble, caller: Caller, node: str) -> None:
    def status() -> str:
        return str(describe_instance(caller, node)["State"]["Name"])

    launched = describe_instance(caller, node)["LaunchTime"]
    caller.ec2.stop_instances(InstanceIds=[node])
    until(lambda: status() == "stopped")
    caller.ec2.start_instances(InstanceIds=[node])
    until(lambda: status() == "running")
    until(lambda: caller.node(aws.instance(node).arn)["agentConnected"])
    relaunched = describe_instance(caller, node)["LaunchTime"]
    assert (relaunched > launched, aws.instance(node).boots) == (True, 2)


def test_a_terminated_instance_stops_its_tasks_for_good(
    aws: AwsDouble, caller: Caller, node: str
) -> None:
    family = register(aws, "sleep", "1000")
    arn = caller.run(node, family)["tasks"][0]["taskArn"]
    caller.until(arn, "RUNNING")
    caller.ec2.terminate_instances(InstanceIds=[node])
    assert (
        caller.until(arn, "STOPPED")["stoppedReason"] == f"Host EC2 (instance {node}) terminated."
    )
    caller.ec2.reboot_instances(InstanceIds=[node])
    state = caller.ec2.describe_instances(InstanceIds=[node])["Reservations"][0]["Instances"][0][
        "State"
    ]["Name"]
    assert (state, caller.node(aws.instance(node).arn)["status"]) == ("terminated", "INACTIVE")


def test_ec2_says_which_instance_is_impaired_or_about_to_retire(
    aws: AwsDouble, caller: Caller, node: str
) -> None:
    aws.instance(node).status(system="impaired", event="instance-retirement")
    other = aws.add_instance(gpus=0)
    found = caller.ec2.describe_instance_status(
        InstanceIds=[node, other], IncludeAllInstances=True
    )["InstanceStatuses"]
    told = {
        one["InstanceId"]: (
            one["SystemStatus"]["Status"],
            one["InstanceStatus"]["Status"],
            len(one.get("Events", [])),
        )
        for one in found
    }
    assert told == {node: ("impaired", "ok", 1), other: ("ok", "ok", 0)}


def test_nothing_runs_on_when_it_ends(tmp_path: Path) -> None:
    with AwsDouble(tmp_path) as own:
        node = own.add_instance(gpus=0)
        caller = Caller(own)
        arn = caller.run(node, register(own, "sh", "-c", "sleep 1000 & setsid sleep 1000 & wait"))[
            "tasks"
        ][0]["taskArn"]
        caller.until(arn, "RUNNING")
        pid = own.pids(arn)["trainer"]
        task = arn.rsplit("/", 1)[-1]
        until(lambda: len(_of(task)) == 3)
    assert _of(task) == [] and _is_gone(pid)


def _of(task: str) -> list[int]:
    """Processes that carry the mark of the task's container."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and task.encode() in Path(f"/proc/{entry}/environ").read_bytes():
                found.append(int(entry))
        except OSError:
            continue
    return found
