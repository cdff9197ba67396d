"""Calls AWS. Each call is sent once, with a timeout and, for ECS, a rate limit.

Errors are classified by what they mean for the call; how to react is left to the caller.
"""

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
"""Concurrent calls. At 30 calls a second of 0.1 s each three are enough; each long poll of a queue
occupies one more.
"""
CONNECT_TIMEOUT, ANSWER_TIMEOUT = 3.0, 10.0
LONG_POLL = 25.0
"""Read timeout of SQS in seconds; a receiver may wait up to 20."""
RATES = {"read": (10.0, 50), "modify": (20.0, 50)}
"""Calls per second, and size of a burst: half of what ECS grants an account (Amazon ECS API
Reference, request throttling), because other programs use the account too.
"""
READS = frozenset(
    {
        "DescribeTasks",
        "ListTasks",
        "DescribeContainerInstances",
        "ListContainerInstances",
        "DescribeClusters",
        "ListAttributes",
    }
)
MODIFIES = frozenset(
    {"RunTask", "StopTask", "PutAttributes", "DeleteAttributes", "UpdateContainerInstancesState"}
)
THROTTLES = (
    "Throttl",
    "RequestLimitExceeded",
    "TooManyRequests",
    "ProvisionedThroughputExceeded",
    "RequestThrottled",
    "SlowDown",
    "BandwidthLimitExceeded",
    # Auto Scaling: another update of the group is under way.
    "ResourceContention",
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
"""Prefixes of error codes; some services append Exception, and some do not."""


class Kind(StrEnum):
    THROTTLED = "THROTTLED"
    """Not applied: the account's rate limit was exceeded."""
    UNAVAILABLE = "UNAVAILABLE"
    """Not known whether it was applied: no answer, or a server error."""
    REFUSED = "REFUSED"
    """Not applied: the request cannot be carried out."""
    DENIED = "DENIED"
    """Not applied: the credentials are missing or do not permit the call."""


class AwsError(Exception):
    def __init__(
        self, reason: str, code: str, kind: Kind, response: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code
        """Error code of AWS; empty if it gave none."""
        self.kind = kind
        self.response: Mapping[str, Any] = response or {}
        """Whole response of AWS: some errors have fields of their own."""


class Bucket:
    """Token bucket that limits calls per second, allows bursts, and delays excess calls."""

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
    """Clients for the AWS services of one region. Belongs to one event loop.

    Credentials and endpoints are those that boto3 finds.
    """

    def __init__(self, region: str | None) -> None:
        self._region = region
        self._clients: dict[str, Any] = {}
        self._making = threading.Lock()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="aws")
        self._buckets = {kind: Bucket(*rate) for kind, rate in RATES.items()}
        self.calls: Counter[str] = Counter()
        """Number of calls sent, by name, such as `ecs.DescribeTasks`."""

    async def call(self, service: str, operation: str, **request: Any) -> dict[str, Any]:
        """Call an operation with its request's fields, and return its answer.

        `operation` is spelled as in the API reference.

        Raises:
            AwsError: There was no answer, or the answer is an error.
        """
        if service == "ecs" and (
            kind := "read" if operation in READS else "modify" if operation in MODIFIES else None
        ):
            await self._buckets[kind].take()
        self.calls[f"{service}.{operation}"] += 1
        answer = await asyncio.get_running_loop().run_in_executor(
            self._threads, self._send, service, operation, request
        )
        return answer

    async def close(self) -> None:
        """Send no further calls. Calls in flight end by themselves, within their own timeouts."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._making:
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()

    def _send(self, service: str, operation: str, request: dict[str, Any]) -> dict[str, Any]:
        # Imported here, because the import takes 0.3 s, which a workflow replay must not pay.
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
            answer: dict[str, Any] = getattr(self._client(service), xform_name(operation))(
                **request
            )
        except ClientError as error:
            raise _classify_error(what, error.response) from error
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

                # botocore logs at INFO, for each client, where it found credentials.
                logging.getLogger("botocore").setLevel(logging.WARNING)
                config = Config(
                    connect_timeout=CONNECT_TIMEOUT,
                    read_timeout=LONG_POLL if service == "sqs" else ANSWER_TIMEOUT,
                    # The caller retries: a second layer of retries would only hide the state of
                    # AWS.
                    retries={"total_max_attempts": 1, "mode": "standard"},
                    max_pool_connections=THREADS,
                )
                self._clients[service] = boto3.session.Session().client(
                    service, region_name=self._region, config=config
                )
            return self._clients[service]


def _classify_error(what: str, response: Mapping[str, Any]) -> AwsError:
    """Return the classified error for an error response of AWS."""
    error = response.get("Error") or {}
    code, status = (
        str(error.get("Code") or ""),
        int((response.get("ResponseMetadata") or {}).get("HTTPStatusCode") or 0),
    )
    if code.startswith(THROTTLES) or status == 429:
        kind = Kind.THROTTLED
    elif status >= 500:
        kind = Kind.UNAVAILABLE
    elif code.startswith(DENIALS) or status in (401, 403):
        kind = Kind.DENIED
    else:
        kind = Kind.REFUSED
    said = (
        ": ".join(part for part in (code, str(error.get("Message") or "")) if part)
        or f"HTTP status {status}"
    )
    return AwsError(f"{what}: {said}", code, kind, response)
