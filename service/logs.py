"""The log lines of services and workers: text for people, or JSON that names the task that was worked on."""

import json
import logging
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Literal

from service.visible import visible

LogFormat = Literal["text", "json"]

_WORKED_ON: ContextVar[Mapping[str, object]] = ContextVar("worked_on", default=MappingProxyType({}))
"""What lines of this thread or asyncio task say of the task of a job that it works on."""


@contextmanager
def working_on(**fields: object) -> Iterator[None]:
    """Let the lines that are logged in this block have these fields, also in `asyncio.to_thread`."""
    token = _WORKED_ON.set(fields)
    try:
        yield
    finally:
        _WORKED_ON.reset(token)


class _VisibleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


class JsonFormatter(logging.Formatter):
    """One object a line, in ASCII: whatever a message holds ends no line and reorders nothing."""

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
        return json.dumps(fields)


def log_to_stderr(log_format: LogFormat = "text", level: int = logging.INFO) -> None:
    """Let this process's loggers write lines to stderr."""
    for library in ("alembic", "httpx2"):  # of which the second logs URLs whole
        logging.getLogger(library).setLevel(logging.WARNING)
    handler = logging.StreamHandler(sys.stderr)
    text = _VisibleFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if log_format == "json" else text)
    logging.basicConfig(level=level, handlers=[handler])
