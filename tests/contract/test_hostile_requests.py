"""Models and sources that hold up a submission: the child that looks at them ends, and they are refused."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from schemas.request import ExtractRequest
from service.control.submit import check
from service.errors import QuarryError
from service.plan.estimate import estimate_request
from service.settings import Settings
from tests.support import templates

MEMORY_BYTES = 2**28


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "data").mkdir()
    return Settings(
        data_dir=tmp_path / "data",
        model_roots=(tmp_path,),
        source_roots=(tmp_path,),
        plan_row_cpu_s=1.0,
        plan_memory_bytes=MEMORY_BYTES,
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return templates.write_target(tmp_path / "model")


def a_request(model: Path, **changes: Any) -> ExtractRequest:
    source = {"kind": "inline", "samples": [{"text": "x"}]}
    return ExtractRequest.model_validate({"model": str(model), "source": source} | changes)


def check_it(request: ExtractRequest, settings: Settings) -> None:
    check(request, settings)


def estimate_it(request: ExtractRequest, settings: Settings) -> None:
    estimate_request(request, settings)


EVERY_WAY = pytest.mark.parametrize("look", [check_it, estimate_it])
Look = Callable[[ExtractRequest, Settings], None]

HUGE_CONFIGS: dict[str, dict[str, Any]] = {
    "labels": {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "num_labels": 10**9},
    "layers": {"model_type": "qwen2", "num_hidden_layers": 2**31 - 1, "hidden_size": 8},
}
"""Without a vocabulary, so that transformers has to complete them."""


@EVERY_WAY
@pytest.mark.parametrize("name", HUGE_CONFIGS)
def test_a_config_that_grows_as_it_is_completed_is_an_unknown_model(
    tmp_path: Path, settings: Settings, name: str, look: Look
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HUGE_CONFIGS[name]))
    with pytest.raises(QuarryError, match=r"config\.json .* (took more than|did not go on)") as refused:
        look(a_request(tmp_path), settings)
    assert refused.value.status == 422 and refused.value.field == "model" and refused.value.cure


@EVERY_WAY
def test_a_glob_over_more_files_than_can_be_listed_in_time_is_refused(
    tmp_path: Path, settings: Settings, model: Path, look: Look
) -> None:
    for folder in range(20):
        (tmp_path / "many" / str(folder)).mkdir(parents=True)
        for number in range(1000):
            os.mknod(tmp_path / "many" / str(folder) / f"{number}.jsonl")
    settings = settings.model_copy(update={"plan_row_cpu_s": 0.2})
    source = {"kind": "file", "path": f"{tmp_path}/many/**/*.jsonl"}
    with pytest.raises(QuarryError, match="the source took more than") as refused:
        look(a_request(model, source=source), settings)
    assert refused.value.status == 422 and refused.value.field == "source.path" and refused.value.cure


def test_an_error_that_quotes_a_whole_template_is_cut(settings: Settings, model: Path) -> None:
    with pytest.raises(QuarryError, match="does not compile") as refused:
        check(a_request(model, chat_template="{% " + "\N{GRINNING FACE}" * 200_000 + " %}"), settings)
    assert refused.value.field == "chat_template" and len(refused.value.detail) < 10_000


@EVERY_WAY
def test_a_tokenizer_file_that_is_larger_than_any_is_an_unknown_model(
    settings: Settings, model: Path, look: Look
) -> None:
    os.truncate(model / "tokenizer.json", 2**42)  # sparse: it takes no room
    with pytest.raises(QuarryError, match="bytes in sum") as refused:
        look(a_request(model), settings)
    assert refused.value.status == 422 and refused.value.field == "model" and refused.value.cure


def test_a_tokenizer_that_lies_anywhere_is_not_loaded(
    tmp_path: Path, settings: Settings, model: Path
) -> None:
    """It is not in the identity, and may be another owner's."""
    (tmp_path / "tokenizer.4.0.0.json").write_bytes((model / "tokenizer.json").read_bytes())
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["fast_tokenizer_files"] = ["../tokenizer.4.0.0.json"]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(QuarryError, match=r"'fast_tokenizer_files' .* is not read") as refused:
        estimate_it(a_request(model), settings)
    assert (refused.value.status, refused.value.field) == (422, "model")
