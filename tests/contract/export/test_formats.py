"""Every format's every tensor against the fake engine's own formula."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import load_from_disk
from safetensors.torch import load_file

from service.errors import OptionRefused
from service.export.formats import deepspec, eagle, nemo
from service.export.options import Algorithm
from service.export.run import export
from service.export.source import open_dataset
from service.export.target import find_target
from tests.contract.export.conftest import AUX, HIDDEN, LAST, close, wanted
from tests.support.tiny_model import random_target


def loaded(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def ckpt(folder: Path, number: int) -> dict:
    return loaded(folder / f"rows_0-2000/data_{number}.ckpt")


def test_speculators_gets_the_layers_as_captured_and_the_last_one_before_the_norm(
    dataset, truths, counts, tmp_path
):
    done = export(str(dataset), tmp_path / "out", wanted("speculators", draft_vocab=50))
    table = load_from_disk(tmp_path / "out")
    assert len(table) == len(truths) == done.rows
    for number, truth in enumerate(truths):
        states = load_file(tmp_path / f"out/hidden_states/hs_{number}.safetensors")
        due = torch.stack([truth.layer(layer_id) for layer_id in (*AUX, LAST)], dim=1)
        assert torch.equal(states["hidden_states"], due)
        assert torch.equal(states["token_ids"], truth.ids)
        row = table[number]
        assert torch.equal(row["input_ids"], truth.ids) and row["input_ids"].dtype is torch.int64
        assert torch.equal(row["loss_mask"], truth.mask) and row["loss_mask"].dtype is torch.int64
    assert list(table.with_format(None)["seq_len"]) == [len(truth.ids) for truth in truths]
    assert loaded(tmp_path / "out/token_freq.pt") == counts
    assert np.load(tmp_path / "out/d2t-50.npy").shape == (50,)
    assert np.load(tmp_path / "out/t2d-50.npy").sum() == 50
    assert "--target-layer-ids 2 4 5 \\" in done.notes
    assert "--draft-vocab-size 50" in done.notes


def test_speculators_mtp_gets_the_last_layer_alone_after_the_norm(dataset, truths, tmp_path):
    done = export(str(dataset), tmp_path / "out", wanted("speculators", algorithm=Algorithm.MTP))
    for number, truth in enumerate(truths):
        states = load_file(tmp_path / f"out/hidden_states/hs_{number}.safetensors")["hidden_states"]
        assert states.shape == (len(truth.ids), 1, HIDDEN)
        assert close(states[:, 0], truth.post())
        assert not torch.equal(states[:, 0], truth.layer(LAST))
    assert "--target-layer-ids" not in done.notes
    assert "after the final norm" in done.notes


def test_specforge_gets_aux_layers_side_by_side_and_the_last_one_after_the_norm(
    dataset, target, truths, tmp_path
):
    export(str(dataset), tmp_path / "out", wanted("specforge", draft_vocab=40))
    for number, truth in enumerate(truths):
        row = ckpt(tmp_path / "out/data", number)
        assert row.keys() == {"input_ids", "loss_mask", "hidden_state", "aux_hidden_state"}
        assert torch.equal(row["input_ids"], truth.ids)
        assert torch.equal(row["loss_mask"], truth.mask) and row["loss_mask"].dtype is torch.int64
        assert torch.equal(row["aux_hidden_state"], truth.aux()[None])
        assert close(row["hidden_state"], truth.post()[None])
    config = json.loads((tmp_path / "out/train.json").read_text())
    assert config["model"]["aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert config["model"]["target_model_path"] == "./target"
    assert loaded(tmp_path / "out/vocab_mapping.pt")["d2t"].shape == (40,)


@pytest.mark.parametrize("algorithm", [Algorithm.DFLASH, Algorithm.DSPARK])
def test_specforge_dflash_leaves_out_rows_without_two_supervised_tokens_together(
    dataset, truths, tmp_path, algorithm
):
    pairs = [bool(((row.mask[1:] == 1) & (row.mask[:-1] == 1)).any()) for row in truths]
    done = export(str(dataset), tmp_path / "out", wanted("specforge", algorithm=algorithm))
    assert done.rows == sum(pairs)
    for number, truth in enumerate(truths):
        if not pairs[number]:
            assert not (tmp_path / f"out/data/rows_0-2000/data_{number}.ckpt").exists()
            continue
        row = ckpt(tmp_path / "out/data", number)
        assert torch.equal(row["hidden_states"], truth.aux()[None])
        if algorithm is Algorithm.DSPARK:
            assert close(row["target_last_hidden_states"], truth.post()[None])
        else:
            assert "target_last_hidden_states" not in row


def test_torchspec_gets_the_last_layer_before_the_norm_and_says_so(dataset, truths, tmp_path):
    export(str(dataset), tmp_path / "out", wanted("torchspec"))
    about = json.loads((tmp_path / "out/dataset.json").read_text())
    assert about == {"version": 1, "last_hidden_states_prenorm": True}
    lines = [json.loads(line) for line in (tmp_path / "out/manifest.jsonl").read_text().splitlines()]
    assert [line["data_id"] for line in lines] == [truth.sample_id for truth in truths]
    for line, truth in zip(lines, truths, strict=True):
        row = loaded(tmp_path / "out" / line["file"])
        assert line["split"] == "train" and row["data_id"] == truth.sample_id
        assert torch.equal(row["input_ids"], truth.ids[None])
        assert torch.equal(row["hidden_states"], truth.aux()[None])
        assert torch.equal(row["last_hidden_states"], truth.layer(LAST)[None])
        lengths = [int(length) for length in row["packed_loss_mask"].split(",")]
        mask = [number % 2 for number, length in enumerate(lengths) for _ in range(length)]
        assert mask == truth.mask.tolist()


def test_modelopt_gets_the_last_layer_after_the_norm_and_says_so(dataset, truths, tmp_path):
    done = export(str(dataset), tmp_path / "out", wanted("modelopt", draft_vocab=30))
    assert loaded(tmp_path / "out/d2t.pt").shape == (30,)
    assert f"data.draft_vocab_cache={tmp_path}/out/d2t.pt" in done.notes
    assert f"training.training_seq_len={max(len(truth.ids) for truth in truths)} \\" in done.notes
    found = sorted((tmp_path / "out/data").glob("*.pt"))
    assert len(found) == len(truths)
    for path, truth in zip(found, truths, strict=True):
        row = loaded(path)
        assert row["conversation_id"] == truth.sample_id
        assert row["hidden_states_prenorm"] is False
        assert torch.equal(row["input_ids"], truth.ids)
        assert torch.equal(row["loss_mask"], truth.mask)
        assert torch.equal(row["aux_hidden_states"], truth.aux())
        assert close(row["hidden_states"], truth.post())


def test_angelslim_gets_a_batch_of_one_and_a_vocabulary_map_in_the_folder_that_it_is_told(
    dataset, truths, tmp_path
):
    done = export(str(dataset), tmp_path / "out", wanted("angelslim", draft_vocab=40))
    assert f"--train_hidden_path {tmp_path}/out \\" in done.notes
    for number, truth in enumerate(truths):
        row = ckpt(tmp_path / "out/rank_0", number)
        assert torch.equal(row["input_ids"], truth.ids[None])
        assert torch.equal(row["loss_mask"], truth.mask[None])
        assert torch.equal(row["hidden_states"], truth.aux()[None])
        assert close(row["target_hiddens"], truth.post()[None])
    assert set(loaded(tmp_path / "out/vocab_mapping.pt")) == {"d2t", "t2d"}


def test_eagle_gets_float16_and_a_folder_of_nothing_but_rows(dataset, truths, tmp_path):
    done = export(str(dataset), tmp_path / "out", wanted("eagle"))
    assert "2048 tokens, in `eagle/train/main.py`; the longest row here has " in done.notes
    found = [path for path in (tmp_path / "out/data").rglob("*") if path.is_file()]
    assert len(found) == len(truths)
    for number, truth in enumerate(truths):
        row = loaded(tmp_path / f"out/data/data_{number}.ckpt")
        assert torch.equal(row["input_ids"], truth.ids)
        assert torch.equal(row["loss_mask"], truth.mask)
        assert row["hidden_state"].dtype is torch.float16
        assert close(row["hidden_state"], truth.post().half())


def test_a_state_beyond_float16_is_refused_by_the_samples_name():
    fits = torch.tensor([[65504.0, -65504.0]])
    assert torch.equal(eagle.halved(fits, "s").float(), fits)
    with pytest.raises(
        OptionRefused, match=r"sample s-7 holds a state of 70144, beyond float16's 65504"
    ) as at:
        eagle.halved(torch.tensor([[1.0, -70144.0]], dtype=torch.bfloat16), "s-7")
    assert (at.value.field, "specforge" in str(at.value.cure)) == ("to", True)


def read_deepspec(out: Path, number: int, num_layers: int) -> dict[str, torch.Tensor]:
    """Read a row by the published layout of the index and the shards."""
    manifest = json.loads((out / "manifest.json").read_text())
    record = struct.unpack_from("<QIIQQQQQ", (out / "samples.idx").read_bytes(), number * 56)
    sample, shard, length, ids_at, attention_at, mask_at, aux_at, last_at = record
    assert sample == number
    content = (out / manifest["shards"][shard]["file_name"]).read_bytes()

    def tensor(dtype: torch.dtype, at: int, *shape: int) -> torch.Tensor:
        count = torch.Size(shape).numel()
        return torch.frombuffer(bytearray(content), dtype=dtype, count=count, offset=at).view(shape)

    return {
        "input_ids": tensor(torch.int32, ids_at, length),
        "attention_mask": tensor(torch.uint8, attention_at, length),
        "loss_mask": tensor(torch.uint8, mask_at, length),
        "target_hidden_states": tensor(torch.bfloat16, aux_at, length, num_layers * HIDDEN),
        "target_last_hidden_states": tensor(torch.bfloat16, last_at, length, HIDDEN),
    }


def test_deepspec_rows_are_found_by_the_index_in_several_shards(
    dataset, target, truths, tmp_path, monkeypatch
):
    monkeypatch.setattr(deepspec, "SHARD_BYTES", 200_000)
    export(str(dataset), tmp_path, wanted("deepspec"))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["num_shards"] > 1
    assert (manifest["version"], manifest["target_layer_ids"]) == (2, [1, 3, 4])
    assert manifest["target_model_name_or_path"] == "./target"
    assert (tmp_path / "samples.idx").stat().st_size == 56 * len(truths)
    for number, truth in enumerate(truths):
        row = read_deepspec(tmp_path, number, len(AUX))
        assert torch.equal(row["input_ids"], truth.ids.int())
        assert torch.equal(row["loss_mask"], truth.mask.to(torch.uint8))
        assert bool((row["attention_mask"] == 1).all())
        assert torch.equal(row["target_hidden_states"], truth.aux())
        assert close(row["target_last_hidden_states"], truth.post())


def test_nemo_rows_are_stacked_padded_and_stand_beside_the_targets_weights(
    dataset, target, truths, tmp_path, monkeypatch
):
    monkeypatch.setattr(nemo, "SHARD_BYTES", 300_000)
    done = export(str(dataset), tmp_path, wanted("nemo", max_tokens=60))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    size, longer = manifest["shard_size"], sum(len(truth.ids) > 60 for truth in truths)
    assert longer and f"{longer} of {len(truths)} are cut" in done.notes
    assert 1 < size < len(truths)
    assert manifest["target_layer_ids"] == [1, 3, 4]
    assert (manifest["seq_length"], manifest["dtype"], manifest["complete"]) == (60, "bf16", True)
    assert (manifest["num_samples"], manifest["target_model_type"]) == (len(truths), "qwen3")
    for number, truth in enumerate(truths):
        shard = load_file(tmp_path / f"shard-{number // size:06d}.safetensors")
        row = {name: tensor[number % size] for name, tensor in shard.items()}
        kept = min(60, len(truth.ids))
        assert row["attention_mask"].tolist() == [1] * kept + [0] * (60 - kept)
        assert torch.equal(row["input_ids"][:kept], truth.ids[:kept])
        assert torch.equal(row["loss_mask"][:kept], truth.mask[:kept])
        assert torch.equal(row["target_hidden_states"][:kept], truth.aux()[:kept])
        assert close(row["target_last_hidden_states"][:kept], truth.post()[:kept])
        assert not any(tensor[kept:].any() for tensor in row.values())
    weights = load_file(tmp_path / "target_weights.safetensors")
    model = load_file(target / "model.safetensors")
    head = model.get("lm_head.weight", model["model.embed_tokens.weight"])
    assert torch.equal(weights["lm_head.weight"], head.float())
    assert torch.equal(weights["embed_tokens.weight"], model["model.embed_tokens.weight"].float())


def test_named_layers_alone_are_written(dataset, truths, tmp_path):
    export(str(dataset), tmp_path / "out", wanted("modelopt", layers=(4,)))
    first = loaded(tmp_path / "out/data/00000000.pt")
    assert torch.equal(first["aux_hidden_states"], truths[0].layer(4))


def test_the_targets_vocabulary_comes_from_its_config(dataset, target):
    source = open_dataset(str(dataset), wanted("specforge"))
    assert find_target(source).vocab_size == json.loads((target / "config.json").read_text())["vocab_size"]


def test_a_target_that_was_overwritten_is_known_by_its_weights_where_they_are_read(
    dataset, target, tmp_path, monkeypatch
):
    overwritten = random_target(tmp_path / target.name, seed=1, hidden=64, max_position=512)
    monkeypatch.setenv("QUARRY_MODEL_ROOTS", json.dumps([str(tmp_path)]))
    source = open_dataset(str(dataset), wanted("specforge"))
    assert find_target(source).folder == overwritten
    with pytest.raises(OptionRefused, match="as it was captured"):
        find_target(source, with_weights=True)
