"""The traces of incidents, sent to a real HTTP server that decodes what it gets."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from relaunch.activities import traces
from relaunch.activities.traces import TraceSender
from relaunch.config import ConfigError, find_trace_endpoint
from tests.receivers import Webhook, find_port, webhook
from tests.recovery.test_trace import closed
from tests.traces import ReceivedSpan, list_traces

PATIENCE_S = 60.0
MADE = closed(("detecting", 100, 101), ("stopping", 101, 110), nodes=("n1",))


def until(is_so: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@contextmanager
def sender(url: str, web_ui: str = "") -> Iterator[TraceSender]:
    made = TraceSender(url, web_ui, retry_delay=0.05)
    made.start()
    try:
        yield made
    finally:
        made.close(PATIENCE_S)


@pytest.fixture(autouse=True)
def _short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")


def test_an_incident_is_one_trace_with_its_own_times_and_a_link() -> None:
    with webhook() as received, sender(received.url, "http://ui:8080/") as made:
        made.submit(MADE)
        made.submit(MADE)
        until(lambda: len(received.requests) == 2, "nothing is sent")
    (trace, again) = list_traces(received)
    assert trace == again
    root, *children = trace
    assert root.parent == "" and root.name == "incident"
    assert {(one.trace, one.parent) for one in children} == {(root.trace, root.id)}
    assert [(one.name, (one.end - one.begin).total_seconds()) for one in children] == [
        ("detecting", 1),
        ("stopping", 9),
        ("regaining", 90),
    ]
    assert (root.begin, root.end) == (MADE.incident.opened, MADE.incident.recovered)
    assert root.attributes["relaunch.nodes"] == ["n1"]
    assert root.attributes["url.full"] == "http://ui:8080/namespaces/default/workflows/job%2Fa/r1"
    assert root.resource["service.name"] == "relaunch"
    headers, _ = received.requests[0]
    assert headers["content-type"] == "application/x-protobuf"


def test_the_variables_of_opentelemetry_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "training")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20k3y")
    with webhook() as received, sender(received.url) as made:
        made.submit(MADE)
        until(lambda: received.requests, "nothing is sent")
    (((root, *_),), (headers, _)) = list_traces(received), received.requests[0]
    assert root.resource["service.name"] == "training"
    assert root.resource["deployment.environment.name"] == "lab"
    assert headers["authorization"] == "Bearer k3y"


def test_a_failure_is_logged_once_and_what_waits_is_sent_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    other = replace(MADE, number=3)
    with webhook(status=401) as received, sender(received.url) as made:
        made.submit(MADE)
        made.submit(other)
        # Each in turn: one that is refused does not hold up the others.
        until(lambda: len({one[0].trace for one in list_traces(received)}) == 2, "only one is sent")
        until(lambda: len(received.requests) > 3, "it is not tried again")
        received.status = 200
        until(lambda: "sent again" in caplog.text, "they are not sent")
    warnings = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert len(warnings) == 1, warnings
    assert received.url in warnings[0] and "HTTP 401 Unauthorized" in warnings[0]


@pytest.mark.parametrize("kind", ["hangs", "refuses"])
def test_an_endpoint_that_does_not_answer_delays_no_one(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with webhook(hangs=True) as received:
        url = received.url if kind == "hangs" else f"http://u:s3cret@127.0.0.1:{find_port()}/"
        made = TraceSender(url)
        made.start()
        for number in range(traces.MAX_WAITING + 10):
            made.submit(replace(MADE, number=number))
        # Did each wait for its answer, that would take a second each.
        until(lambda: "cannot be sent" in caplog.text, "the failure is not logged")
        assert len(made._waiting) <= traces.MAX_WAITING
        made.close(0.1)
    assert "s3cret" not in caplog.text
    reason = "no answer within" if kind == "hangs" else "Connection refused"
    assert reason in caplog.text
    assert re.search(r"the traces of 100[01] incidents are not sent", caplog.text)


def test_an_hour_is_enough(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(traces, "MAX_AGE_S", 0.0)
    with webhook(status=401) as received, sender(received.url) as made:
        made.submit(MADE)
        until(lambda: "HTTP 401 Unauthorized" in caplog.text, "the failure is not logged")
        until(lambda: not made._waiting and not made._sending, "it is kept")
    assert len(received.requests) == 1


@pytest.mark.parametrize(("status", "count"), [(400, 1), (302, 3), (500, 3)])
def test_a_trace_that_is_refused_is_not_tried_again(
    status: int, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with webhook(status=status) as received, sender(received.url) as made:
        made.submit(MADE)
        until(lambda: len(received.requests) >= count, "it is not tried again")
        until(lambda: f"HTTP {status}" in caplog.text, "the failure is not logged")
        received.status = 200
        made.submit(replace(MADE, number=3))
        until(lambda: "sent again" in caplog.text, "the next is not sent")
    ids = [trace[0].trace for trace in list_traces(received)]
    assert ids.count(ids[0]) == 1 if status == 400 else ids.count(ids[0]) > count


def test_a_bug_ends_the_tracing_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(traces, "build_spans", fail)
    with sender("http://127.0.0.1:9/") as made:
        made.submit(MADE)
        until(lambda: "incidents are not traced" in caplog.text, "nothing is logged")
        assert "a bug" in caplog.text
        made.submit(MADE)
        assert not made._waiting


@pytest.mark.parametrize(
    ("url", "certificate", "reason"),
    [
        ("http://127.0.0.1:{port}/", "", "Connection refused"),
        ("https://127.0.0.1:{port}/", "/nothing.pem", "/nothing.pem"),
    ],
)
def test_the_reason_of_a_failure_is_one_clause(
    url: str,
    certificate: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", certificate)
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # they would count before it
        monkeypatch.delenv(name, raising=False)
    with sender(url.format(port=find_port())) as made:
        made.submit(MADE)
        until(lambda: "cannot be sent" in caplog.text, "the failure is not logged")
    (line,) = (one.getMessage() for one in caplog.records if "cannot be sent" in one.msg)
    assert re.search(f": [^:]*{re.escape(reason)}[^:]*; each is tried again", line), line


BASE, OWN = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
URL = "http://collector:4318"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({BASE: " "}, None),
        ({BASE: URL}, (f"{URL}/v1/traces", BASE)),
        ({BASE: f"{URL}/otlp/"}, (f"{URL}/otlp/v1/traces", BASE)),
        ({BASE: URL, OWN: "https://t:1/x"}, ("https://t:1/x", OWN)),
        ({BASE: URL, "OTEL_SDK_DISABLED": "true"}, None),
        ({BASE: URL, "OTEL_TRACES_EXPORTER": "none"}, None),
        ({BASE: URL, "OTEL_TRACES_EXPORTER": "otlp"}, (f"{URL}/v1/traces", BASE)),
        ({BASE: "collector:4318"}, ConfigError),
        ({BASE: URL, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, ConfigError),
        (
            {
                BASE: URL,
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            },
            (f"{URL}/v1/traces", BASE),
        ),
    ],
)
def test_the_endpoint_is_that_of_the_standard_variables(
    variables: dict[str, str], expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if expected is ConfigError:
        with pytest.raises(ConfigError) as caught:
            find_trace_endpoint()
        assert any(name in str(caught.value) for name in variables)
        assert any(repr(value) in str(caught.value) for value in variables.values())
    else:
        assert find_trace_endpoint() == expected


ROTEL = shutil.which("rotel-agent") or ""
"""A collector of others, from the package `rotel` of PyPI."""


@pytest.mark.long
@pytest.mark.skipif(not ROTEL, reason="no rotel-agent is installed")
@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_a_collector_of_others_passes_a_trace_on_unchanged(
    compression: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, grpc = find_port(), find_port()
    with webhook() as direct, sender(direct.url) as made:
        made.submit(MADE)
        until(lambda: direct.requests, "nothing is sent")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", compression)
    with webhook() as received, (tmp_path / "rotel.log").open("wb") as log:
        words = [
            *(ROTEL, "start", "--otlp-http-endpoint", f"127.0.0.1:{port}"),
            *("--otlp-grpc-endpoint", f"127.0.0.1:{grpc}"),
            *("--exporter", "otlp", "--otlp-exporter-protocol", "http"),
            *("--otlp-exporter-compression", "none"),
            *("--otlp-exporter-endpoint", "http://127.0.0.1:1"),  # of metrics, logs
            *("--otlp-exporter-traces-endpoint", received.url),
        ]
        collector = subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            with sender(f"http://127.0.0.1:{port}/v1/traces") as made:
                made.submit(MADE)
                until(lambda: received.requests or collector.poll(), "nothing is passed on")
                assert collector.poll() is None, (tmp_path / "rotel.log").read_text()
        finally:
            collector.terminate()
            collector.wait()
    assert len(decode_all(direct)) > 1
    assert decode_all(received) == decode_all(direct)


def decode_all(received: Webhook) -> list[ReceivedSpan]:
    return sorted((one for trace in list_traces(received) for one in trace), key=lambda one: one.id)
