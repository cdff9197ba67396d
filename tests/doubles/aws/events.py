"""ECS's events, as EventBridge puts them into an SQS queue.

"ECS Task State Change", "ECS Container Instance State Change".

EventBridge promises neither order nor once: tests say what is dropped, doubled or put after its
successor.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from queue import SimpleQueue
from threading import Thread
from typing import Any

from tests.doubles.aws.moto_side import MotoRefusal
from tests.doubles.aws.values import ACCOUNT, REGION, ContainerInstance, Task


@dataclass
class Events:
    send: Callable[[str, str], None]
    """Of a queue's URL and a message."""
    now: Callable[[], float]
    drop: int = 0
    """How many of the next are lost."""
    double: int = 0
    """How many of the next come twice."""
    reorder: int = 0
    """How many of the next come after the one that follows them."""
    queues: list[str] = field(default_factory=list)
    _out: SimpleQueue[tuple[str, ...] | None] = field(default_factory=SimpleQueue)
    _kept: list[str] = field(default_factory=list)
    _thread: Thread | None = None

    def to(self, queue_url: str) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._deliver, name="aws-double-events", daemon=True)
            self._thread.start()
        self.queues.append(queue_url)

    def changed(self, one: Task | ContainerInstance) -> None:
        if not self.queues:
            return
        if isinstance(one, Task):
            messages = [self._message("ECS Task State Change", one.arn, one.event(self.now()))]
        else:
            messages = [self._message("ECS Container Instance State Change", one.arn, one.event())]
        if self.drop:
            self.drop -= 1
            return
        if self.double:
            self.double -= 1
            messages *= 2
        if self.reorder:
            self.reorder -= 1
            self._kept += messages
            return
        self._out.put((*messages, *self._kept))
        self._kept.clear()

    def _message(self, kind: str, arn: str, detail: dict[str, Any]) -> str:
        return json.dumps(
            {
                "version": "0",
                "id": str(uuid.uuid4()),
                "detail-type": kind,
                "source": "aws.ecs",
                "account": ACCOUNT,
                "time": datetime.fromtimestamp(self.now(), UTC)
                .isoformat(timespec="seconds")
                .replace("+00:00", "Z"),
                "region": REGION,
                "resources": [arn],
                "detail": detail,
            }
        )

    def close(self) -> None:
        if self._thread is not None:
            self._out.put(None)
            self._thread.join()

    def _deliver(self) -> None:
        while (messages := self._out.get()) is not None:
            for message in messages:
                for queue in self.queues:
                    # A queue that was deleted gets none, as on AWS.
                    with contextlib.suppress(MotoRefusal):
                        self.send(queue, message)
