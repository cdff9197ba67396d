"""A double of AWS for tests: Amazon ECS on container instances, written here.

Auto Scaling's Standby and health checks, too; EC2, SQS, SNS, DynamoDB and Logs by moto.

It plays AWS as documented, over real HTTP on the loopback interface, with containers that are real
processes. So it proves code against our reading of AWS's documents; it proves nothing about AWS.
What is documented: RunTask's idempotency (ECS_Idempotency), the limits and characters of each
operation's page, `failures` with HTTP 200 (API failure reasons), the cluster query language, the
stop codes and the SIGTERM-then-SIGKILL of StopTask, that stopped tasks are forgotten after an hour,
that attributes count at placement, that events carry versions and no tags and may be lost, doubled
or late, that an Auto Scaling group terminates an instance that goes down, unless in Standby. What
is chosen, as no document says it, stands in machines.py and groups.py. Not played: services,
Fargate, StartTask, capacity providers, an Auto Scaling group that launches instances.

    with AwsDouble(tmp_path) as aws:                        # starts within 4 s; share one a module
    where tests do not disturb each other
        node = aws.add_instance(gpus=8)                     # an EC2 id that is a container instance
        of the cluster aws.cluster ("training")
        aws.add_group("gpus", [node], min_size=1)           # has .states and .desired
        aws.register("train", [{"name": "trainer", "image": "any", "command": ["python3", "-c",
        "..."]}])
        for name, value in aws.environment().items():       # AWS_ENDPOINT_URL, credentials, region:
        the code under test runs as it is
            monkeypatch.setenv(name, value)

    aws.instance(node)      .disconnect() .connect() .kill() .never_returns() .reregister()
    .health("IMPAIRED") .status(system="impaired")
                            .arn .boot_id .boots .state .folder
    aws.script("train", exit_code=137, reason="OutOfMemoryError: Container killed due to memory
    usage")       instead of running anything
    aws.faults.add("RunTask", LOST)                         also RESET, THROTTLE, SERVER_ERROR,
    DENIED, slow(s), error(code),
                                                            failure("RESOURCE:GPU")
    aws.calls["RunTask"]    aws.requests                    what was asked so far
    aws.tasks()             aws.pids(arn)  aws.output(arn, "trainer")
    aws.events_to(url)      aws.events.drop = 2             also double, reorder: of the next n
    events
    aws.advance(3600)       aws.expire(arn)                 what AWS forgets
    aws.delays.reboot = 3   aws.log_delay  aws.ecs.lag      how long things take

A container of the image "relaunch-node" runs the agent's zipapp, `task` and its command, with the
instance's state folder; any other runs its command. Lines of a container with the awslogs driver
are in the stream <prefix>/<container>/<task id>. By hand: python -m tests.doubles.aws --instances 2
--gpus 0
"""

from tests.doubles.aws.double import AwsDouble, Instance
from tests.doubles.aws.faults import (
    DENIED,
    LOST,
    RESET,
    SERVER_ERROR,
    THROTTLE,
    error,
    failure,
    slow,
)
from tests.doubles.aws.machines import Delays

__all__ = [
    "DENIED",
    "LOST",
    "RESET",
    "SERVER_ERROR",
    "THROTTLE",
    "AwsDouble",
    "Delays",
    "Instance",
    "error",
    "failure",
    "slow",
]
