"""Plants failures into files: before a unit's commit, into its plan, and into the finished dataset."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas.dataset.columns import PLAN_SCHEMA
from schemas.dataset.tables import read_plan_table
from schemas.receipts import UnitSealed
from service.capture import unit_run
from service.proof.checks import check_unit
from tests.support import file_plants as plants
from tests.support.file_plants import STATES, Change, Row
from tests.support.jobs import Shop
from tests.support.parquet import footer_xxh3, xxh3_of
from tests.support.stored_plans import plan_content, replace_plan

SEALED: dict[str, Callable[[Path], None]] = {
    "bit-of-a-state": plants.flip_state,
    "bit-of-the-ids": plants.flip_ids,
    "bit-of-a-page-header": plants.flip_page_header,
    "bit-of-the-footer": plants.flip_footer,
    "cut-short": plants.cut,
    "gone": Path.unlink,
    "rows-of-another-attempt": lambda path: _rewrite(path, plants.in_another_order),
    "states-of-another-row": lambda path: _rewrite(path, plants.exchange(*STATES)),
    "columns-exchanged": lambda path: _rewrite(path, _exchange_columns),
}

WRITER: dict[str, Change] = {
    "states-exchanged": plants.exchange(*STATES),
    "ids-of-another-row": plants.exchange("input_ids"),
    "mask-of-another-row": plants.exchange("loss_mask"),
    "names-exchanged": plants.exchange("sample_id", "source_id"),
    "row-missing": plants.without_one,
    "row-repeated": plants.with_one_twice,
    "stale-checksums": plants.exchange("checksums"),
}


def _rewrite(path: Path, change: Change) -> None:
    plants.rewrite(path, lambda rows: change(rows, _alike(rows, range(len(rows)))))


def _exchange_columns(rows: list[Row], free: Sequence[int]) -> list[Row]:
    row = rows[free[0]]
    row["layer_2"], row["layer_4"] = row["layer_4"], row["layer_2"]
    row["checksums"][:2] = row["checksums"][1::-1]
    return rows


def _alike(rows: list[Row], places: Sequence[int]) -> list[int]:
    """Return those places whose rows are as long as the first's, which is a long one."""
    long = max(rows[place]["num_tokens"] for place in places)
    return [place for place in places if rows[place]["num_tokens"] == long]


def between_seal_and_check(monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]) -> None:
    """Damage every sealed file just before its unit is checked."""

    def check(**given: Any) -> Any:
        for receipt in given["receipts"]:
            damage(given["attempt"] / receipt.file)
        return check_unit(**given)

    monkeypatch.setattr(unit_run, "check_unit", check)


def in_the_writer(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    """Let the writer have written something else, and have receipted what it wrote."""

    def check(**given: Any) -> Any:
        receipts = [_resealed(given["attempt"], one, change) for one in given["receipts"]]
        return check_unit(**(given | {"receipts": receipts}))

    monkeypatch.setattr(unit_run, "check_unit", check)


def _resealed(attempt: Path, receipt: UnitSealed, change: Change) -> UnitSealed:
    path = attempt / str(receipt.file)
    before = pq.read_table(path, columns=["sample_id"])["sample_id"].to_pylist()
    row_of = dict(zip(before, receipt.rows, strict=True))
    rows = plants.rewrite(path, lambda old: change(old, _alike(old, range(len(old)))))
    told: dict[str, Any] = {
        "bytes": path.stat().st_size,
        "xxh3": xxh3_of(path),
        "footer_xxh3": footer_xxh3(path.read_bytes()),
    }
    if len(rows) != len(receipt.rows):
        told["rows"] = tuple(row_of[row["sample_id"]] for row in rows)
        told["num_tokens"] = tuple(row["num_tokens"] for row in rows)
    return receipt.model_copy(update=told)


def bit_of_the_plan(monkeypatch: pytest.MonkeyPatch, shop: Shop, job_id: str) -> None:
    content = bytearray(plan_content(shop.store, job_id))
    content[len(content) // 2] ^= 4
    replace_plan(shop.store, job_id, bytes(content), hashed=False)


def after_the_plan_was_read(monkeypatch: pytest.MonkeyPatch, column: str) -> None:
    """Change one value of the plan between its first reader, the service, and the writer."""
    opened = unit_run.open_attempt

    async def opening(link: Any, settings: Any, order: Any, plan: bytes) -> None:
        await opened(link, settings, order, _changed(plan, column))

    monkeypatch.setattr(unit_run, "open_attempt", opening)


def before_the_plan_was_hashed(monkeypatch: pytest.MonkeyPatch, shop: Shop, job_id: str) -> None:
    """Change one value of the plan as a planner would that hashes what it did not mean to write."""
    replace_plan(shop.store, job_id, _changed(plan_content(shop.store, job_id), "loss_mask"))


def _changed(plan: bytes, column: str) -> bytes:
    values = read_plan_table(pa.BufferReader(plan)).to_pylist()
    values[5][column][0] ^= 1
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(values, schema=PLAN_SCHEMA), sink)
    return sink.getvalue().to_pybytes()


PLANNED: dict[str, Callable[[pytest.MonkeyPatch, Shop, str], None]] = {
    "bit-of-the-plan": bit_of_the_plan,
    "ids-changed-after-reading": lambda monkeypatch, *_: after_the_plan_was_read(monkeypatch, "input_ids"),
    "mask-changed-after-reading": lambda monkeypatch, *_: after_the_plan_was_read(monkeypatch, "loss_mask"),
    "mask-changed-before-hashing": before_the_plan_was_hashed,
}


def _only(folder: Path, pattern: str) -> Path:
    return sorted(folder.glob(pattern))[0]


SHARD, INDEX, MANIFEST, FREQ = "data/*/*.parquet", "index/*/*.parquet", "manifests/*.json", "token_freq/*"


def shard_of(folder: Path) -> Path:
    """Return the first shard of a dataset."""
    return _only(folder, SHARD)


def _edited(folder: Path, before: str, after: str) -> None:
    path = _only(folder, MANIFEST)
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))


DATASET: dict[str, Callable[[Path], None]] = {
    "bit-of-a-state": lambda folder: plants.flip_state(_only(folder, SHARD)),
    "bit-of-the-ids": lambda folder: plants.flip_ids(_only(folder, SHARD)),
    "bit-of-the-footer": lambda folder: plants.flip_footer(_only(folder, SHARD)),
    "shard-cut-short": lambda folder: plants.cut(_only(folder, SHARD)),
    "shard-gone": lambda folder: _only(folder, SHARD).unlink(),
    "shard-nobody-named": lambda folder: (folder / "data" / "more.parquet").write_bytes(b"PAR1"),
    "bit-of-the-index": lambda folder: plants.flip_middle(_only(folder, INDEX)),
    "bit-of-the-final-norm": lambda folder: plants.flip_bit(folder / "final_norm.safetensors", -3),
    "bit-of-the-counts": lambda folder: plants.flip_middle(_only(folder, FREQ)),
    "manifest-edited": lambda folder: _edited(folder, '"samples_rejected": 0', '"samples_rejected": 1'),
}

SIGNED: dict[str, Change] = {
    "states-exchanged": plants.exchange("layer_2", "layer_4", "layer_8"),
    "token-changed": plants.other_token,
    "flag-changed": plants.other_flag,
    "names-exchanged": plants.exchange("sample_id", "source_id"),
    "row-missing": plants.without_one,
    "row-repeated": plants.with_one_twice,
}


def signed(folder: Path, change: Change) -> None:
    """Change a shard's rows, and its index where that holds the same, and make every hash right again."""
    path = _only(folder, SHARD)
    columns = {"input_ids", "loss_mask", "sample_id", "source_id"}
    rows = plants.rewrite(path, lambda old: change(old, _alike(old, range(len(old)))))
    index = _only(folder, INDEX)
    table = pq.read_table(index)
    by_place = {row["row"]: row for row in table.to_pylist()}
    for place, row in enumerate(rows):
        if place in by_place:
            by_place[place] |= {column: row[column] for column in columns}
            by_place[place]["supervised_tokens"] = sum(row["loss_mask"])
    plants.write_rows(index, list(by_place.values()), table.schema)
    plants.sign_again(folder)
