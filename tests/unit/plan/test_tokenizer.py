"""Which of a model's files its tokenizer is loaded from: only those that the identity covers."""

import base64
import json
from pathlib import Path

import pytest

from service.model_tokenizer import open_tokenizer
from service.plan.model_folder import TOKENIZER_FILES, files_digest
from tests.support import templates


def write_tekken(folder: Path) -> None:
    """Write Mistral's form of a tokenizer, of bytes."""
    vocab = [{"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode()} for i in range(256)]
    marks = [{"rank": i, "token_str": mark, "is_control": True} for i, mark in enumerate(["<unk>", "<s>"])]
    config = {"pattern": r"\p{L}+|\s+", "default_vocab_size": 258, "default_num_special_tokens": 2}
    whole = {"config": config | {"version": "v7"}, "vocab": vocab, "special_tokens": marks}
    (folder / "tekken.json").write_text(json.dumps(whole))


def test_mistrals_own_tokenizer_beside_another_is_not_read(tmp_path: Path) -> None:
    """It comes with the weights: a plan made before has the tokens of the other."""
    templates.write_target(tmp_path, model_type="mistral")
    before = open_tokenizer(tmp_path)("hello world")["input_ids"]
    digest = files_digest(tmp_path, TOKENIZER_FILES)
    write_tekken(tmp_path)
    assert open_tokenizer(tmp_path)("hello world")["input_ids"] == before
    assert files_digest(tmp_path, TOKENIZER_FILES) == digest


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_mistrals_own_tokenizer_alone_is_refused(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    write_tekken(tmp_path)
    with pytest.raises(ValueError, match=r"'tekken\.json' is not read"):
        open_tokenizer(tmp_path)
