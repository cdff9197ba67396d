"""Calls AWS, each call once and within bounds of time and rate. What a failure means for the call is said; what to do about it is not."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import Any

THREADS = 16
"""Calls under way at once: at 30 calls a second and 0.1 s each three are enough; long polls of queues have one each."""
CONNECT_WITHIN, ANSWER_WITHIN = 3.0, 10.0
LONG_POLL = 25.0
"""SQS lets a receiver wait up to 20 s."""
RATES = {"read": (10.0, 50), "modify": (20.0, 50)}
"""Calls a second, and in a burst: half of what ECS gives an account (Amazon ECS API Reference, request throttling); others use it too."""
READS = frozenset(
    {"DescribeTasks", "ListTasks", "DescribeContainerInstances", "ListContainerInstances", "DescribeClusters", "ListAttributes"}
)
MODIFIES = frozenset({"RunTask", "StopTask", "PutAttributes", "DeleteAttributes", "UpdateContainerInstancesState"})
THROTTLES = (
    "Throttl",
    "RequestLimitExceeded",
    "TooManyRequests",
    "ProvisionedThroughputExceeded",
    "RequestThrottled",
    "SlowDown",
    "BandwidthLimitExceeded",
)
DENIALS = (
    "AccessDenied",
    "UnauthorizedOperation",
    "UnrecognizedClient",
    "ExpiredToken",
    "InvalidClientTokenId",
    "AuthFailure",
    "AuthorizationError",
    "SignatureDoesNotMatch",
    "InvalidSignature",
    "MissingAuthenticationToken",
    "NotAuthorized",
    "OptInRequired",
)
"""Beginnings of error codes, as services spell them with and without Exception behind."""


class Kind(StrEnum):
    THROTTLED = "THROTTLED"
    """Not applied; too much was asked of the account."""
    UNAVAILABLE = "UNAVAILABLE"
    """No answer, or one that AWS failed: whether it was applied is not known."""
    REFUSED = "REFUSED"
    """Not applied: what was asked cannot be done."""
    DENIED = "DENIED"
    """Not applied: these credentials may not do it, or there are none."""


class AwsError(Exception):
    def __init__(self, reason: str, code: str, kind: Kind, response: Mapping[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code
        """AWS's, empty where it gave none."""
        self.kind = kind
        self.response: Mapping[str, Any] = response or {}
        """All that AWS said: some errors have fields of their own."""


class Bucket:
    """So many calls a second, and some more in a burst; whoever is too early waits."""

    def __init__(self, rate: float, burst: int) -> None:
        self._every = 1 / rate
        self._slack = burst / rate
        self._due = 0.0

    async def take(self) -> None:
        now = time.monotonic()
        self._due = max(self._due, now - self._slack) + self._every
        if self._due > now:
            await asyncio.sleep(self._due - now)


class Aws:
    """The services of one region, by whatever credentials and endpoint boto3 finds. Belongs to one event loop."""

    def __init__(self, region: str | None) -> None:
        self._region = region
        self._clients: dict[str, Any] = {}
        self._making = threading.Lock()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="aws")
        self._buckets = {kind: Bucket(*rate) for kind, rate in RATES.items()}
        self.calls: Counter[str] = Counter()
        """How many were sent, by `ecs.DescribeTasks`."""

    async def call(self, service: str, operation: str, **request: Any) -> dict[str, Any]:
        """Call `operation`, as the API reference spells it, with its request's fields, and return its answer.

        Raises:
            AwsError: it was not answered, or the answer is an error.
        """
        if service == "ecs" and (kind := "read" if operation in READS else "modify" if operation in MODIFIES else None):
            await self._buckets[kind].take()
        self.calls[f"{service}.{operation}"] += 1
        answer = await asyncio.get_running_loop().run_in_executor(self._threads, self._send, service, operation, request)
        return answer

    async def close(self) -> None:
        """Send nothing more. What is under way ends by itself, within its own bounds."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._making:
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()

    def _send(self, service: str, operation: str, request: dict[str, Any]) -> dict[str, Any]:
        # Not above: whoever replays a workflow must not pay 0.3 s for it.
        from botocore import xform_name  # type: ignore[import-untyped]
        from botocore.exceptions import (  # type: ignore[import-untyped]
            BotoCoreError,
            ClientError,
            CredentialRetrievalError,
            NoCredentialsError,
            NoRegionError,
            ParamValidationError,
            PartialCredentialsError,
            ProfileNotFound,
            SSOError,
            TokenRetrievalError,
        )

        what = f"{service.upper()} {operation}"
        try:
            answer: dict[str, Any] = getattr(self._client(service), xform_name(operation))(**request)
        except ClientError as error:
            raise _told(what, error.response) from error
        except (
            NoCredentialsError,
            PartialCredentialsError,
            CredentialRetrievalError,
            ProfileNotFound,
            SSOError,
            TokenRetrievalError,
        ) as error:
            raise AwsError(f"{what}: {error}", "", Kind.DENIED) from error
        except (NoRegionError, ParamValidationError) as error:
            raise AwsError(f"{what}: {error}", "", Kind.REFUSED) from error
        except BotoCoreError as error:
            raise AwsError(f"{what} was not answered: {error}", "", Kind.UNAVAILABLE) from error
        return answer

    def _client(self, service: str) -> Any:
        with self._making:
            if service not in self._clients:
                import boto3  # type: ignore[import-untyped]
                from botocore.config import Config  # type: ignore[import-untyped]

                # Where it found what: at INFO, of each client.
                logging.getLogger("botocore").setLevel(logging.WARNING)
                config = Config(
                    connect_timeout=CONNECT_WITHIN,
                    read_timeout=LONG_POLL if service == "sqs" else ANSWER_WITHIN,
                    # Whoever calls repeats it: a second layer of tries would only hide how AWS is.
                    retries={"total_max_attempts": 1, "mode": "standard"},
                    max_pool_connections=THREADS,
                )
                self._clients[service] = boto3.session.Session().client(service, region_name=self._region, config=config)
            return self._clients[service]


def _told(what: str, response: Mapping[str, Any]) -> AwsError:
    """Read an error that AWS answered with."""
    error = response.get("Error") or {}
    code, status = str(error.get("Code") or ""), int((response.get("ResponseMetadata") or {}).get("HTTPStatusCode") or 0)
    if code.startswith(THROTTLES) or status == 429:
        kind = Kind.THROTTLED
    elif status >= 500:
        kind = Kind.UNAVAILABLE
    elif code.startswith(DENIALS) or status in (401, 403):
        kind = Kind.DENIED
    else:
        kind = Kind.REFUSED
    said = ": ".join(part for part in (code, str(error.get("Message") or "")) if part) or f"HTTP status {status}"
    return AwsError(f"{what}: {said}", code, kind, response)
