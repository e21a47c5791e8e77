"""Tiny drafters with random weights, in the layouts of their published checkpoints."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HEAD_DIM, HEADS, KV_HEADS, MLP_SIZE = 32, 4, 2, 192


def save_drafter(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], *, hidden: int, vocab: int
) -> Path:
    """Write a drafter of a Llama's or Qwen3's shape to `folder` and return it."""
    folder.mkdir(parents=True)
    shape = {
        "hidden_size": hidden,
        "vocab_size": vocab,
        "intermediate_size": MLP_SIZE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(shape | config))
    save_file(tensors, folder / "model.safetensors")
    return folder


class Draw:
    """Draws named weights: vectors around 1, matrices around 0."""

    def __init__(self, hidden: int) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._hidden = hidden
        self._generator = torch.Generator().manual_seed(7)

    def __call__(self, name: str, *shape: int) -> None:
        """Draw one weight."""
        noise = torch.randn(shape, generator=self._generator)
        self.tensors[f"{name}.weight"] = 1 + 0.3 * noise if len(shape) == 1 else 0.08 * noise

    def layer(self, name: str, attention_input: int) -> None:
        """Draw a decoder layer without its first norm."""
        for part, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS), ("v_proj", KV_HEADS)):
            self(f"{name}.self_attn.{part}", heads * HEAD_DIM, attention_input)
        self(f"{name}.self_attn.o_proj", self._hidden, HEADS * HEAD_DIM)
        self(f"{name}.post_attention_layernorm", self._hidden)
        for part in ("gate_proj", "up_proj"):
            self(f"{name}.mlp.{part}", MLP_SIZE, self._hidden)
        self(f"{name}.mlp.down_proj", self._hidden, MLP_SIZE)


def eagle(folder: Path, *, hidden: int, vocab: int) -> Path:
    """EAGLE-1: embedding and state through `fc`, one layer, the target's embeddings and head."""
    draw = Draw(hidden)
    draw("fc", hidden, 2 * hidden)
    draw.layer("layers.0", hidden)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    return save_drafter(folder, config, draw.tensors, hidden=hidden, vocab=vocab)


def eagle3(
    folder: Path,
    layers: tuple[int, ...],
    *,
    hidden: int,
    vocab: int,
    mask_token: int | None = None,
    drafts: Sequence[int] | None = None,
) -> Path:
    """EAGLE-3 on the states of `layers`.

    With a mask token it is a P-EAGLE, which has a mask state. `drafts` are the only tokens that it can
    draft, ascending; all if null.
    """
    draw = Draw(hidden)
    draw("fc", hidden, len(layers) * hidden)
    draw.layer("midlayer", 2 * hidden)
    draw("midlayer.input_layernorm", hidden)
    draw("midlayer.hidden_norm", hidden)
    draw("norm", hidden)
    draw("lm_head", len(drafts or range(vocab)), hidden)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "draft_vocab_size": len(drafts or range(vocab)),
        "eagle_aux_hidden_state_layer_ids": list(layers),
    }
    if drafts is not None:
        draw.tensors["d2t"] = torch.tensor(drafts) - torch.arange(len(drafts))
    if mask_token is not None:
        draw("mask_hidden", 1, len(layers) * hidden)
        draw.tensors["mask_hidden"] = draw.tensors.pop("mask_hidden.weight")
        config["ptd_token_id"] = mask_token
    return save_drafter(folder, config, draw.tensors, hidden=hidden, vocab=vocab)


def dflash(
    folder: Path, layers: tuple[int, ...], *, hidden: int, vocab: int, mask_token: int, causal: bool
) -> Path:
    """DFlash on the states of `layers`, which its own config numbers from 0."""
    draw = Draw(hidden)
    draw("fc", hidden, len(layers) * hidden)
    draw.layer("layers.0", hidden)
    draw("layers.0.input_layernorm", hidden)
    draw("layers.0.self_attn.q_norm", HEAD_DIM)
    draw("layers.0.self_attn.k_norm", HEAD_DIM)
    draw("hidden_norm", hidden)
    draw("norm", hidden)
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dflash_config": {
            "mask_token_id": mask_token,
            "target_layer_ids": [k - 1 for k in layers],
            "causal": causal,
        },
    }
    return save_drafter(folder, config, draw.tensors, hidden=hidden, vocab=vocab)
