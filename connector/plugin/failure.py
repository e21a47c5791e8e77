"""Keeps the error of which a process of the engine dies, for the job's problem.

vLLM writes it to its log alone. Whoever started it is told "see root cause above", or loses the connection.
"""

import logging
from contextlib import suppress
from pathlib import Path

LOGGERS = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")
"""vLLM's loggers of the core and of its workers."""
SURVIVED = frozenset({"_handle_request_preproc_error", "_invoke_utility_method"})
"""vLLM's functions that log an error which the engine survives: the caller is answered with it."""
MAX_CHARS = 2000


class FailureHandler(logging.Handler):
    """Writes the first fatal exception that is logged to a file; what follows is the news of it."""

    def __init__(self, path: Path) -> None:
        """Nothing is written unless there is an error: the file is not there before."""
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        """Write `Type: message`, cut to MAX_CHARS. The log has it anyway, so an error here is dropped."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None or record.funcName in SURVIVED:
            return
        with suppress(OSError), self._path.open("x", encoding="utf-8", errors="replace") as file:
            file.write(f"{type(error).__name__}: {error}"[:MAX_CHARS])


def keep_failure(path: Path) -> None:
    """Add the handler to vLLM's loggers of this process."""
    handler = FailureHandler(path)
    for name in LOGGERS:
        logging.getLogger(name).addHandler(handler)
