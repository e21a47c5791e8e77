"""SpecForge's own training step learns from an export, and its head makes the target's logits of it."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from service.export.run import export
from tests.contract.export.conftest import wanted
from tests.support.trainers import loaded_by

pytestmark = pytest.mark.slow

DRAFT_VOCAB = 60

SPECFORGE = """
import os, sys
os.environ["TORCHDYNAMO_DISABLE"] = "1"
from pathlib import Path
from types import ModuleType
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.llama.configuration_llama import LlamaConfig
import specforge.utils

# The loss is a Triton kernel, which no CPU runs; the trainer's own reference of it stands beside it.
for name in ("triton", "triton.language"):
    sys.modules[name] = ModuleType(name)
sys.modules["triton"].jit = lambda kernel: kernel
sys.modules["triton"].language = sys.modules["triton.language"]
sys.modules["triton.language"].constexpr = int
from specforge.core import loss
del sys.modules["triton"], sys.modules["triton.language"]

from specforge.algorithms.eagle3 import model as eagle3
from specforge.algorithms.eagle3.data import (
    build_offline_collator, build_offline_normalizer, build_offline_reader)
from specforge.config import load_config
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from specforge.modeling.target.target_head import TargetHead
from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
from specforge.runtime.data_plane.feature_store import LocalFeatureStore
from specforge.training.strategies.base import Eagle3TrainStrategy

class Reference:
    apply = staticmethod(loss._compute_loss)

eagle3.LogSoftmaxLoss = Reference
out, result = Path(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
config = load_config(str(out / "train.json"))
target = config.model.target_model_path
model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
told = LlamaConfig(hidden_size=model.config.hidden_size, vocab_size=model.config.vocab_size,
                   num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128,
                   max_position_embeddings=512, draft_vocab_size=60)
draft = LlamaForCausalLMEagle3(told, attention_backend="sdpa")
draft.load_embedding(target)
draft.freeze_embedding()
draft.load_vocab_mapping(config.model.vocab_mapping_path)
head = TargetHead.from_pretrained(target)
wrapped = eagle3.OnlineEagle3Model(draft, length=3, attention_backend="sdpa")
step = Eagle3TrainStrategy(wrapped, target_head=head)
head.float()
refs = build_offline_reader(
    config.data.hidden_states_path, run_id="test", ttt_length=3, max_len=config.data.max_length).read()
adam = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=3e-3)
losses, logits = [], []
for epoch in range(4):
    loader = FeatureDataLoader(
        LocalFeatureStore(), refs=refs, batch_size=1, collate_fn=build_offline_collator(), drop_last=False,
        per_sample_transform=build_offline_normalizer(config.data.max_length))
    total = 0.0
    for batch in loader:
        if not epoch:
            ids = batch.tensors["input_ids"]
            with torch.inference_mode():
                logits.append({"ours": head(batch.tensors["target"].float())[0].clone(),
                               "theirs": model(ids).logits[0].clone()})
        adam.zero_grad()
        said = step.forward_loss(batch)
        said.loss.backward()
        adam.step()
        total += said.loss.item()
    losses.append(total)
torch.save({"losses": losses, "logits": logits, "rows": len(refs)}, result)
"""


def with_index(target: Path, folder: Path) -> Path:
    """Return a copy of a target of one file, with the index that `TRAIN.md` gives for it."""
    shutil.copytree(target, folder)
    weights = {"lm_head.weight": "model.safetensors", "model.embed_tokens.weight": "model.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    return folder


def test_specforge_trains_on_the_rows_and_its_head_makes_the_targets_logits(modelled, real, tmp_path):
    target = with_index(real, tmp_path / "target")
    done = export(
        str(modelled), tmp_path / "out", wanted("specforge", draft_vocab=DRAFT_VOCAB, target=str(target))
    )
    found = loaded_by(SPECFORGE, tmp_path / "out", result=tmp_path / "result.pt")
    assert found["rows"] == done.rows
    for row in found["logits"]:
        length = len(row["theirs"])
        # The trainer holds its head in bfloat16.
        torch.testing.assert_close(row["ours"][:length], row["theirs"], rtol=2e-2, atol=2e-2)
        agree = row["ours"][:length].argmax(-1) == row["theirs"].argmax(-1)
        assert agree.float().mean() > 0.9
    losses = torch.tensor(found["losses"])
    assert bool(losses.isfinite().all())
    assert losses[-1] < losses[0]
