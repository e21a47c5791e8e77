"""The longest sample is what a row can hold, where request and model allow more."""

from pathlib import Path
from typing import Any

import pytest

from schemas.request import ExtractRequest
from service.plan.samples import SampleTokenizer
from service.plan.target import inspect_target
from service.settings import Settings
from tests.support import templates


def limit_tokens(tmp_path: Path, **options: Any) -> int:
    folder = templates.write_target(tmp_path / "model", templates.CHATML)
    source = {"kind": "inline", "samples": [{"text": "x"}]}
    request = ExtractRequest.model_validate({"model": str(folder), "source": source} | options)
    target = inspect_target(request, Settings(model_roots=(tmp_path,)))
    assert (target.hidden_size, target.dtype) == (64, "bfloat16")
    return SampleTokenizer(target, request).limit_tokens


def test_a_layer_of_a_sample_is_one_parquet_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert limit_tokens(tmp_path) > 10
    monkeypatch.setattr("schemas.dataset.columns.MAX_VALUE_BYTES", 64 * 2 * 10 + 127)
    assert limit_tokens(tmp_path) == 10
    assert limit_tokens(tmp_path, generate={"max_tokens": 4}) == 6
