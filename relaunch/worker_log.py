"""The log of a worker: one line a message, written by a thread.

A reader that is slow, or does not read at all (a pipe, a terminal stopped with Ctrl-S, the log
driver of a container), must not hold up the worker: docs/decisions/0084-a-log-that-is-not-read.md.
"""

from __future__ import annotations

import logging
import queue
import threading
from contextlib import suppress
from typing import TextIO

from temporalio.runtime import LogForwardingConfig, LoggingConfig, TelemetryFilter

from relaunch.text import count_noun, escape_controls, printable

MAX_LOG_LINE = 4000
"""Characters of a message in the log."""
MAX_WAITING_LINES = 10_000
"""Messages that wait to be written. Further ones are lost and counted."""
CLOSE_TIMEOUT_S = 1.0
"""How long the end of a worker waits until the last messages are written."""
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
SDK_LOGGER = "relaunch.sdk"


class LogFormatter(logging.Formatter):
    """Writes a message as one line, whatever a node or a person wrote into it.

    Only what a traceback adds has further lines.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message, MAX_LOG_LINE)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        return escape_controls(super().format(record))


class LogWriter(logging.Handler):
    """Writes a log in a thread, so that no caller waits for the reader of the log.

    Args:
        stream: Where to.
        limit: How many messages may wait; further ones are lost and counted.
    """

    def __init__(self, stream: TextIO, limit: int = MAX_WAITING_LINES) -> None:
        super().__init__()
        self.setFormatter(LogFormatter(FORMAT))
        self._stream = stream
        self._waiting: queue.Queue[str | None] = queue.Queue(limit)
        self._lost = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self._lost += 1

    def finish(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Wait a moment until everything is written."""
        with suppress(queue.Full):
            self._waiting.put(None, timeout=timeout)
            self._thread.join(timeout)

    def _write(self) -> None:
        while (line := self._waiting.get()) is not None:
            self._put(line)
            if self._waiting.empty():
                self._report_lost()
        self._report_lost()

    def _report_lost(self) -> None:
        self.acquire()  # `emit` is called with this lock, too
        lost, self._lost = self._lost, 0
        self.release()
        if lost:
            messages = count_noun(lost, "message")
            self._put(f"{messages} lost here: this log was not read for a while")

    def _put(self, line: str) -> None:
        with suppress(OSError, ValueError):  # its reader has ended
            self._stream.write(line + "\n")
            self._stream.flush()


def start_log(stream: TextIO, level: str) -> LogWriter:
    """Have all messages of this process, and Python's warnings, written to a stream."""
    writer = LogWriter(stream)
    logging.basicConfig(level=level, handlers=[writer])
    logging.captureWarnings(True)
    return writer


def forward_sdk_log() -> LoggingConfig:
    """Return the setting by which the SDK's warnings become messages of this log.

    Otherwise its threads write them to standard output, and wait for its reader.
    """
    return LoggingConfig(
        TelemetryFilter(core_level="WARN", other_level="ERROR"),
        forwarding=LogForwardingConfig(
            logging.getLogger(SDK_LOGGER),
            append_target_to_name=False,
        ),
    )
