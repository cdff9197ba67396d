"""Sends one OpenTelemetry trace for each incident that closed, in a thread beside the worker.

Nothing waits for it: incidents are put into a bounded queue, and what cannot be sent is tried again
for an hour, then dropped. docs/decisions/0061-traces.md.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from relaunch.job.trace import (
    ClosedIncident,
    Span,
    build_spans,
    make_span_id,
    make_trace_id,
)
from relaunch.text import count_noun

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

log = logging.getLogger("relaunch.traces")

RETRY_DELAY_S = 30.0
"""Seconds until a trace that could not be sent is tried again. The exporter itself has tried for
OTEL_EXPORTER_OTLP_TIMEOUT by then, 10 s by default."""
MAX_AGE_S = 3600.0
"""Seconds after which a trace that cannot be sent is dropped."""
MAX_WAITING = 1000
"""Most traces that wait to be sent, some 10 MB; beyond that the oldest is dropped."""
CLOSE_TIMEOUT_S = 2.0
"""Seconds that a worker which ends waits for the traces that it has not sent."""
REFUSED = (400, 413, 422)
"""HTTP statuses of an endpoint that does not take this trace and may take others."""
SERVICE_NAME = "relaunch"
EXPORTER_LOGGER = "opentelemetry.exporter"


@dataclass(frozen=True, slots=True)
class WaitingTrace:
    closed: ClosedIncident
    since: float
    """By the monotonic clock, in seconds."""


class TraceSender:
    """Sends traces to an endpoint; headers, certificates, compression, the time-out and the name of
    the service are OpenTelemetry's own variables.

    What it imports takes a third of a second of a core, so that is left to its thread.
    """

    def __init__(self, endpoint: str, web_ui: str = "", retry_delay: float = RETRY_DELAY_S) -> None:
        """Create the sender; `start` starts it.

        Args:
            endpoint: Address to which spans are posted.
            web_ui: Address of the web UI, to which traces link; empty: not known.
            retry_delay: Seconds until what could not be sent is tried again.
        """
        self._endpoint = endpoint
        self._web_ui = web_ui.rstrip("/")
        self._retry_delay = retry_delay
        self._waiting: deque[WaitingTrace] = deque()
        self._changed = threading.Condition()
        self._sending = False
        self._is_closing = False
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, closed: ClosedIncident) -> None:
        """Have an incident's trace sent. It does not wait, and raises no error."""
        with self._changed:
            self._put(WaitingTrace(closed, time.monotonic()))
            self._changed.notify()

    def _put(self, trace: WaitingTrace) -> None:
        self._waiting.append(trace)
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()

    def close(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """End after one more try to send what waits, or after `timeout` seconds."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout)
        with self._changed:
            if unsent := len(self._waiting) + self._sending:
                count = count_noun(unsent, "incident")
                log.warning("the traces of %s are not sent", count)

    # --- in the thread

    def _run(self) -> None:
        try:
            self._send_all(_Exporter(self._endpoint, self._web_ui))
        except Exception:  # also a certificate that cannot be read; recoveries go on
            log.exception("incidents are not traced")
            with self._changed:
                self._waiting, self._sending = deque(maxlen=0), False

    def _send_all(self, exporter: _Exporter) -> None:
        while (trace := self._take()) is not None:
            failure = exporter.send(trace.closed)
            self._note(failure)
            if not failure or exporter.is_refused:
                self._sending = False
                continue
            with self._changed:
                if time.monotonic() - trace.since < MAX_AGE_S:
                    # To the end: one that always fails must not hold up the others.
                    self._put(trace)
                self._sending = False
                if self._is_closing:
                    return
                self._changed.wait_for(lambda: self._is_closing, self._retry_delay)

    def _take(self) -> WaitingTrace | None:
        """Wait for the next one to send; None: there is none, and none will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            if not self._waiting:
                return None
            self._sending = True
            return self._waiting.popleft()

    def _note(self, failure: str) -> None:
        """Log the first of failures in a row, and their end."""
        if failure and not self._is_failing:
            log.warning(
                "traces of incidents cannot be sent to %s: %s; each is tried again for an hour,"
                " unless the endpoint refuses that trace",
                re.sub(r"//[^/@]*@", "//", self._endpoint),  # it may have a password
                failure,
            )
        elif self._is_failing and not failure:
            log.info("traces of incidents are sent again")
        self._is_failing = bool(failure)


class _Exporter:
    """OpenTelemetry's exporter of spans over HTTP, with a reason instead of a log of its tries."""

    def __init__(self, endpoint: str, web_ui: str) -> None:
        import requests
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME as NAME
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import SpanExportResult
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._web_ui = web_ui
        self._reason = ""
        """Why the last request failed; empty: it was answered with success."""
        self.is_refused = False
        """Whether the last request failed because of the trace in it: the next try would, too."""

        class ObservedSession(requests.Session):
            def request(session, *args: Any, **options: Any) -> requests.Response:
                try:
                    answer = super().request(*args, **options)
                except OSError as error:  # others are of a last try, with no time left for it
                    self._reason = _explain(error)
                    raise
                # The exporter takes a redirect for success, and does not follow it.
                is_taken = answer.status_code < 300
                self._reason = "" if is_taken else f"HTTP {answer.status_code} {answer.reason}"
                self.is_refused = answer.status_code in REFUSED
                return answer

        logging.getLogger(EXPORTER_LOGGER).setLevel(logging.CRITICAL)
        self._exporter = OTLPSpanExporter(endpoint, session=ObservedSession())
        self._success = SpanExportResult.SUCCESS
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES count before ours.
        resource = Resource.create()
        if str(resource.attributes.get(NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({NAME: SERVICE_NAME}))
        self._resource = resource
        self._scope = InstrumentationScope("relaunch")

    def send(self, closed: ClosedIncident) -> str:
        """Send a trace; return why it could not be sent, or nothing."""
        self._reason, self.is_refused = "", False
        result = self._exporter.export(self._convert(closed))
        return self._reason or ("" if result is self._success else "no reason is known")

    def _convert(self, closed: ClosedIncident) -> list[ReadableSpan]:
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

        def make_context(index: int) -> SpanContext:
            ids = make_trace_id(closed), make_span_id(closed, index)
            return SpanContext(*ids, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

        def convert(index: int, span: Span) -> ReadableSpan:
            link = {"url.full": self._find_link(closed)} if self._web_ui and not index else {}
            return ReadableSpan(
                span.name,
                context=make_context(index),
                parent=make_context(0) if index else None,
                resource=self._resource,
                attributes={**span.attributes, **link},
                events=[
                    Event(one.name, one.attributes, int(one.at.timestamp() * 1e9))
                    for one in span.events
                ],
                status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
                start_time=int(span.begin.timestamp() * 1e9),
                end_time=int(span.end.timestamp() * 1e9),
                instrumentation_scope=self._scope,
            )

        return [convert(index, span) for index, span in enumerate(build_spans(closed))]

    def _find_link(self, closed: ClosedIncident) -> str:
        page = f"{self._web_ui}/namespaces/{closed.namespace}/workflows"
        return f"{page}/{quote(closed.workflow, safe='')}/{closed.run}"


def _explain(error: BaseException) -> str:
    """Return the cause that is innermost in an error of the HTTP library, which nests four."""
    import requests

    if isinstance(error, requests.Timeout):
        return "no answer within OTEL_EXPORTER_OTLP_TIMEOUT"
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return str(error.strerror if isinstance(error, OSError) and error.strerror else error)
