"""The planner's promises: every row in one place, order kept, bounds kept, the same again."""

import ast
import hashlib
import inspect
import struct
import tracemalloc
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

import service.plan.content_hashes
import service.plan.units
from service.plan.content_hashes import SeenHashes
from service.plan.sources import RejectReason, RowReject
from service.plan.units import (
    Dialogue,
    RowOutcome,
    Tokenized,
    UnitBounds,
    UnitDraft,
    plan_units,
    sample_digest,
)


def tokens(*ids: int, mask: int = 1) -> Tokenized:
    return Tokenized(np.asarray(ids, dtype=np.int32), np.full(len(ids), mask, dtype=np.uint8))


REJECT = RowReject(RejectReason.EMPTY, "nothing")
RESULTS = st.one_of(
    st.just(REJECT), st.lists(st.integers(0, 3), min_size=1, max_size=12).map(lambda ids: tokens(*ids))
)
ROWS = st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), RESULTS), max_size=40).map(
    lambda rows: [RowOutcome(position, *row) for position, row in enumerate(rows)]
)
BOUNDS = st.builds(
    UnitBounds,
    bytes_per_token=st.integers(1, 8),
    unit_bytes=st.integers(1, 100),
    max_samples=st.integers(1, 6),
    answer_tokens=st.integers(0, 4),
)


def planned(rows: Iterable[RowOutcome], bounds: UnitBounds) -> Iterator[UnitDraft]:
    """Plan so few rows that no key is written."""
    return plan_units(rows, bounds, SeenHashes(Path("not used")).add)


def weight(unit: UnitDraft, bounds: UnitBounds) -> int:
    return sum((len(sample.ids) + bounds.answer_tokens) * bounds.bytes_per_token for sample in unit.samples)


@pytest.mark.slow
@given(ROWS, BOUNDS)
def test_every_row_ends_in_exactly_one_place_in_order_and_no_sample_twice(
    rows: list[RowOutcome], bounds: UnitBounds
) -> None:
    units = list(planned(rows, bounds))
    samples = [sample for unit in units for sample in unit.samples]
    rejects = [reject for unit in units for reject in unit.rejects]
    kept, rejected = ([row.position for row in rows] for rows in (samples, rejects))
    assert kept == sorted(kept) and rejected == sorted(rejected)
    assert sorted(kept + rejected) == [row.position for row in rows]
    ids = {sample.sample_id for sample in samples}
    assert len(ids) == len(samples)
    assert {r.sample_id for r in rejects if r.reason == RejectReason.DUPLICATE} <= ids


@given(ROWS, BOUNDS)
def test_units_keep_their_bounds_and_are_no_smaller_than_they_must(
    rows: list[RowOutcome], bounds: UnitBounds
) -> None:
    units = list(planned(rows, bounds))
    for unit in units:
        assert len(unit.samples) <= bounds.max_samples
        assert weight(unit, bounds) <= bounds.unit_bytes or len(unit.samples) == 1
    for unit, after in pairwise(units):
        assert unit.samples
        if after.samples:
            first = UnitDraft(after.samples[:1], ())
            full = weight(unit, bounds) + weight(first, bounds) > bounds.unit_bytes
            assert full or len(unit.samples) == bounds.max_samples


def test_the_turns_of_a_conversation_are_in_one_unit_and_no_more_of_them_than_fill_one() -> None:
    """Four conversations of turns of 10, 20, 30 and 40 tokens: of each the first three are 60 bytes."""
    rows = [
        RowOutcome(
            place, f"{talk}#{turn}", replace(tokens(talk, turn), dialogue=Dialogue("", turn, 10 * turn, ()))
        )
        for place, (talk, turn) in enumerate(product(range(4), (1, 2, 3, 4)))
    ]
    units = list(planned(rows, UnitBounds(bytes_per_token=1, unit_bytes=70 // 8, max_samples=100)))
    held = [[sample.source_id for sample in unit.samples] for unit in units]
    assert held == [[f"{talk}#{turn}" for turn in (1, 2, 3)] for talk in range(4)]
    rejects = [reject for unit in units for reject in unit.rejects]
    assert [reject.source_id for reject in rejects] == [f"{talk}#4" for talk in range(4)]
    assert {reject.reason for reject in rejects} == {RejectReason.TOO_LONG}
    assert "storage.shard_bytes" in rejects[0].detail


def test_equal_tokens_are_duplicates_whatever_their_ids_where_that_is_asked_for() -> None:
    rows = [
        RowOutcome(0, "a", tokens(1, 2)),
        RowOutcome(1, "b", tokens(1, 2)),
        RowOutcome(2, "a", tokens(1, 2)),
        RowOutcome(3, "c", tokens(1, 2, mask=0)),
    ]
    kept = {}
    for duplicates in ("same_id_and_tokens", "same_tokens"):
        bounds = UnitBounds(bytes_per_token=1, unit_bytes=100, max_samples=10, duplicates=duplicates)
        (unit,) = planned(rows, bounds)
        kept[duplicates] = [sample.position for sample in unit.samples]
        assert {reject.reason for reject in unit.rejects} == {RejectReason.DUPLICATE}
    assert kept == {"same_id_and_tokens": [0, 1, 3], "same_tokens": [0, 3]}


def test_the_planner_streams() -> None:
    taken = 0

    def rows() -> Iterator[RowOutcome]:
        nonlocal taken
        for taken in range(1000):
            yield RowOutcome(taken, str(taken), tokens(1, 2))

    units = planned(rows(), UnitBounds(bytes_per_token=1, unit_bytes=8, max_samples=100))
    assert len(next(units).samples) == 4 and taken == 4


def test_rejects_go_with_the_unit_that_is_being_filled_and_the_rest_comes_last() -> None:
    bad = [RowOutcome(i, str(i), REJECT) for i in (0, 2, 4)]
    good = [RowOutcome(i, str(i), tokens(i)) for i in (1, 3)]
    rows = sorted(bad + good, key=lambda row: row.position)
    units = list(planned(rows, UnitBounds(bytes_per_token=1, unit_bytes=1, max_samples=10)))
    assert [[r.position for r in unit.rejects] for unit in units] == [[0, 2], [4]]
    only_rejects = list(planned(bad, UnitBounds(bytes_per_token=1, unit_bytes=1, max_samples=10)))
    assert [(len(unit.samples), len(unit.rejects)) for unit in only_rejects] == [(0, 3)]
    assert list(planned([], UnitBounds(bytes_per_token=1, unit_bytes=1, max_samples=1))) == []


def test_rejects_do_not_wait_for_a_unit_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.plan.units, "DRAFT_REJECTS", 2)
    rows = [RowOutcome(i, str(i), tokens(1) if i in (0, 6) else REJECT) for i in range(7)]
    drafts = list(planned(rows, UnitBounds(bytes_per_token=1, unit_bytes=100, max_samples=10)))
    ends = [([s.position for s in d.samples], [r.position for r in d.rejects]) for d in drafts]
    assert ends == [([], [1, 2]), ([], [3, 4]), ([0, 6], [5])]


def test_the_sample_id_is_blake2b_over_length_prefixed_source_ids_and_mask() -> None:
    parts = ("\u00e9".encode(), struct.pack("<3i", 1, 2, 70_000), bytes([0, 1, 1]))
    expected = hashlib.blake2b(
        b"".join(struct.pack("<Q", len(part)) + part for part in parts), digest_size=16
    )
    sample = Tokenized(np.asarray([1, 2, 70_000], dtype=np.int32), np.asarray([0, 1, 1], dtype=np.uint8))
    assert sample_digest("\u00e9", sample) == expected.digest()


@pytest.mark.parametrize(
    ("source_id", "other"),
    [
        ("b", tokens(1, 2)),
        ("a", tokens(1, 3)),
        ("a", tokens(1, 2, mask=0)),
        ("a", tokens(1)),
        ("", tokens(1, 2)),
    ],
)
def test_the_sample_id_changes_with_each_of_its_parts(source_id: str, other: Tokenized) -> None:
    assert sample_digest("a", tokens(1, 2)) != sample_digest(source_id, other)


def test_a_plan_of_many_samples_holds_few_of_their_keys_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.plan.content_hashes, "NEWEST_HASHES", 500)
    rows = (RowOutcome(number, str(number % 19_999), tokens(7)) for number in range(20_000))
    bounds = UnitBounds(bytes_per_token=1, unit_bytes=8, max_samples=8)
    duplicates = 0
    tracemalloc.start()
    try:
        for unit in plan_units(rows, bounds, SeenHashes(tmp_path).add):
            duplicates += len(unit.rejects)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert duplicates == 1
    assert most_bytes < 20_000 * 20


def test_the_planner_is_pure() -> None:
    tree = ast.parse(inspect.getsource(service.plan.units))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert imported == {
        *("hashlib", "collections.abc", "dataclasses", "numpy", "numpy.typing"),
        *("schemas.job", "schemas.request", "service.plan.sources.rows"),
    }
