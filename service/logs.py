"""The log lines of services and workers: text for people, or JSON that names the task in progress."""

import io
import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TextIO

from service.visible import visible

_WORKED_ON: ContextVar[Mapping[str, object]] = ContextVar("worked_on", default=MappingProxyType({}))
"""Fields of the job's task in progress, added to the log lines of this thread or asyncio task."""


@contextmanager
def working_on(**fields: object) -> Iterator[None]:
    """Add these fields to the lines logged in this block, also within `asyncio.to_thread`."""
    token = _WORKED_ON.set(fields)
    try:
        yield
    finally:
        _WORKED_ON.reset(token)


class VisibleFormatter(logging.Formatter):
    """Text for people; all lines of a record but its first are indented, so that no text in it forges one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines."""
        return visible(super().format(record)).replace("\n", "\n    ")


class JsonFormatter(logging.Formatter):
    """One object per line, in ASCII: nothing in a message can end the line or reorder text."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            **_WORKED_ON.get(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            fields["stack"] = record.stack_info
        return json.dumps(fields)


class _JsonStderr(io.TextIOBase):
    """Makes a JSON object of each line written to stderr directly: by Python, a library or a command."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._rest = stream, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).replace("\r", "\n").split("\n")
        for line in filter(None, lines):
            said = {"name": "stderr", "levelno": logging.ERROR, "levelname": "ERROR", "msg": line}
            self._stream.write(JsonFormatter().format(logging.makeLogRecord(said)) + "\n")
        return len(text)

    def flush(self) -> None:
        self.write("\n")

    def fileno(self) -> int:
        return self._stream.fileno()


def _log_uncaught(kind: type[BaseException], error: BaseException | None, *_: object) -> None:
    if kind is not SystemExit:  # a normal way for a thread to end
        logging.getLogger(__name__).critical("%s ends this thread", kind.__name__, exc_info=error)


def log_to_stderr(log_format: str | None = None, level: int = logging.INFO) -> None:
    """Make this process log to stderr; in JSON format, everything else written there becomes JSON too.

    Before the settings are read, QUARRY_LOG_FORMAT sets the format.
    """
    for library in ("alembic", "httpx2"):  # httpx2 logs full URLs
        logging.getLogger(library).setLevel(logging.WARNING)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(VisibleFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    if (log_format or os.environ.get("QUARRY_LOG_FORMAT")) == "json":
        handler.setFormatter(JsonFormatter())
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = lambda args: _log_uncaught(*args[:2])
        sys.stderr = _JsonStderr(sys.stderr)
    logging.basicConfig(level=level, handlers=[handler])
