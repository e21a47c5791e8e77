"""The error of which a process of the engine dies is kept: the first one that vLLM logs."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from connector.plugin.failure import LOGGERS, MAX_CHARS, FailureHandler, keep_failure


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Path]:
    keep_failure(tmp_path / "failure")
    yield tmp_path / "failure"
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [one for one in logger.handlers if not isinstance(one, FailureHandler)]


def dies(logger: str, error: Exception, stacklevel: int = 1) -> None:
    try:
        raise error
    except type(error):
        logging.getLogger(logger).exception("it died", stacklevel=stacklevel)


def test_the_first_error_is_kept_and_not_the_news_of_it(kept: Path):
    core, workers = LOGGERS
    logging.getLogger(core).error("no exception")
    assert not kept.exists()
    dies(workers, MemoryError("no room for 2.00 GiB"))
    dies(core, RuntimeError("Worker failed with error, see the stack trace above for the root cause"))
    assert kept.read_text() == "MemoryError: no room for 2.00 GiB"


def test_an_error_that_the_engine_survived_is_not_that_of_its_death(kept: Path):
    core, _ = LOGGERS

    def _handle_request_preproc_error() -> None:
        dies(core, ValueError("a request that cannot be"), stacklevel=2)

    _handle_request_preproc_error()
    dies(core, MemoryError("no room for 2.00 GiB"))
    assert kept.read_text() == "MemoryError: no room for 2.00 GiB"


def test_a_long_error_is_cut_and_any_text_is_kept(tmp_path: Path):
    kept, error = tmp_path / "failure", ValueError("\ud800" + "x" * MAX_CHARS)
    FailureHandler(kept).handle(logging.LogRecord("", 40, "", 1, "", (), (ValueError, error, None)))
    assert kept.read_text().startswith("ValueError: ?xxx")
    assert len(kept.read_text()) == MAX_CHARS


def test_where_nothing_can_be_written_the_log_is_as_before(kept: Path, caplog: pytest.LogCaptureFixture):
    keep_failure(kept / "no folder")
    dies(LOGGERS[0], ValueError("here"))
    assert [record.message for record in caplog.records] == ["it died"]
