"""NeMo Automodel reads both caches, dumps the same of the same prompts, and trains on what we write."""

import json
from pathlib import Path

import pytest
import torch

from service.export.formats import nemo
from service.export.options import Algorithm
from service.export.run import export
from tests.contract.export.conftest import Truth, close, truths_of, wanted
from tests.support.trainers import loaded_by

pytestmark = pytest.mark.slow

DRAFT_VOCAB = 60
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


EAGLE3 = {"algorithm": Algorithm.EAGLE3, "draft_vocab": DRAFT_VOCAB}

OWN_DUMP = """
import sys
from types import ModuleType
import torch
from transformers import AutoModelForCausalLM

# The dump's module imports the loaders of targets, which need packages that it does not use here.
for module, name in (("", "NeMoAutoModelForCausalLM"), (".auto_tokenizer", "NeMoAutoTokenizer")):
    sys.modules["nemo_automodel._transformers" + module] = unused = ModuleType("unused")
    setattr(unused, name, None)
from nemo_automodel.components.datasets.llm.eagle3 import build_eagle3_token_mapping
from nemo_automodel.components.datasets.llm.eagle3_cache import CachedEagle3Dataset
from nemo_automodel.components.speculative.eagle import HFEagle3TargetModel
from nemo_automodel.components.speculative.precompute_eagle3 import _compute_batch_cache

out, target, rows, result = sys.argv[1:]
cache = CachedEagle3Dataset(out)
model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
wrapper = HFEagle3TargetModel(model, aux_layer_ids=cache.manifest["aux_layer_ids"])
batches = [{name: tensor[None] for name, tensor in row.items()} for row in torch.load(rows)]
kept, kept_mask = build_eagle3_token_mapping(
    batches, target_vocab_size=model.config.vocab_size, draft_vocab_size=cache.draft_vocab_size)
ours = torch.tensor(cache.manifest["selected_token_ids"])
dumped = []
for batch in batches:
    said = wrapper.generate_batch(**batch, attention_mask=torch.ones_like(batch["input_ids"]))
    dumped.append(_compute_batch_cache(said, ours, kept_mask, torch.float32, 0))
torch.save({"theirs": dumped, "ours": [cache[number] for number in range(len(cache))],
            "kept": kept.sort().values, "our_kept": ours}, result)
"""


def rows_of(dataset: Path, file: Path) -> list[Truth]:
    """Save ids and masks for a trainer's script, and return the rows."""
    truths = list(truths_of(dataset))
    torch.save([{"input_ids": row.ids, "loss_mask": row.mask.long()} for row in truths], file)
    return truths


def test_the_trainers_own_dump_of_the_same_prompts_is_what_we_write(modelled, real, tmp_path, monkeypatch):
    monkeypatch.setattr(nemo, "SHARD_BYTES", 600_000)
    export(str(modelled), tmp_path / "out", wanted("nemo", **EAGLE3))
    assert len(list((tmp_path / "out").glob("shard-*.safetensors"))) > 1
    truths = rows_of(modelled, tmp_path / "rows.pt")
    paths = (tmp_path / "out", real, tmp_path / "rows.pt")
    found = loaded_by(OWN_DUMP, *paths, result=tmp_path / "result.pt")
    assert torch.equal(found["our_kept"], found["kept"])
    counted = 0
    for ours, theirs, truth in zip(found["ours"], found["theirs"], truths, strict=True):
        length = len(truth.ids)
        assert ours.keys() == theirs.keys()
        for name in ("input_ids", "attention_mask", "loss_mask", "position_mask"):
            assert torch.equal(ours[name][:length], theirs[name][0]), name
            assert not ours[name][length:].any()
        torch.testing.assert_close(
            ours["aux_hidden_states"][:length], theirs["aux_hidden_states"][0], **TOLERANCE
        )
        supervised = theirs["loss_mask"][0].bool()
        counted += int(theirs["position_mask"].sum())
        due = theirs["target_probs"][0]
        torch.testing.assert_close(ours["target_probs"][:length][supervised], due[supervised], **TOLERANCE)
        assert not ours["target_probs"][:length][~supervised].any()
    assert counted


TRAINED = """
import sys
import torch
from transformers import AutoConfig
from nemo_automodel.components.datasets.llm.eagle3_cache import (
    build_cached_eagle3_dataloader, read_manifest, read_target_embeddings)
from nemo_automodel.components.speculative.eagle.core import Eagle3TrainerModule
from nemo_automodel.components.speculative.eagle.draft_llama import LlamaEagle3DraftModel

out, target, result = sys.argv[1:]
torch.manual_seed(0)
manifest = read_manifest(out)
config = AutoConfig.from_pretrained(target)
config.update({"num_hidden_layers": 1, "draft_vocab_size": manifest["draft_vocab_size"],
               "target_hidden_size": config.hidden_size, "tie_word_embeddings": False, "mlp_bias": False})
config._attn_implementation = "eager"
draft = LlamaEagle3DraftModel(config)
draft.model.embed_tokens.weight.data.copy_(read_target_embeddings(out))
kept = torch.tensor(manifest["selected_token_ids"])
draft.set_vocab_mapping(kept)
kept_mask = torch.zeros(manifest["target_vocab_size"], dtype=torch.bool)
kept_mask[kept] = True
module = Eagle3TrainerModule(draft, selected_token_ids=kept, selected_token_mask=kept_mask, ttt_steps=3)
adam = torch.optim.AdamW(module.parameters(), lr=3e-3)
losses, valid = [], []
for epoch in range(4):
    for batch in build_cached_eagle3_dataloader(cache_dir=out, batch_size=4, shuffle=False):
        metrics = module(**{name: t.float() if t.is_floating_point() else t for name, t in batch.items()})
        adam.zero_grad()
        metrics.loss.backward()
        adam.step()
        losses.append(metrics.loss.detach())
        valid.append(metrics.valid_tokens)
torch.save({"losses": torch.stack(losses), "valid": torch.stack(valid)}, result)
"""


def test_the_trainers_own_module_learns_from_the_cache(modelled, real, tmp_path):
    export(str(modelled), tmp_path / "out", wanted("nemo", **EAGLE3))
    found = loaded_by(TRAINED, tmp_path / "out", real, result=tmp_path / "result.pt")
    assert bool((found["valid"] > 0).all())
    losses = found["losses"].view(4, -1)
    assert bool(losses.isfinite().all())
    assert bool((losses[-1] < losses[0]).all())


DSPARK = """
import sys
import torch
from nemo_automodel.components.datasets.llm import dspark_cache
reader = dspark_cache.CachedDSparkDataset(sys.argv[1])
torch.save([reader[number] for number in range(len(reader))], sys.argv[2])
"""


def test_the_dspark_cache_is_read_by_its_own_class(dataset, truths, tmp_path):
    export(str(dataset), tmp_path / "out", wanted("nemo"))
    for row, truth in zip(
        loaded_by(DSPARK, tmp_path / "out", result=tmp_path / "rows.pt"), truths, strict=True
    ):
        length = len(truth.ids)
        assert torch.equal(row["input_ids"][:length], truth.ids)
        assert torch.equal(row["loss_mask"][:length], truth.mask)
        assert torch.equal(row["target_hidden_states"][:length], truth.aux())
        assert close(row["target_last_hidden_states"][:length], truth.post())


def test_rows_that_are_cut_hold_what_the_whole_ones_hold_before_the_cut(modelled, tmp_path):
    from safetensors.torch import load_file

    length = 20
    export(str(modelled), tmp_path / "out", wanted("nemo", **EAGLE3, max_tokens=length))
    export(str(modelled), tmp_path / "whole", wanted("nemo", **EAGLE3))
    cut, whole = (load_file(tmp_path / name / "shard-000000.safetensors") for name in ("out", "whole"))
    manifests = [json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("out", "whole")]
    assert manifests[0]["seq_length"] == length
    for number, truth in enumerate(truths_of(modelled)):
        kept = min(length, len(truth.ids))
        assert torch.equal(cut["input_ids"][number, : kept - 1], truth.ids[1:kept])
        assert cut["input_ids"][number, kept - 1] == 0
        assert not cut["position_mask"][number, kept - 1]
        assert torch.equal(cut["aux_hidden_states"][number, :kept], whole["aux_hidden_states"][number, :kept])
    tokens = torch.cat([row.ids[:length][row.mask[:length] == 1] for row in truths_of(modelled)])
    ids, times = tokens.unique(return_counts=True)
    best = [token for _, token in sorted(zip((-times).tolist(), ids.tolist(), strict=True))][:DRAFT_VOCAB]
    rest = [token for token in range(DRAFT_VOCAB) if token not in ids.tolist()][: DRAFT_VOCAB - len(best)]
    assert manifests[0]["selected_token_ids"] == sorted(best + rest)
