"""The trainers' own loaders read the exports, and give their training the tensors that were captured."""

import json

import numpy as np
import pytest
import torch

from service.export.options import Algorithm
from service.export.run import export
from tests.contract.export.conftest import AUX, HIDDEN, LAST, close, wanted
from tests.support.trainers import loaded_by

pytestmark = pytest.mark.slow

DRAFT_VOCAB = 50

SPECULATORS = """
import sys
from pathlib import Path
import torch
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import ArrowDataset, CollateFn
from speculators.train.vocab_mapping import (
    build_vocab_mappings_from_distribution, save_token_frequency_distribution)

out, vocab, result = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
rows = ArrowDataset(max_len=512, datapath=out, on_missing="raise")
items = [rows[number] for number in range(len(rows))]
save_token_frequency_distribution(rows.data, Path(result).with_name("counted.pt"))
ours = torch.load(out / "token_freq.pt", weights_only=True)
d2t, t2d = build_vocab_mappings_from_distribution(ours, 50, vocab)
collate = CollateFn(512, 64, num_target_layers=3, preprocess=shift_batch)
torch.save({
    "rows": items, "lengths": rows.approx_lengths, "batch": collate(items[:2]), "counts": ours,
    "counted": torch.load(Path(result).with_name("counted.pt"), weights_only=True), "d2t": d2t, "t2d": t2d,
}, result)
"""


def test_speculators_loads_every_row_and_maps_the_vocabulary_as_we_do(dataset, target, truths, tmp_path):
    export(str(dataset), tmp_path / "out", wanted("speculators", draft_vocab=DRAFT_VOCAB))
    vocab_size = json.loads((target / "config.json").read_text())["vocab_size"]
    found = loaded_by(SPECULATORS, tmp_path / "out", vocab_size, result=tmp_path / "result.pt")
    assert found["lengths"] == [len(truth.ids) for truth in truths]
    for row, truth in zip(found["rows"], truths, strict=True):
        assert torch.equal(row["input_ids"], truth.ids)
        assert torch.equal(row["loss_mask"], truth.mask)
        assert torch.equal(row["hidden_states"], truth.aux())
        assert torch.equal(row["verifier_last_hidden_states"], truth.layer(LAST))
    batch, first = found["batch"], truths[0]
    kept = len(first.ids) - 1
    assert torch.equal(batch["input_ids"][0, :kept], first.ids[1:])
    assert torch.equal(batch["hidden_states"][0, :kept], first.aux()[:-1])
    assert torch.equal(batch["verifier_last_hidden_states"][0, :kept], first.layer(LAST)[1:])
    assert batch["error_records"] == 0
    assert found["counted"] == found["counts"]
    for name in ("d2t", "t2d"):
        ours = np.load(tmp_path / f"out/{name}-{DRAFT_VOCAB}.npy")
        assert torch.equal(found[name], torch.from_numpy(ours))


SPECULATORS_VALIDATION = """
import sys
from pathlib import Path
import torch
from datasets import load_from_disk
from safetensors.torch import load_file
from speculators.data_generation.offline import (
    check_hidden_states, find_corrupt_hidden_state_indices, get_existing_hidden_state_indices)

out, result = Path(sys.argv[1]), sys.argv[2]
states, rows = out / "hidden_states", load_from_disk(out)
found = get_existing_hidden_state_indices(states)
for number in found:
    check_hidden_states(load_file(states / f"hs_{number}.safetensors"), rows[number]["input_ids"].tolist())
torch.save({"found": found, "corrupt": find_corrupt_hidden_state_indices(states, found)}, result)
"""


def test_speculators_takes_the_files_for_a_finished_dump_of_its_own(dataset, truths, tmp_path):
    export(str(dataset), tmp_path / "out", wanted("speculators"))
    said = loaded_by(SPECULATORS_VALIDATION, tmp_path / "out", result=tmp_path / "result.pt")
    assert said == {"found": list(range(len(truths))), "corrupt": {}}


MTP = """
import sys
import torch
from speculators.models.mtp.data import shift_batch_mtp
from speculators.train.data import ArrowDataset, CollateFn

rows = ArrowDataset(max_len=512, datapath=sys.argv[1], on_missing="raise")
collate = CollateFn(512, 64, num_target_layers=0, preprocess=shift_batch_mtp)
torch.save({"batches": [collate([rows[number]]) for number in range(len(rows))]}, sys.argv[2])
"""


def test_speculators_feeds_mtp_the_state_after_the_norm(dataset, truths, tmp_path):
    export(str(dataset), tmp_path / "out", wanted("speculators", algorithm=Algorithm.MTP))
    batches = loaded_by(MTP, tmp_path / "out", result=tmp_path / "result.pt")["batches"]
    for batch, truth in zip(batches, truths, strict=True):
        assert torch.equal(batch["input_ids"][0, : len(truth.ids)], truth.ids)
        assert close(batch["hidden_states"][0, : len(truth.ids)], truth.post())


SPECFORGE_EAGLE3 = """
import sys
from pathlib import Path
import torch
from specforge.algorithms.eagle3.data import (
    build_offline_collator, build_offline_normalizer, build_offline_reader)
from specforge.config import load_config
from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
from specforge.runtime.data_plane.feature_store import LocalFeatureStore
from specforge.training.vocab_mapping import count_effective_feature_tokens

out, result = Path(sys.argv[1]), sys.argv[2]
config = load_config(str(out / "train.json"))
reader = build_offline_reader(
    config.data.hidden_states_path, run_id="test", ttt_length=7, max_len=config.data.max_length)
reader.validate_files = True
refs = reader.read()
loader = FeatureDataLoader(
    LocalFeatureStore(), refs=refs, batch_size=1, collate_fn=build_offline_collator(), drop_last=False,
    per_sample_transform=build_offline_normalizer(config.data.max_length))
NAMES = ("input_ids", "loss_mask", "attention_mask", "hidden_state", "target")
batches = [{name: batch.tensors[name] for name in NAMES} for batch in loader]
torch.save({
    "files": [Path(ref.feature_store_uri).stem for ref in refs], "rows": batches,
    "counts": dict(count_effective_feature_tokens(config.data.hidden_states_path)),
    "layers": config.model.aux_hidden_state_layer_ids, "map": torch.load(config.model.vocab_mapping_path),
    "strategy": config.training.strategy,
}, result)
"""


def test_specforge_loads_every_row_for_eagle3(dataset, truths, counts, tmp_path):
    export(str(dataset), tmp_path / "out", wanted("specforge", draft_vocab=DRAFT_VOCAB))
    found = loaded_by(SPECFORGE_EAGLE3, tmp_path / "out", result=tmp_path / "result.pt")
    assert (found["layers"], found["strategy"]) == ([layer_id - 1 for layer_id in AUX], "eagle3")
    assert found["counts"] == counts
    assert found["map"]["d2t"].shape == (DRAFT_VOCAB,)
    assert len(found["rows"]) == len(truths)
    for name, row in zip(found["files"], found["rows"], strict=True):
        truth = truths[int(name.removeprefix("data_"))]
        length = len(truth.ids)
        assert torch.equal(row["input_ids"][0, :length], truth.ids)
        assert torch.equal(row["loss_mask"][0, : length - 1], truth.mask[:-1])
        assert torch.equal(row["hidden_state"][0, :length], truth.aux())
        assert close(row["target"][0, :length], truth.post())


SPECFORGE_DSPARK = """
import sys
from pathlib import Path
import torch
from specforge.algorithms.common.dflash_family_data import (
    build_dspark_offline_normalizer, build_dspark_offline_reader)
from specforge.runtime.data_plane.feature_store import load_feature_file

reader = build_dspark_offline_reader(
    "dspark", str(Path(sys.argv[1]) / "data"), run_id="test", ttt_length=7, max_len=512)
normalize = build_dspark_offline_normalizer(512)
refs = reader.read()
paths = [ref.feature_store_uri.removeprefix("file://") for ref in refs]
rows = [{name: tensor.clone() for name, tensor in normalize(load_feature_file(path)).items()}
        for path in paths]
torch.save({"files": [Path(path).stem for path in paths], "rows": rows}, sys.argv[2])
"""


def test_specforge_loads_every_row_for_dspark(dataset, truths, tmp_path):
    done = export(str(dataset), tmp_path / "out", wanted("specforge", algorithm=Algorithm.DSPARK))
    found = loaded_by(SPECFORGE_DSPARK, tmp_path / "out", result=tmp_path / "result.pt")
    assert len(found["rows"]) == done.rows
    for name, row in zip(found["files"], found["rows"], strict=True):
        truth = truths[int(name.removeprefix("data_"))]
        assert torch.equal(row["input_ids"][0], truth.ids)
        assert torch.equal(row["loss_mask"][0], truth.mask)
        assert torch.equal(row["hidden_states"][0], truth.aux())
        assert close(row["target_last_hidden_states"][0], truth.post())
        assert row["target_last_hidden_states"].shape[-1] == HIDDEN
