"""The index, the manifest and the token counts, held against the shards."""

from collections.abc import Callable

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors import safe_open
from safetensors.torch import load, save

from schemas.dataset.columns import INDEX_SCHEMA
from schemas.dataset.seal import sha256_of
from schemas.dataset.token_counts import TOKEN_FREQ_SCHEMA
from schemas.names import FINAL_NORM_PATH, shard_path
from service.errors import EngineRefused
from service.proof.verify import Reading, verify_dataset
from tests.support.plans import JOB
from tests.support.reference_models import TinyModel
from tests.support.shards import (
    LENGTHS,
    capture,
    entry_of,
    write_dataset,
    write_manifest,
)
from tests.unit.proof.made_dataset import (
    COUNTS,
    INDEX,
    MANIFEST,
    SHARD,
    Dataset,
    flip_in_layer_2,
    said,
)

FIRST = shard_path(JOB, 0)


def rewrite_index(dataset: Dataset, change: Callable[[list[dict]], None]) -> None:
    path = dataset.folder / INDEX
    rows = pq.read_table(path).to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=INDEX_SCHEMA), path)
    write_manifest(
        dataset.folder, dataset.units[1].provenance, {n: unit.rows for n, unit in dataset.units.items()}
    )


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda rows: rows.pop(2), f"lacks row 2 of {SHARD} (1 such rows)"),
        (lambda rows: rows[2].update(row=1), "5 rows name 4 rows of shards"),
        (lambda rows: rows[2].update(row=9), f"names a missing row 9 of {SHARD}"),
        (
            lambda rows: rows[2].update(shard="data/x.parquet"),
            "names row 2 of data/x.parquet, no shard of unit 1",
        ),
        (lambda rows: rows[2].update(num_tokens=3), "num_tokens is 3, expected 16"),
        (lambda rows: rows[2].update(loss_mask=[0]), "has other values: loss_mask"),
        (lambda rows: rows[2].update(supervised_tokens=1), "supervised_tokens is 1, expected 8"),
    ],
)
def test_an_index_that_departs_from_its_shard_is_named(dataset, change, what):
    rewrite_index(dataset, change)
    findings = said(dataset.verify())
    assert f"{INDEX}: " in findings and what in findings


def test_a_witness_that_the_states_do_not_bear_out_is_named_in_any_row(dataset):
    for row in range(len(LENGTHS)):
        rewrite_index(dataset, lambda rows, row=row: rows[row]["top_logprobs"].__setitem__(1, -30.0))
        assert f"{SHARD}: row {row} (" in said(dataset.verify())


@pytest.mark.parametrize(
    "change", [{"top_tokens": None}, {"top_logprobs": None}, {"top_tokens": []}, {"top_logprobs": [-1.0]}]
)
def test_a_witness_that_is_absent_is_named(dataset, change):
    rewrite_index(dataset, lambda rows: rows[2].update(change))
    findings = said(dataset.verify())
    assert f"{SHARD}: row 2 (" in findings
    assert "the index does not hold the engine's log-probabilities of it" in findings


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda body: body["totals"].update(tokens=1), "totals.tokens is 1, expected 148"),
        (lambda body: body["totals"].update(supervised_tokens=1), "totals.supervised_tokens is 1, "),
        (lambda body: body["totals"].update(samples_planned=11), "totals.samples_planned is 11, expected 10"),
        (lambda body: body["totals"].update(bytes=1), "totals.bytes is 1"),
        (lambda body: body["checks"].update(rows_checked=1), "checks.rows_checked is 1, expected 10"),
        (lambda body: body["provenance"]["identity"].update(revision="f" * 40), "identity_sha256 is"),
        (lambda body: body["provenance"]["final_norm"].update(kind="layernorm"), "its final_norm is not"),
        (lambda body: body["indexes"].pop(), "list of indexes lacks"),
        (lambda body: body["extras"].pop(0), "list of extras lacks"),
        (lambda body: body["shards"].append(body["shards"][0]), "2 times"),
        (lambda body: body["shards"][0].update(rows=4), "5 rows of 74 tokens, the manifest says 4 of 74"),
        (lambda body: body["shards"][0].update(path="../secret.parquet"), "a path that leaves the dataset"),
        (lambda body: body["extras"][0].update(path="/etc/passwd"), "a path that leaves the dataset"),
        (lambda body: body["provenance"].update(job_id="../../x"), "is not a manifest of this version: "),
        (lambda body: body.update(schema_version=1), "format version 1, expected 2: capture the dataset"),
        (lambda body: body["provenance"]["identity"].update(schema_version=3), "format version 3, expected"),
        (lambda body: body["vocabulary"].update(token_ids=1), f"{MANIFEST}: vocabulary is"),
        (lambda body: body["shards"][0].update(unit=-1), "shards.0.unit: Input should be greater than"),
        (lambda body: body["shards"][0].update(unit=10**400), "shards.0.unit: Input should be less than"),
        (lambda body: body["shards"][0].update(xxh3="x"), "shards.0.xxh3: String should match"),
        (lambda body: body["shards"][0]["layers"].pop(), f"layers of {FIRST!r} are [1, 2], expected [1, 2"),
        (lambda body: body["checks"].update(logit_rows=11), "checks: 0 of 11 logit rows agree, of 10 rows"),
        (lambda body: body["checks"].update(logit_argmax_agree=1), "checks: 1 of 0 logit rows agree"),
        (lambda body: body["checks"].update(logit_max_error=-1), "checks.logit_max_error: Input should be"),
        (lambda body: body["checks"].update(canary="x"), "checks.canary: Input should be 'passed', 'cached'"),
        (lambda body: body["checks"].update(canary_report=None), "checks: the canary is 'passed', and its"),
        (
            lambda body: body["checks"]["canary_report"]["layers"].pop(),
            "checks.canary_report.layers is [1, 2], expected [1, 2",
        ),
        (
            lambda body: body["checks"]["canary_report"]["layers"][0].update(layer_id=10**400),
            "checks.canary_report.layers.0.layer_id: Input should be less than",
        ),
        (
            lambda body: body["checks"]["canary_report"]["layers"][0].update(best_match_layer=2),
            "checks.canary_report.layers.0: layer 1 is nearest to layer 2",
        ),
    ],
)
def test_a_manifest_that_contradicts_itself_or_the_files_is_named(dataset, change, what):
    dataset.edit_manifest(change)
    assert what in said(dataset.verify(model_folder=None))


@pytest.mark.parametrize("reason", ["not-finite", "duplicate"])
def test_a_sample_that_is_written_and_rejected_is_named_unless_it_came_twice(dataset, reason):
    sample_id = dataset.units[1].rows[2].sample_id
    reject = {"position": 10, "source_id": None, "sample_id": sample_id, "reason": reason, "detail": "x"}

    def change(body: dict) -> None:
        body["rejects"].append(reject)
        body["totals"].update(samples_planned=11, samples_rejected=1)

    dataset.edit_manifest(change)
    told = f"{MANIFEST}: sample {sample_id} is written and rejected: {reason}"
    assert said(dataset.verify(model_folder=None)) == (told if reason == "not-finite" else "")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda weight_H: weight_H * 2, "it is not the model's"),
        (lambda weight_H: weight_H[1:], "cannot be read: final_norm.safetensors holds"),
    ],
)
def test_a_final_norm_that_is_not_the_models_is_named(dataset, change, what):
    replace_norm(dataset, lambda tensors: tensors | {"weight": change(tensors["weight"])})
    assert said(dataset.verify()).startswith(f"{FINAL_NORM_PATH}: {what}")


def replace_norm(dataset: Dataset, change: Callable[[dict], dict]) -> None:
    """Change the tensors of the final norm, and sign it again."""
    path = dataset.folder / FINAL_NORM_PATH
    with safe_open(path, "pt") as opened:
        metadata = opened.metadata()
    path.write_bytes(save(change(load(path.read_bytes())), metadata))
    sign_norm(dataset)


def sign_norm(dataset: Dataset) -> None:
    sha256, num_bytes = sha256_of(dataset.folder / FINAL_NORM_PATH)
    entry = {"path": FINAL_NORM_PATH, "sha256": sha256, "bytes": num_bytes}
    dataset.edit_manifest(lambda body: body["extras"].__setitem__(0, entry))


@pytest.mark.parametrize(
    "stated", [None, "{}", '{"kind":"layernorm","eps":1e-6}', '{"kind":"rmsnorm","eps":1}']
)
def test_a_final_norms_metadata_is_what_the_manifest_says(dataset, stated):
    path = dataset.folder / FINAL_NORM_PATH
    path.write_bytes(save(load(path.read_bytes()), None if stated is None else {"final_norm": stated}))
    sign_norm(dataset)
    told = f"{FINAL_NORM_PATH}: its metadata says {stated}, expected "
    assert said(dataset.verify(model_folder=None)).startswith(told)


@pytest.mark.parametrize(
    "change", [lambda norm: norm | {"bias": norm["bias"] + 1}, lambda norm: {"weight": norm["weight"]}]
)
def test_a_final_norms_bias_is_the_models(tmp_path, change):
    units = {0: capture(TinyModel(tmp_path / "model", "gpt_neox", "float32"), dtype="float32")}
    write_dataset(tmp_path / "dataset", units)
    dataset = Dataset(tmp_path / "dataset", units)
    replace_norm(dataset, change)
    assert said(dataset.verify()) == f"{FINAL_NORM_PATH}: it is not the model's"


def test_a_manifest_changed_by_hand_does_not_fit_its_own_hash(dataset):
    path = dataset.folder / MANIFEST
    path.write_text(path.read_text().replace('"device": "cpu"', '"device": "gpu"'))
    assert f"{MANIFEST}: sha256 is" in said(dataset.verify())


def test_a_manifest_under_another_jobs_name_is_named(dataset):
    (dataset.folder / MANIFEST).rename(dataset.folder / "manifests" / "j-0000000000000000.json")
    assert "manifests/j-0000000000000000.json: file name is" in said(dataset.verify())


def test_the_folder_of_another_model_is_refused(dataset, tmp_path):
    TinyModel(tmp_path / "other", "gemma2", "bfloat16")
    with pytest.raises(EngineRefused, match="ends in gemma_rmsnorm"):
        dataset.verify(model_folder=tmp_path / "other")


def recount(dataset: Dataset, change: Callable[[dict[int, int]], None]) -> None:
    """Change the token counts, and sign everything again."""
    path = dataset.folder / COUNTS
    counts = dict(zip(*pq.read_table(path).to_pydict().values(), strict=True))
    change(counts)
    columns = [sorted(counts), [counts[token] for token in sorted(counts)]]
    pq.write_table(pa.table(columns, schema=TOKEN_FREQ_SCHEMA), path)

    def sign(body: dict) -> None:
        (entry,) = (one for one in body["extras"] if one["path"] == COUNTS)
        entry |= entry_of(dataset.folder, COUNTS).model_dump()

    dataset.edit_manifest(sign)


def test_token_counts_that_are_not_the_rows_are_found_though_all_hashes_and_sums_agree(dataset):
    def exchange(counts: dict[int, int]) -> None:
        twice = next(token for token, count in counts.items() if count > 1)
        other = next(token for token in counts if token != twice)
        counts[twice], counts[other] = counts[twice] - 1, counts[other] + 1

    recount(dataset, exchange)
    findings = dataset.verify().findings
    assert [finding.path for finding in findings] == [COUNTS, COUNTS]
    assert "expected" in findings[0].what


def test_token_counts_are_not_held_against_rows_that_are_wrong_themselves(dataset):
    flip_in_layer_2(dataset.folder / SHARD)
    recount(dataset, lambda counts: counts.update(dict.fromkeys(counts, 1)))
    assert {finding.path for finding in dataset.verify().findings} == {SHARD}


def test_a_shard_that_is_named_many_times_is_broken_and_not_read_as_often(dataset):
    dataset.edit_manifest(lambda body: body["shards"].extend(100 * [body["shards"][0]]))
    read: list[str | None] = []
    report = verify_dataset(dataset.folder, reading=Reading(read.append))
    assert "101 times" in said(report)
    assert (report.rows, read) == (0, [])
