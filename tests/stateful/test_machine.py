"""Any sequence of what users and fate do leaves datasets that are right, and a service that goes on.

`STATEFUL_SECONDS` is how long each database is played with, `STATEFUL_SEED` the first seed, printed and
chosen by chance where the first is set, as `make fuzz` does. What failed is kept in `.cache/stateful/`.
"""

import logging
import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.stateful.engine import reference_states
from tests.stateful.machine import Machine
from tests.stateful.oracle import Checkpoints
from tests.support.pg import Postgres

SECONDS = int(os.environ.get("STATEFUL_SECONDS", "25"))
ANY_SEED = random.SystemRandom().randrange(10**6) if "STATEFUL_SECONDS" in os.environ else 6000
SEED = int(os.environ.get("STATEFUL_SEED", ANY_SEED))
STEPS = int(os.environ.get("STATEFUL_STEPS", "30"))
SEQUENCES = 5
"""Of one seed; then the time is looked at."""
PHASES = [Phase.generate, *([Phase.shrink] if os.environ.get("STATEFUL_SHRINK", "1") == "1" else [])]
KEPT = Path(__file__).parents[2] / ".cache" / "stateful"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@contextmanager
def sqlite(root: Path) -> Iterator[str]:
    yield f"sqlite:///{root / 'quarry.db'}"


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 1800)
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_whatever_users_and_fate_do_datasets_are_right(
    kind: str, checkpoints: Checkpoints, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.work.runner.RECORD_S", 0.02)
    monkeypatch.setattr("service.capture.canary.reference_states", reference_states)
    logging.disable(logging.WARNING)

    def lend(root: Path) -> AbstractContextManager[str]:
        if kind == "sqlite":
            return sqlite(root)
        server: Postgres = request.getfixturevalue("postgres")
        return server.database()

    end, number, begun = time.monotonic() + SECONDS, SEED, time.monotonic()
    own = {"lend": staticmethod(lend), "checkpoints": checkpoints, "reached": Counter()}
    played = type("Played", (Machine,), own)
    while number == SEED or time.monotonic() < end:
        try:
            run_state_machine_as_test(
                seed(number)(played),
                settings=settings(
                    max_examples=SEQUENCES,
                    stateful_step_count=STEPS,
                    deadline=None,
                    database=None,
                    suppress_health_check=list(HealthCheck),
                    report_multiple_bugs=False,
                    phases=PHASES,
                ),
            )
        except BaseException as error:
            KEPT.mkdir(parents=True, exist_ok=True)
            (KEPT / f"{kind}-{number}.txt").write_text("".join(traceback.format_exception(error)))
            print(
                f"{kind}, seed {number}, after {time.monotonic() - begun:.0f} s, {played.sequences} sequences"
            )
            raise
        number += 1
    print(f"{kind}, seeds {SEED}-{number - 1}: {played.sequences} sequences, {played.steps} steps")
    print(dict(played.reached))
    logging.disable(logging.NOTSET)
