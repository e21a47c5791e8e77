"""`quarry verify` counts the supervised tokens again, from the rows."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas.dataset.manifest import body_sha256
from schemas.dataset.token_counts import TOKEN_FREQ_SCHEMA
from schemas.names import manifest_path, token_freq_path
from service.proof.verify import Finding, verify_dataset
from tests.support.plans import JOB
from tests.support.reference_models import TinyModel
from tests.support.shards import capture, entry_of, supervised_ids, write_dataset

FREQ, MANIFEST = token_freq_path(JOB), manifest_path(JOB)


@dataclass(frozen=True, slots=True)
class Dataset:
    folder: Path
    tokens: list[int]

    def findings(self) -> tuple[Finding, ...]:
        return verify_dataset(self.folder).findings

    def edit_manifest(self, change: Callable[[dict], None]) -> None:
        """Change the manifest's document and sign it again."""
        path = self.folder / MANIFEST
        body = json.loads(path.read_text())
        change(body)
        path.write_text(json.dumps(body | {"sha256": body_sha256(body)}))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Dataset:
    root = tmp_path_factory.mktemp("dataset")
    model = TinyModel(root / "model", "llama", "bfloat16")
    units = {unit: capture(model, dtype="bfloat16", unit=unit) for unit in range(2)}
    write_dataset(root / "made", root, units)
    tokens = [token for unit in units.values() for row in unit.rows for token in supervised_ids(row)]
    return Dataset(root / "made", tokens)


@pytest.fixture
def dataset(made, tmp_path) -> Dataset:
    shutil.copytree(made.folder, tmp_path / "dataset")
    return Dataset(tmp_path / "dataset", made.tokens)


def recounted(dataset: Dataset, change: Callable[[dict[int, int]], None]) -> None:
    """Change the token counts, and sign everything again."""
    path = dataset.folder / token_freq_path(JOB)
    counts = dict(zip(*pq.read_table(path).to_pydict().values(), strict=True))
    change(counts)
    columns = [sorted(counts), [counts[token] for token in sorted(counts)]]
    pq.write_table(pa.table(columns, schema=TOKEN_FREQ_SCHEMA), path)

    def sign(body: dict) -> None:
        (entry,) = (one for one in body["extras"] if one["path"] == token_freq_path(JOB))
        entry |= entry_of(dataset.folder, token_freq_path(JOB)).model_dump()

    dataset.edit_manifest(sign)


def test_token_counts_that_are_not_the_rows_are_found_though_all_hashes_and_sums_agree(dataset):
    def exchange(counts: dict[int, int]) -> None:
        twice = next(token for token, count in counts.items() if count > 1)
        other = next(token for token in counts if token != twice)
        counts[twice], counts[other] = counts[twice] - 1, counts[other] + 1

    recounted(dataset, exchange)
    findings = dataset.findings()
    assert {finding.path for finding in findings} == {token_freq_path(JOB)}
    assert len(findings) == 2
    assert "is due" in findings[0].what


def test_vocabulary_statistics_that_are_not_the_rows_are_found(dataset):
    dataset.edit_manifest(lambda body: body["vocabulary"].update(token_ids=1))
    (finding,) = dataset.findings()
    assert finding.path == MANIFEST
    assert finding.what.startswith("vocabulary is")


def test_a_manifest_from_before_the_statistics_is_right(dataset):
    dataset.edit_manifest(lambda body: body.pop("vocabulary"))
    assert not dataset.findings()


def test_counts_are_not_held_against_rows_that_are_wrong_themselves(dataset):
    shard = next(dataset.folder.glob("data/*/*.parquet"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    recounted(dataset, lambda counts: counts.update(dict.fromkeys(counts, 1)))
    paths = {finding.path for finding in dataset.findings()}
    assert paths == {shard.relative_to(dataset.folder).as_posix()}
