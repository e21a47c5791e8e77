"""A tokenizer that breaks the library under it is told as a fault of the model."""

import json
from pathlib import Path

import pytest

from service.errors import UnknownModel
from service.plan.encoding import TextTokenizer
from tests.support import templates


@pytest.mark.parametrize("charsmap", ["AAAA", "BAAAAAEAAAA="], ids=["as it is loaded", "as it encodes"])
def test_a_tokenizer_that_panics_is_an_unknown_model(tmp_path: Path, charsmap: str) -> None:
    """The panic of its library is a BaseException, which no guard of Exceptions holds."""
    folder = templates.write_target(tmp_path / "model")
    whole = json.loads((folder / "tokenizer.json").read_text())
    normalizer = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    (folder / "tokenizer.json").write_text(json.dumps(whole | {"normalizer": normalizer}))
    with pytest.raises(UnknownModel, match="breaks") as caught:
        TextTokenizer(folder, "a/b").encode("the quick brown fox")
    assert caught.value.field == "model" and caught.value.cure
