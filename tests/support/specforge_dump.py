"""SpecForge's own offline capture of conversations, run in a process of its own that sees its package.

The package's code does all of it but two things: it resolves the layers from the draft's config, makes tokens
and masks, loads and pads, makes the requests, splits what comes back, and names the tensors of a record.

SGLang is answered for. Modules of that name give one empty class to every import, and the model runner is a
transformers forward pass of the same target, one request at a time: `hidden_states[i]` is what SGLang 0.5.14
takes before its layer i, the last one is after the final norm. The hooks that name layers are answered as its
Qwen3 has them. It has none for DSpark, nor has any model of it, so there the trainer's dump would end; here
that hook is DFlash's, as in the patch of SGLang that the trainer brings.

The loop that saves the records is no part of the package but of `scripts/prepare_hidden_states.py` in its
repository. `dump` repeats what it does to a record.

Arguments: target; conversations, as JSON lines; a folder that holds our export for every algorithm in `ours/`
and gets `theirs/` and `padded/`; tokens of the longest row; sizes of draft vocabularies; torch's threads, as
many as our forward pass had, so that the same sums are added in the same order; the result's path.
"""

import json
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from datasets import Dataset
from specforge.application import resolve_offline_capture
from specforge.config import Config
from specforge.data.preprocessing import build_eagle3_dataset, generate_vocab_mapping_file
from specforge.data.template import TEMPLATE_REGISTRY
from specforge.data.utils import prepare_dp_dataloaders
from specforge.distributed import destroy_distributed, get_dp_group, init_distributed
from specforge.modeling.draft.dflash import build_target_layer_ids
from specforge.offline_capture import load_offline_capture, sglang_backend
from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
from specforge.runtime.data_plane.feature_store import LocalFeatureStore, load_feature_file
from specforge.utils import load_tokenizer, safe_conversations_generator
from transformers import AutoConfig, AutoModelForCausalLM

from connector.vector_math import settle_vector_math

DRAFTS = {"dflash": "DFlashDraftModel", "domino": "DominoDraftModel", "dspark": "DSparkDraftModel"}
ROWS_A_FOLDER = 2000
ROWS_A_PADDED_BATCH = 4
ROWS_A_TRAINED_BATCH = 3


class Empty:
    """What stands for every name of SGLang: it keeps its keywords."""

    prefix_indices = ()

    def __init__(self, *_, **named):
        self.__dict__.update(named)


class EmptyModule(ModuleType):
    """Has that under every name."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Empty


class NoSGLang(MetaPathFinder, Loader):
    """Finds such a module wherever SGLang has one."""

    def find_spec(self, fullname, _path=None, _target=None):
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] == "sglang" else None

    def create_module(self, spec):
        return EmptyModule(spec.name)

    def exec_module(self, _):
        """Do nothing: the module is empty."""


class Target:
    """The target, with the hooks of SGLang's Qwen3."""

    def __init__(self, path, dtype):
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        self.layers_to_capture = []

    def set_eagle3_layers_to_capture(self, layer_ids):
        """Take what goes into the layer behind each."""
        self.layers_to_capture = [layer_id + 1 for layer_id in layer_ids]

    set_dflash_layers_to_capture = set_dspark_layers_to_capture = set_eagle3_layers_to_capture

    def forward(self, token_ids):
        """Return the auxiliary states [T, A * H] and the last, after the norm, [T, H]."""
        said = self.model(torch.tensor([token_ids]), output_hidden_states=True, use_cache=False)
        *inputs, last = (states[0] for states in said.hidden_states)
        taken = [states for layer, states in enumerate(inputs) if layer in self.layers_to_capture]
        return torch.cat(taken, dim=-1), last


def answer_for_sglang():
    """Let the trainer's backend run on that target."""
    sys.meta_path.append(NoSGLang())
    from specforge.offline_capture.sglang_backend.capture import OfflineSGLangCaptureBackend

    class Answered(OfflineSGLangCaptureBackend):
        @classmethod
        def build(cls, path, *, torch_dtype, **_):
            pools = {"req_to_token_pool": {}, "token_to_kv_pool_allocator": {}}
            return cls(SimpleNamespace(model=Target(path, torch_dtype), **pools))

        def _forward_extend(self, reqs):
            rows = [self.model_runner.model.forward(list(req.full_untruncated_fill_ids)) for req in reqs]
            aux, last = (torch.cat(side) for side in zip(*rows, strict=True))
            return SimpleNamespace(aux_hidden_states=aux, last_hidden_states=last)

    sglang_backend.OfflineSGLangCaptureBackend = Answered


def draft_config(strategy, about, folder):
    """Write a draft's config as the trainer's examples have it; EAGLE-3 derives its own from the target."""
    if strategy not in DRAFTS:
        return None
    told = {
        "architectures": [DRAFTS[strategy]],
        "model_type": "qwen3",
        "num_hidden_layers": 5,
        "num_target_layers": about.num_hidden_layers,
        "hidden_size": about.hidden_size,
        "vocab_size": about.vocab_size,
        "layer_types": ["full_attention"] * 5,
        "block_size": 4,
        "dflash_config": {
            "mask_token_id": 0,
            "projector_type": strategy,
            "target_layer_ids": build_target_layer_ids(about.num_hidden_layers, 5),
        },
    }
    path = folder / f"{strategy}.json"
    path.write_text(json.dumps(told))
    return str(path)


def resolved_capture(strategy, target, about, folder, longest):
    """Let the trainer resolve what it captures for an algorithm."""
    model = {"target_model_path": target, "draft_model_config": draft_config(strategy, about, folder)}
    data = {"hidden_states_path": str(folder / "theirs"), "max_length": longest}
    return resolve_offline_capture(Config(model=model, data=data, training={"strategy": strategy}))


def tokenized(conversations, target, template, longest, keep, folder):
    """Return the rows as the trainer tokenizes, masks, cuts, filters and shuffles them."""
    told = {"gen_kwargs": {"file_path": conversations}, "cache_dir": str(folder / "cache")}
    talks = Dataset.from_generator(safe_conversations_generator, **told)
    tokenizer = load_tokenizer(target)
    return build_eagle3_dataset(talks, tokenizer, template, longest, num_proc=None, loss_mask_filter=keep)


def dump(capture, dataset, layout, out, batch_size):
    """Capture and save every row; return the files in order."""
    files = []
    for batch in prepare_dp_dataloaders(dataset, batch_size, num_workers=0, process_group=get_dp_group()):
        named = {name: batch[name] for name in ("input_ids", "attention_mask", "loss_mask")}
        captured = capture.capture(**named)
        for row in range(len(named["input_ids"])):
            sources = {
                "input_ids": named["input_ids"][row].clone(),
                "loss_mask": named["loss_mask"][row].clone(),
                "aux_hidden_states": captured.hidden_states[row].clone().unsqueeze(0),
                "last_hidden_states": captured.last_hidden_states[row].clone().unsqueeze(0),
            }
            begin = len(files) // ROWS_A_FOLDER * ROWS_A_FOLDER
            files.append(out / f"rows_{begin}-{begin + ROWS_A_FOLDER}" / f"data_{len(files)}.ckpt")
            files[-1].parent.mkdir(parents=True, exist_ok=True)
            torch.save(layout.materialize(sources), files[-1])
    return [str(file) for file in files]


def trained_on(strategy, offline, folder, longest, order=None):
    """Return the batches that training makes of a folder, and the rows' ids in their order."""
    refs = offline.build_reader(str(folder), run_id="test", ttt_length=1, max_len=longest).read()
    paths = [ref.feature_store_uri.removeprefix("file://") for ref in refs]
    keyed = dict(
        zip([tuple(load_feature_file(path)["input_ids"].tolist()) for path in paths], refs, strict=True)
    )
    loader = FeatureDataLoader(
        LocalFeatureStore(),
        refs=[keyed[ids] for ids in order or keyed],
        strategy=strategy,
        batch_size=ROWS_A_TRAINED_BATCH,
        collate_fn=offline.build_collator(),
        per_sample_transform=offline.build_normalizer(longest),
        drop_last=False,
    )
    batches = [{name: t.clone() for name, t in batch.tensors.items() if t is not None} for batch in loader]
    return batches, order or list(keyed)


def main(target, conversations, folder, longest, vocabularies, threads, result):
    """Dump, read back, and save what was found."""
    settle_vector_math()
    torch.set_num_threads(int(threads))
    folder, longest, about = Path(folder), int(longest), AutoConfig.from_pretrained(target)
    qwen = TEMPLATE_REGISTRY.get("qwen").model_copy(update={"system_prompt": None})
    TEMPLATE_REGISTRY.register("qwen of no system prompt", qwen)
    bare = qwen.model_copy(update={"end_of_turn_token": "<|im_end|>"})
    TEMPLATE_REGISTRY.register("and of no newline", bare)
    answer_for_sglang()
    capture = load_offline_capture(target, torch_dtype=about.dtype)
    found = {}
    for strategy in ("eagle3", *DRAFTS):
        resolved = resolved_capture(strategy, target, about, folder, longest)
        capture.set_capture_layers(list(resolved.capture_layers), capture_method=resolved.capture_method)
        words = (conversations, target, "and of no newline", longest, resolved.loss_mask_filter, folder)
        dataset = tokenized(*words)
        files = dump(capture, dataset, resolved.layout, folder / "theirs" / strategy, 1)
        offline = resolved.run.algorithm.providers.offline_for("text")
        ours, order = trained_on(strategy, offline, folder / "ours" / strategy / "data", longest)
        theirs, _ = trained_on(strategy, offline, folder / "theirs" / strategy, longest, order)
        layers = list(resolved.capture_layers)
        found[strategy] = {"layers": layers, "files": files, "ours": ours, "theirs": theirs}
        if strategy == "eagle3":
            found["padded"] = dump(capture, dataset, resolved.layout, folder / "padded", ROWS_A_PADDED_BATCH)
            rows = tokenized(conversations, target, "qwen of no system prompt", longest, None, folder)
            found["newline"] = [{name: row[name][0] for name in ("input_ids", "loss_mask")} for row in rows]
            maps = {
                size: generate_vocab_mapping_file(
                    dataset, about.vocab_size, size, str(folder / "maps"), str(size)
                )
                for size in map(int, vocabularies.split(","))
            }
            found["maps"] = {size: torch.load(path, weights_only=True) for size, path in maps.items()}
    torch.save(found, result)


os.environ |= {"SPECFORGE_DEVICE": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
init_distributed()
try:
    main(*sys.argv[1:])
finally:
    destroy_distributed()
