"""What was measured: `docs/architectures.json`, one line a row."""

import fcntl
import json
import os
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from pydantic import Field

from schemas.base import Wire

DOCS = Path(__file__).parents[2] / "docs"
RESULTS, TABLE = DOCS / "architectures.json", DOCS / "architectures.md"


class Verdict(StrEnum):
    """What became of a job: `wrong` was stored without being the model's, and must never stand in a table."""

    PASS = "pass"
    REFUSED = "refused"
    CANNOT_RUN = "cannot run on CPU"
    WRONG = "wrong"


class LayerNumbers(Wire):
    """One layer against transformers in float32, over all tokens.

    Relative errors are a token's distance over the length of its state; `own` ones are transformers' in the
    dtype of the job, null where that is float32.
    """

    layer_id: int
    min_cosine: float
    median_rel_error: float
    max_rel_error: float
    own_median_rel_error: float | None = None
    own_max_rel_error: float | None = None


class Row(Wire):
    """What became of one recipe's job.

    `recipe` is the digest of what the model was made from. `route` and `model_class` are the manifest's: how
    the engine was made to return states. Numbers beside a refusal are those of a second job without a canary.
    """

    key: str
    architecture: str
    recipe: str
    verdict: Verdict
    dtype: str
    by: str | None = None
    reason: str | None = None
    route: str | None = None
    model_class: str | None = None
    rows: int = 0
    tokens: int = 0
    logit_rows: int = 0
    logit_argmax_agree: int = 0
    layers: tuple[LayerNumbers, ...] = ()
    versions: dict[str, str] = Field(default_factory=dict)


class Elsewhere(Wire):
    """A run that this machine cannot make, told by hand: which engine, where, and what came of it."""

    engine: str
    device: str
    runner: str
    outcome: str


class Matrix(Wire):
    """All rows, and all architectures that the engine lists as able to return states, by its own grouping."""

    listed_by: str = ""
    listed: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    elsewhere: tuple[Elsewhere, ...] = ()
    rows: tuple[Row, ...] = ()

    @classmethod
    def load(cls, path: Path = RESULTS) -> Self:
        """Read the file; a missing one is an empty matrix."""
        return cls.model_validate_json(path.read_bytes()) if path.is_file() else cls()

    def row(self, key: str) -> Row | None:
        """Return the row of that name, or none."""
        return next((row for row in self.rows if row.key == key), None)

    def with_row(self, row: Row) -> Self:
        """Return the matrix with `row` in its place, rows in the order of their names."""
        others = [other for other in self.rows if other.key != row.key]
        return self.model_copy(update={"rows": tuple(sorted([*others, row], key=lambda each: each.key))})

    def save(self, path: Path = RESULTS) -> None:
        """Write one line a row, so that a change of one row reads as one; a reader sees all of it or none."""
        whole: dict[str, Any] = self.model_dump(mode="json", exclude_defaults=True)
        rows = ",\n".join(f"  {json.dumps(row)}" for row in whole.pop("rows", []))
        head = json.dumps(whole, indent=1)[1:-2].lstrip("\n")
        text = "{\n" + (head + ",\n" if head.strip() else "") + f' "rows": [\n{rows}\n ]\n}}\n'
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_text(text)
        beside.replace(path)

    @classmethod
    def keep(cls, row: Row, path: Path = RESULTS) -> None:
        """Put one row into the file, beside others that do the same."""
        # The folder is locked, since the file becomes another one.
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            cls.load(path).with_row(row).save(path)
        finally:
            os.close(folder)
