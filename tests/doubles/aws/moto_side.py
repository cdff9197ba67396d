"""What moto plays: EC2, SQS, SNS, DynamoDB, CloudWatch Logs, Auto Scaling.

Spoken to in its own process, by the wire formats of AWS.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from tests.doubles.aws.values import ACCOUNT, REGION

# Read when moto is imported: its list of machine images costs a second, and no test here asks for
# one.
os.environ.setdefault("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")
_CODES = {"pending": 0, "running": 16, "stopping": 64, "stopped": 80, "terminated": 48}
_TARGETS = {"logs": "Logs_20140328", "sqs": "AmazonSQS"}


class MotoRefusal(Exception):
    """What moto answered, where that was an error."""


class Moto:
    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.test import Client

        self.app = DomainDispatcherApplication(create_backend_app)
        self.url = "http://127.0.0.1"
        """Where callers see it: a queue's URL begins with it."""
        self._client = Client(self.app)

    def json(self, service: str, operation: str, request: Mapping[str, Any]) -> dict[str, Any]:
        headers = {
            "X-Amz-Target": f"{_TARGETS[service]}.{operation}",
            "Content-Type": "application/x-amz-json-1.1",
        }
        answer = json.loads(self._send(service, json.dumps(request), headers) or "{}")
        return dict(answer)

    def ec2(self, operation: str, **request: str) -> str:
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        return self._send(
            "ec2", urlencode({"Action": operation, "Version": "2016-11-15"} | request), headers
        )

    def _send(self, service: str, body: str, headers: Mapping[str, str]) -> str:
        credential = (
            f"AWS4-HMAC-SHA256 Credential=double/20200101/{REGION}/{service}/aws4_request, "
            "SignedHeaders=host, Signature=double"
        )
        response = self._client.post(
            "/", base_url=self.url, data=body, headers={**headers, "Authorization": credential}
        )
        text = response.get_data(as_text=True)
        response.close()
        if response.status_code >= 300:
            raise MotoRefusal(text)
        return text

    def run_instance(self, kind: str, address: str) -> str:
        """Return the EC2 id of a new one, at that private address.

        Ranks on one machine have to reach each other.
        """
        answer = self.ec2(
            "RunInstances", ImageId="ami-12c6146b", InstanceType=kind, MinCount="1", MaxCount="1"
        )
        found = re.search(r"<instanceId>(i-[0-9a-f]+)</instanceId>", answer)
        assert found is not None, answer
        for nic in self._instance(found.group(1)).nics.values():
            nic.private_ip_address = address
        return found.group(1)

    def _instance(self, ec2_id: str) -> Any:
        from moto.backends import get_backend

        return get_backend("ec2")[ACCOUNT][REGION].get_instance(ec2_id)

    def set_state(self, ec2_id: str, state: str) -> None:
        """moto's instances stop and start at once.

        Those of AWS take their time, and a start is a new launch time.
        """
        instance = self._instance(ec2_id)
        if instance._state.name == "terminated":
            return
        instance._state.name, instance._state.code = state, _CODES[state]
        if state == "pending":
            # EC2 tells it in whole seconds, which a stop and a start of its double may take
            # together.
            instance.launch_time = max(
                datetime.now(UTC).replace(tzinfo=None), instance.launch_time + timedelta(seconds=1)
            )

    def send_message(self, queue_url: str, body: str) -> None:
        self.json("sqs", "SendMessage", {"QueueUrl": queue_url, "MessageBody": body})

    def has_log_group(self, group: str) -> bool:
        groups = self.json("logs", "DescribeLogGroups", {"logGroupNamePrefix": group})["logGroups"]
        return any(one["logGroupName"] == group for one in groups)

    def create_log_group(self, group: str) -> None:
        if not self.has_log_group(group):
            self.json("logs", "CreateLogGroup", {"logGroupName": group})

    def create_log_stream(self, group: str, stream: str) -> None:
        self.json("logs", "CreateLogStream", {"logGroupName": group, "logStreamName": stream})

    def put_lines(self, group: str, stream: str, lines: Iterable[str], now: float) -> None:
        # An event without text is refused; Docker's driver drops empty lines as well.
        events = [{"timestamp": int(now * 1000), "message": line} for line in lines if line]
        if events:
            self.json(
                "logs",
                "PutLogEvents",
                {"logGroupName": group, "logStreamName": stream, "logEvents": events},
            )

    @staticmethod
    def forget() -> None:
        """All that moto has, of all services: it is one for the whole process."""
        from moto.backends import get_backend

        for service in ("autoscaling", "dynamodb", "ec2", "logs", "sns", "sqs"):
            get_backend(service).reset()
