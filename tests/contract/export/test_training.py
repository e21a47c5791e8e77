"""Trainers' own training steps learn from an export; SpecForge's head makes the target's logits of it."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from service.export.options import Algorithm
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


SPECULATORS = """
import os, sys
os.environ["TORCHDYNAMO_DISABLE"] = "1"
from argparse import Namespace
import torch
from hs_connectors import HiddenStatesBackend
from speculators.model import SpeculatorModel
from speculators.train import cli
from speculators.train.config import TrainConfig

*options, result = sys.argv[1:]
sys.argv = ["train", *options]
torch.manual_seed(0)
args = Namespace(**TrainConfig.resolve().flatten())
d2t, t2d, draft_vocab_size = cli.parse_vocab_mappings(args)
kind = SpeculatorModel.registry[args.speculator_type]
draft = cli.build_draft_model(args, kind, t2d, d2t, draft_vocab_size).float()
backend = HiddenStatesBackend.registry[args.hidden_states_backend]
loader, _ = cli.create_train_val_loaders(
    data_path=args.data_path, total_seq_len=args.total_seq_len, hidden_states_dtype=torch.float32,
    transfer=backend.from_train_args(args, args.data_path), vllm_endpoint=args.vllm_endpoint,
    on_missing=args.on_missing, verifier_name_or_path=args.verifier_name_or_path,
    request_timeout=args.request_timeout, max_retries=args.max_retries,
    generation_validation_retries=args.generation_validation_retries,
    max_consecutive_generation_failures=args.max_consecutive_generation_failures,
    hidden_size=draft.config.transformer_layer_config.hidden_size,
    num_target_layers=len(draft.target_layer_ids), num_workers=0, prefetch_factor=None,
    preprocess=None, train_data_ratio=args.train_data_ratio, seed=args.seed)
wanted, _ = kind.get_trainer_kwargs(**vars(args))
adam = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=3e-3)
losses = []
for epoch in range(2):
    total = 0.0
    for batch in loader:
        adam.zero_grad()
        _, loss, metrics = draft(**batch, **wanted)
        loss.backward()
        adam.step()
        total += loss.item()
    losses.append(total)
torch.save({"losses": losses, "kind": type(draft).__name__}, result)
"""

ON_CPU = ["--draft-attn-impl", "sdpa", "--loss-implementation", "eager"]
"""The defaults are kernels that no CPU runs."""


@pytest.mark.parametrize(
    ("algorithm", "model"),
    [
        ("dflash", "DFlashDraftModel"),
        pytest.param("dflash2", "DFlash2DraftModel", marks=pytest.mark.long),
        pytest.param("xpress", "XPressDraftModel", marks=pytest.mark.long),
    ],
)
def test_speculators_trains_a_drafter_of_the_dflash_family(modelled, real, tmp_path, algorithm, model):
    """By the options of the command in `TRAIN.md`, on the trainer's own loader."""
    options = wanted("speculators", algorithm=Algorithm(algorithm), target=str(real))
    export(str(modelled), tmp_path / "out", options)
    command = [*command_of(tmp_path / "out"), *ON_CPU]
    found = loaded_by(SPECULATORS, *command, result=tmp_path / "result.pt")
    losses = torch.tensor(found["losses"])
    assert found["kind"] == model
    assert bool(losses.isfinite().all())
    assert losses[-1] < losses[0]


def command_of(out: Path) -> list[str]:
    """Return the options of the command in an export's notes."""
    command = re.search(r"```sh\nspeculators train (.*?)```", (out / "TRAIN.md").read_text(), re.DOTALL)
    assert command is not None
    return shlex.split(command[1].replace("\\\n", " "))
