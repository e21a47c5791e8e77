import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from schemas.dataset import seal
from schemas.dataset.manifest import CanaryReport, Manifest
from schemas.names import (
    FINAL_NORM_PATH,
    PRIVATE_FOLDER,
    index_path,
    manifest_path,
    shard_path,
    token_freq_path,
)
from service.artifacts.dataset_files import LocalFiles
from service.errors import NotFound, OptionRefused
from service.proof import verify
from service.proof.manifests import read_manifests
from service.proof.tally import DatasetTally
from service.proof.verify import Finding, Reading, verify_dataset
from tests.support.plans import JOB
from tests.support.reference_models import NUM_LAYERS, VOCAB_SIZE, TinyModel
from tests.support.shards import (
    LAYER_IDS,
    LENGTHS,
    ShardRow,
    capture,
    passed_canary,
    with_states,
    write_dataset,
)
from tests.unit.proof.made_dataset import (
    INDEX,
    MANIFEST,
    SHARD,
    UNITS,
    Dataset,
    make_it_end_its_process,
    said,
)

BEGUN = "j-00000000000beb0c"


def test_the_canarys_numbers_are_told_layer_by_layer(dataset):
    numbers = passed_canary(JOB, LAYER_IDS).model_dump(mode="json")
    numbers["layers"][1] |= {"cosine": 0.99987, "max_rel_error": 0.0021}
    dataset.edit_manifest(lambda body: body["checks"].update(canary="cached", canary_report=numbers))
    report = dataset.verify()
    assert report.ok
    lines = str(report).splitlines()
    at = lines.index(f"canary of {JOB}: cached, against transformers 5.19.0")
    told = "  layer 2: cosine 0.999870, largest relative error 2.10e-03, nearest to layer 2"
    assert lines[at + 2] == told
    assert report.proven[JOB].canary_report == CanaryReport.model_validate(numbers)


def test_a_right_dataset_has_no_findings(made):
    tally = DatasetTally()
    report = made.verify(tally=tally)
    assert report.ok, said(report)
    ((_, counted),) = tally
    assert (counted.rows, len(counted.sample_ids)) == (report.rows, 0), "names are as many as rows"
    assert (report.jobs, report.shards, report.rows) == (1, UNITS, UNITS * len(LENGTHS))
    assert report.tokens == UNITS * sum(LENGTHS)
    assert report.logit_rows == report.logit_argmax_agree == UNITS * len(LENGTHS)
    assert str(report).splitlines()[-1] == "the dataset is right"
    small = report.model_copy(update={"logit_max_error": 6.74e-6})
    assert "largest log-probability error 6.74e-06\n" in str(small)
    assert json.loads(report.model_dump_json())["ok"] is True


def test_without_the_model_all_but_the_logits_is_checked(made):
    report = made.verify(model_folder=None)
    assert report.ok
    assert (report.rows, report.logit_rows) == (UNITS * len(LENGTHS), 0)
    assert f"{report.tokens} tokens read again, every layer\nlogit check: not made" in str(report)


@pytest.mark.parametrize(("how", "dtype"), [("planes", "bfloat16"), ("none", "float32"), ("fp8", "bfloat16")])
def test_other_forms_of_right_datasets_are_right(tmp_path, how, dtype):
    model = TinyModel(tmp_path / "model", "gpt_neox", dtype)
    units = {0: capture(model, dtype=dtype, compression=how, layer_ids=(0, 2, NUM_LAYERS))}
    write_dataset(tmp_path / "dataset", units)
    report = verify_dataset(tmp_path / "dataset", model_folder=tmp_path / "model")
    assert report.ok, said(report)


def flip_any_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    draw = random.Random(path.name)
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("path", "damage", "what"),
    [
        *((path, flip_any_bit, "has sha256") for path in (SHARD, INDEX, FINAL_NORM_PATH)),
        (SHARD, truncate, "has "),
        *((path, Path.unlink, "is missing") for path in (SHARD, INDEX, FINAL_NORM_PATH)),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(dataset, path, damage, what):
    damage(dataset.folder / path)
    report = dataset.verify()
    assert f"{path}: {what}" in said(report)
    assert str(report).splitlines()[-1].startswith("the dataset is BROKEN")


def test_what_two_jobs_say_of_one_file_is_said_once(dataset):
    other = dataset.folder / manifest_path(BEGUN)
    other.write_bytes((dataset.folder / MANIFEST).read_bytes())
    flip_any_bit(dataset.folder / FINAL_NORM_PATH)
    report = dataset.verify()
    assert len(set(report.findings)) == len(report.findings)
    assert said(report).count(f"{FINAL_NORM_PATH}: has sha256") == 1


def test_a_long_file_is_noted_as_it_is_hashed(dataset, monkeypatch):
    monkeypatch.setattr(seal, "BLOCK_BYTES", 512)
    monkeypatch.setattr(verify, "BLOCK_BYTES", 512)
    notes = []
    verify_dataset(dataset.folder, reading=Reading(notes.append))
    path = shard_path(JOB, 0)
    assert notes.count(path) > (dataset.folder / path).stat().st_size // 512


def test_a_damaged_index_is_all_that_is_named(dataset):
    flip_any_bit(dataset.folder / INDEX)
    assert [finding.path for finding in dataset.verify().findings] == [INDEX]


def test_a_damaged_file_is_not_decoded(dataset):
    make_it_end_its_process(dataset.folder / SHARD)
    assert said(dataset.verify()).startswith(f"{SHARD}: has sha256")


def test_every_flipped_bit_of_the_manifest_is_found(dataset):
    """600 single bits: each leaves a manifest that is refused, fails its hash, or means the same."""
    path = dataset.folder / MANIFEST
    whole = path.read_bytes()
    right = Manifest.model_validate_json(whole)
    draw = random.Random(4)
    for _ in range(600):
        data = bytearray(whole)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        findings: list[Finding] = []
        read = list(read_manifests(LocalFiles(dataset.folder), findings, {}))
        assert findings or read == [right]


def test_two_shards_that_changed_places_are_named(dataset):
    first, second = dataset.folder / shard_path(JOB, 0), dataset.folder / SHARD
    other = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(other)
    findings = said(dataset.verify())
    assert f"{shard_path(JOB, 0)}: has " in findings
    assert f"{SHARD}: has " in findings


@pytest.mark.parametrize(
    "path",
    [
        "data/extra.parquet",
        f"data/{JOB}/.train-00002.parquet.tmp",
        "other.parquet",
        "index/note.txt",
        "x/y.safetensors",
        # These look like files in a job's folder.
        "data/j-1/x.parquet",
        f"data/{BEGUN}",
        f"x/{BEGUN}/a.parquet",
    ],
)
def test_a_data_file_that_no_manifest_names_is_named(dataset, path):
    (dataset.folder / path).parent.mkdir(exist_ok=True, parents=True)
    (dataset.folder / path).write_bytes(b"x")
    assert said(dataset.verify()) == f"{path}: no manifest names this file"


def test_files_of_tools_and_the_card_are_no_data(dataset):
    tools = (".quarry/quarry.db", ".cache/huggingface/x.parquet", ".gitattributes")
    for path in (*tools, "LICENSE", f"manifests/.{BEGUN}.json.1.tmp"):
        (dataset.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (dataset.folder / path).write_bytes(b"x")
    assert dataset.verify().ok


def test_a_dataset_whose_only_job_is_not_complete_is_neither_right_nor_broken(dataset):
    (dataset.folder / MANIFEST).unlink()
    report = dataset.verify()
    assert (report.ok, report.not_complete, report.findings) == (False, (JOB,), ())
    line = f"not complete: 1 job without a manifest, captured still or given up: {JOB}"
    assert str(report).splitlines()[-2:] == [line, "the dataset is not complete yet"]
    assert json.loads(report.model_dump_json())["ok"] is False


def test_faults_beside_the_only_job_that_is_not_complete_are_named(dataset):
    (dataset.folder / MANIFEST).unlink()
    (dataset.folder / "data/extra.parquet").write_bytes(b"x")
    report = dataset.verify()
    assert said(report) == "data/extra.parquet: no manifest names this file"
    assert str(report).splitlines()[-1] == "the dataset is BROKEN: 1 error"


@pytest.mark.parametrize("path", [None, "README.md", FINAL_NORM_PATH])
def test_a_folder_without_files_of_a_job_is_no_dataset(tmp_path, path):
    if path is not None:
        (tmp_path / path).write_bytes(b"x")
    report = verify_dataset(tmp_path)
    assert said(report) == f"manifests/: {verify.NOTHING}"
    assert str(report).splitlines()[-1] == "the dataset is BROKEN: 1 error"


def test_of_a_folder_that_has_datasets_below_it_one_is_named(dataset):
    with pytest.raises(
        OptionRefused, match=rf"{dataset.folder.parent} .* has {dataset.folder.name} below it$"
    ):
        verify_dataset(dataset.folder.parent)
    (dataset.folder / MANIFEST).unlink()
    assert not verify_dataset(dataset.folder.parent).ok


def test_a_folder_in_which_a_job_has_stored_nothing_yet_is_not_complete(tmp_path):
    (tmp_path / PRIVATE_FOLDER).mkdir()
    report = verify_dataset(tmp_path)
    assert (report.verdict, report.findings) == ("not complete yet", ())


def store_some(folder: Path) -> set[str]:
    """Let a job have stored its first unit, as it does long before its manifest."""
    paths = {shard_path(BEGUN, 0), index_path(BEGUN, 0), token_freq_path(BEGUN)}
    for path in paths:
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_bytes(b"x")
    return paths


def test_a_job_that_is_captured_still_or_was_given_up_is_no_fault(dataset):
    before = dataset.verify()
    store_some(dataset.folder)
    report = dataset.verify()
    assert report.ok and report.not_complete == (BEGUN,)
    line = f"not complete: 1 job without a manifest, captured still or given up: {BEGUN}"
    assert str(report).splitlines()[-2:] == [line, "the dataset is right"]
    assert json.loads(report.model_dump_json())["not_complete"] == [BEGUN]
    assert "not_complete" not in json.loads(before.model_dump_json())


def test_a_job_that_lands_while_the_others_are_read_is_no_fault(dataset):
    """Its manifest comes after those that are read were listed."""

    def land(path: str | None) -> None:
        manifest = dataset.folder / manifest_path(BEGUN)
        manifest.write_text((dataset.folder / MANIFEST).read_text().replace(JOB, BEGUN))

    store_some(dataset.folder)
    report = verify_dataset(dataset.folder, reading=Reading(land))
    assert report.ok, said(report)
    assert report.not_complete == (BEGUN,)


def test_the_files_of_a_job_whose_manifest_cannot_be_read_are_named(dataset):
    paths = store_some(dataset.folder)
    (dataset.folder / manifest_path(BEGUN)).write_text("{")
    report = dataset.verify()
    assert {finding.path for finding in report.findings} == paths | {manifest_path(BEGUN)}
    assert f"{manifest_path(BEGUN)}: is not a manifest of this version: " in said(report)
    assert report.not_complete == ()


def test_a_folder_that_does_not_exist_is_not_found(tmp_path):
    with pytest.raises(NotFound):
        verify_dataset(tmp_path / "none")


def not_a_number(dataset: Dataset, row: ShardRow) -> ShardRow:
    states = row.states[2].clone()
    states[5, 5] = float("nan")
    return with_states(row, 2, states)


def equal_layers(dataset: Dataset, row: ShardRow) -> ShardRow:
    return with_states(row, 2, row.states[1])


def stale_end(dataset: Dataset, row: ShardRow) -> ShardRow:
    states = row.states[NUM_LAYERS].clone()
    states[-16:] = dataset.units[0].rows[2].states[NUM_LAYERS]
    return with_states(row, NUM_LAYERS, states)


def layer_before(dataset: Dataset, row: ShardRow) -> ShardRow:
    says = dataset.units[1].model.run(row.input_ids)
    return with_states(row, NUM_LAYERS, says.layers[NUM_LAYERS - 1])


@pytest.mark.parametrize(
    ("plant", "what"),
    [
        (not_a_number, "layer 2: not finite in 1 of 33 tokens, the first at 5"),
        (equal_layers, "layers 1 and 2 hold the same states"),
        (stale_end, r"token \d+ is \S+ above token \d+ by the stored states"),
        (layer_before, r"token \d+ is \S+ above token \d+ by the stored states"),
    ],
)
def test_wrong_states_behind_right_hashes_are_found_and_the_row_named(dataset, plant, what):
    rows = list(dataset.units[1].rows)
    rows[4] = plant(dataset, rows[4])
    dataset.rewrite(rows)
    report = dataset.verify()
    assert [finding.path for finding in report.findings] == [SHARD]
    assert re.match(rf"row 4 \({rows[4].sample_id}\): {what}", report.findings[0].what)


def test_a_row_shorter_than_its_tokens_is_named(dataset):
    rows = list(dataset.units[1].rows)
    rows[4] = replace(rows[4], states={k: states[:-1] for k, states in rows[4].states.items()})
    dataset.rewrite(rows)
    assert f"{SHARD}: row 4 ({rows[4].sample_id}): train-00001.parquet: row 4: layer_1 takes" in said(
        dataset.verify()
    )


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (
            {"input_ids": [VOCAB_SIZE] * 16},
            f"token ids {VOCAB_SIZE}..{VOCAB_SIZE} are outside the vocabulary of 512",
        ),
        ({"input_ids": [-1] * 16}, "token ids -1..-1 are outside the vocabulary of 512"),
        ({"loss_mask": [2] * 16}, "loss_mask holds 2; 0 and 1 are flags"),
    ],
)
def test_ids_and_flags_out_of_range_are_named(dataset, change, what):
    rows = list(dataset.units[1].rows)
    rows[2] = replace(rows[2], **change)
    dataset.rewrite(rows)
    assert f"{SHARD}: row 2 ({rows[2].sample_id}): {what}" in said(dataset.verify())


def test_a_sample_that_is_written_twice_is_named(dataset):
    rows = [*dataset.units[1].rows[:4], dataset.units[0].rows[4]]
    twice = dataset.units[0].rows[4]
    captured = replace(
        dataset.units[1],
        rows=rows,
        witnesses={**dataset.units[1].witnesses, 4: dataset.units[0].witnesses[4]},
    )
    replace(dataset, units={0: dataset.units[0], 1: captured}).rewrite(rows)
    assert said(dataset.verify()) == f"{MANIFEST}: sample {twice.sample_id} is written 2 times"
