"""Which tensor of a checkpoint is the output head, where the config and the files leave a doubt."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from service.errors import EngineRefused
from service.proof.head_weights import read_head, text_config

VOCAB, HIDDEN = 16, 8
EMBEDDING = torch.randn(VOCAB, HIDDEN)
HEAD = torch.randn(VOCAB, HIDDEN)


def checkpoint(folder: Path, *, whole: bool, text: bool, head: bool) -> Path:
    """Write a Gemma 3 that also sees, tied or not by the whole's config and the text's."""
    inner = {"model_type": "gemma3_text", "vocab_size": VOCAB, "hidden_size": HIDDEN}
    config = {"model_type": "gemma3", "tie_word_embeddings": whole}
    told = config | {"text_config": inner | {"tie_word_embeddings": text}}
    (folder / "config.json").write_text(json.dumps(told))
    tensors = {"model.language_model.embed_tokens.weight": EMBEDDING}
    save_file(tensors | ({"lm_head.weight": HEAD} if head else {}), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("whole", "text", "head", "expected"),
    [
        (True, True, False, EMBEDDING),
        (True, False, False, EMBEDDING),
        (True, False, True, HEAD),
        (False, False, True, HEAD),
    ],
)
def test_a_model_that_also_sees_is_tied_by_either_config(tmp_path, whole, text, head, expected):
    folder = checkpoint(tmp_path, whole=whole, text=text, head=head)
    assert torch.equal(read_head(folder, text_config(folder)).weight_VH, expected)


def test_a_model_that_nobody_ties_needs_a_head_of_its_own(tmp_path):
    folder = checkpoint(tmp_path, whole=False, text=False, head=False)
    with pytest.raises(EngineRefused, match="no tensor is named like an output head"):
        read_head(folder, text_config(folder))
