"""The HTTP that callers see: ECS is answered here, the rest by moto.

Faults come first; orders to EC2's power reach the machines.
"""

from __future__ import annotations

import io
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from werkzeug.serving import WSGIRequestHandler, make_server

from tests.doubles.aws.ecs import Ecs
from tests.doubles.aws.faults import LOST, RESET, Faults, Kind
from tests.doubles.aws.values import AwsRefusal, arn

ECS_TARGET = "AmazonEC2ContainerServiceV20141113."
Start = Callable[..., Any]


@dataclass(frozen=True)
class Call:
    at: float
    """time.monotonic() when it came."""
    service: str
    operation: str
    request: dict[str, Any]


@dataclass
class Answer:
    status: int
    content_type: str
    body: bytes


@dataclass
class Front:
    ecs: Ecs
    moto: Any
    """The WSGI application."""
    power: Callable[[Call, Callable[[], Answer]], Answer]
    """Answers the calls to EC2 that machines have to know of."""
    groups: Callable[[Call, Callable[[], Answer]], Answer]
    """Answers the calls to Auto Scaling."""
    faults: Faults = field(default_factory=Faults)
    calls: Counter[str] = field(default_factory=Counter)
    log: list[Call] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        call = _read(environ, body)
        with self._lock:
            self.calls[call.operation] += 1
            self.log.append(call)
        fault = self.faults.take(call.service, call.operation, call.request)
        if fault == RESET:
            return _hang_up(environ, start)
        if fault is not None and fault.seconds:
            # The call's own thread: a slow answer, not a test that waits.
            time.sleep(fault.seconds)
        answer = self._refused(call, fault) or self._answer(call, environ, body)
        if fault == LOST:
            return _hang_up(environ, start)
        start(
            f"{answer.status} double",
            [("Content-Type", answer.content_type), ("Content-Length", str(len(answer.body)))],
        )
        return [answer.body]

    @staticmethod
    def _refused(call: Call, fault: Kind | None) -> Answer | None:
        if fault is None or fault in (RESET, LOST) or fault.name == "slow":
            return None
        if fault.name == "failure":
            one = {"arn": arn("container-instance", "double"), "reason": fault.code} | (
                {"detail": fault.message} if fault.message else {}
            )
            return _json(200, {"tasks": [], "containerInstances": [], "failures": [one]})
        if fault.name == "throttle":
            if call.service == "ec2":
                return error(call, "RequestLimitExceeded", "Request limit exceeded.", 503)
            return error(
                call,
                "Throttling" if call.service in ("sns", "autoscaling") else "ThrottlingException",
                "Rate exceeded",
                400,
            )
        return error(call, fault.code, fault.message, fault.status)

    def _answer(self, call: Call, environ: dict[str, Any], body: bytes) -> Answer:
        if call.service == "ecs":
            try:
                return _json(200, self.ecs.answer(call.operation, call.request))
            except AwsRefusal as refusal:
                return _json(
                    refusal.status,
                    {"__type": refusal.code, "message": refusal.message} | refusal.members,
                )

        def by_moto() -> Answer:
            return self._by_moto(environ, body)

        if call.service == "ec2":
            return self.power(call, by_moto)
        if call.service == "autoscaling":
            return self.groups(call, by_moto)
        return by_moto()

    def _by_moto(self, environ: dict[str, Any], body: bytes) -> Answer:
        given: dict[str, Any] = {}

        def start(
            status: str, headers: list[tuple[str, str]], exc_info: Any = None
        ) -> Callable[[bytes], object]:
            given.update(
                status=int(status.split(maxsplit=1)[0]), type=dict(headers).get("Content-Type", "")
            )
            return lambda data: None

        answered = self.moto({**environ, "wsgi.input": io.BytesIO(body)}, start)
        try:
            data = b"".join(answered)
        finally:
            getattr(answered, "close", lambda: None)()
        return Answer(given["status"], given["type"], data)


def error(call: Call, code: str, message: str, status: int) -> Answer:
    """An error in the words of the service's protocol."""
    if call.service == "ec2":
        inner = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
        text = f"<Response><Errors>{inner}</Errors><RequestID>double</RequestID></Response>"
        return Answer(status, "text/xml", text.encode())
    if call.service in ("sns", "autoscaling"):
        text = (
            f"<ErrorResponse><Error><Type>Sender</Type><Code>{code}</Code>"
            f"<Message>{message}</Message></Error></ErrorResponse>"
        )
        return Answer(status, "text/xml", text.encode())
    return _json(status, {"__type": code, "message": message})


def _json(status: int, members: Mapping[str, Any]) -> Answer:
    return Answer(status, "application/x-amz-json-1.1", json.dumps(members).encode())


def _read(environ: Mapping[str, Any], body: bytes) -> Call:
    target = environ.get("HTTP_X_AMZ_TARGET", "")
    if target:
        service = "ecs" if target.startswith(ECS_TARGET) else _signed_for(environ)
        return Call(time.monotonic(), service, target.rpartition(".")[2], json.loads(body or b"{}"))
    form = dict(parse_qsl(body.decode(errors="replace")))
    return Call(
        time.monotonic(),
        _signed_for(environ),
        form.get("Action", environ.get("PATH_INFO", "")),
        dict(form),
    )


def _signed_for(environ: Mapping[str, Any]) -> str:
    scope = (
        environ.get("HTTP_AUTHORIZATION", "")
        .partition("Credential=")[2]
        .partition(",")[0]
        .split("/")
    )
    return scope[3] if len(scope) == 5 else ""


def _hang_up(environ: dict[str, Any], start: Start) -> list[bytes]:
    """The caller reads the end of the connection where an answer should be."""
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    start("200 OK", [])
    return []


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        """Who wants to know has the list of calls."""


class Server:
    """Serves an application on the loopback interface, one thread a request."""

    def __init__(self, application: Any, port: int = 0) -> None:
        self._server = make_server(
            "127.0.0.1", port, application, threaded=True, request_handler=_Quiet
        )
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.05},
            name="aws-double",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
