"""Which cases of the crash suite run: a short form (`make test`), a seeded sample (`make crash`), or all.

A test that has no short form is marked `long`; one that has is run by all three, and asks `chosen` for its
cases. Workers of one run sample alike, because they find the seed in the environment.
"""

import os
import random
import secrets
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

MODE = os.environ.get("CRASH", "short")
"""`short`, `sample` or `all`."""
SEED = os.environ.get("SEED") or ("7" if MODE == "short" else str(secrets.randbelow(10_000)))
os.environ["SEED"] = SEED


def chosen(name: str, cases: Sequence[T], *, sample: int, short: int = 1) -> list[T]:
    """Return the cases that this run takes, in their order: all, `sample` of them, or `short` of them.

    `name` says which draw it is, so that two tests with one seed do not draw the same numbers.
    """
    wanted = {"all": len(cases), "sample": sample, "short": short}[MODE]
    drawn = random.Random(f"{SEED}:{name}").sample(range(len(cases)), min(wanted, len(cases)))
    return [cases[number] for number in sorted(drawn)]


def pytest_report_header() -> str:
    return f"crash suite: CRASH={MODE} SEED={SEED}"
