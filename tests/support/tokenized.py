"""Samples through the tokenizer of a small model, and what of them is supervised."""

from pathlib import Path
from typing import Any

import numpy as np

from schemas.request import ExtractRequest
from schemas.source import Sample
from service.plan.model_config import read_config
from service.plan.model_folder import locate_model
from service.plan.samples import SampleTokenizer
from service.plan.target import Target, target_of
from service.plan.units import Tokenized
from service.settings import Settings
from tests.support import templates


def a_tokenizer(tmp_path: Path, template: str | None = templates.CHATML, **options: Any) -> SampleTokenizer:
    config = options.pop("config", {})
    return of_folder(templates.write_target(tmp_path / "model", template, **config), **options)


def of_folder(folder: Path, **options: Any) -> SampleTokenizer:
    source = {"kind": "inline", "samples": [{"text": "x"}]}
    request = ExtractRequest.model_validate({"model": str(folder), "source": source} | options)
    return SampleTokenizer(inspected(request, Settings(model_roots=(folder.parent,))), request)


def inspected(request: ExtractRequest, settings: Settings) -> Target:
    """Find a request's model and read its config in this process."""
    located = locate_model(request.model, request.revision, settings)
    return target_of(request, located, read_config(located.folder, request.dtype))


def chat(*turns: str | dict[str, Any], **more: Any) -> Sample:
    """Turns are `role: content`, or whole messages."""
    messages = [
        dict(zip(("role", "content"), turn.split(": ", 1), strict=True)) if isinstance(turn, str) else turn
        for turn in turns
    ]
    return Sample.model_validate({"messages": messages} | more)


def encoded(tokenizer: SampleTokenizer, sample: Sample) -> Tokenized:
    (tokens,) = tokenizer.rows(sample, "")
    assert isinstance(tokens, Tokenized), tokens
    assert (tokens.ids.dtype, tokens.mask.dtype) == (np.int32, np.uint8)
    assert tokens.ids.shape == tokens.mask.shape
    return tokens


def pieces(tokenizer: SampleTokenizer, sample: Sample) -> tuple[list[str], str]:
    """Return the texts of each run of supervised tokens, and the whole text."""
    tokens = encoded(tokenizer, sample)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], tokens.mask, [0]])))
    runs = [decode(tokenizer, tokens.ids[a:b]) for a, b in edges.reshape(-1, 2)]
    return runs, decode(tokenizer, tokens.ids)


def decode(tokenizer: SampleTokenizer, ids: Any) -> str:
    text: str = tokenizer.texts.of_library.decode(list(ids), skip_special_tokens=False)
    return text
