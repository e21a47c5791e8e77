"""What users and model folders hold, made of fragments: a value, or an error that names what is wrong."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from schemas.keys import NewKey
from schemas.request import ExtractRequest
from schemas.schedule import NewSchedule, PostedSamples, ScheduleChange
from service.capture.engine_options import check_engine_options
from service.cli.job_file import read_document
from service.control.request_body import parse_body, parse_json
from service.errors import QuarryError
from service.plan.model_config import read_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "5")) * 20
CONFIG_KEYS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings"),
    *("rope_scaling", "rope_parameters", "dtype", "text_config", "architectures", "model_type"),
)
OPTION_KEYS = ("max_num_seqs", "trust_remote_code", "compilation_config", "block_size", "no_such_option")
WORDS = (
    *("inline", "file", "hub", "mix", "posted", "eagle3", "all", "user", "assistant", "default"),
    *("../x", "/etc", "org/name", "bfloat16", "LlamaForCausalLM", "yarn"),
    *("* * * * *", "0 3 * * 1-5", "Europe/Berlin", "\0", "\ud7ff"),
)


def field_names(document: object) -> set[str]:
    """Return every property's name in a JSON schema."""
    names: set[str] = set()
    if isinstance(document, dict):
        names |= set(document.get("properties", ()))
        document = list(document.values())
    if isinstance(document, list):
        for part in document:
            names |= field_names(part)
    return names


KEYS = sorted(field_names([kind.model_json_schema() for kind in (NewSchedule, NewKey, ScheduleChange)]))
SCALARS = st.one_of(
    st.sampled_from([None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 1e308, -0.0, "", *WORDS]),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
)
NAMES = st.sampled_from([*KEYS, *CONFIG_KEYS, *OPTION_KEYS, "x"])
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=20,
)
OBJECTS = st.dictionaries(NAMES, JSON, max_size=8)
OTHER_KEYS = sorted({*KEYS} - {"model", "source"})
REQUESTS = st.fixed_dictionaries({"model": JSON, "source": OBJECTS}, optional=dict.fromkeys(OTHER_KEYS, JSON))

PARSERS: dict[str, Callable[[Any], object]] = {
    "request": lambda document: parse_body(ExtractRequest, document),
    "schedule": lambda document: parse_body(NewSchedule, document),
    "schedule change": lambda document: parse_body(ScheduleChange, document),
    "samples": lambda document: parse_body(PostedSamples, document),
    "key": lambda document: parse_body(NewKey, document),
    "engine options": lambda document: check_engine_options(document, OPTION_KEYS[:-1]),
}


@pytest.mark.parametrize("name", PARSERS)
def test_a_document_is_a_value_or_an_error_of_ours(name: str) -> None:
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(document=OBJECTS | REQUESTS)
    def parse(document: dict[str, Any]) -> None:
        try:
            PARSERS[name](document)
        except QuarryError as error:
            assert error.detail

    parse()


@settings(max_examples=EXAMPLES, deadline=None, database=None)
@given(raw=st.binary(max_size=200) | JSON.map(lambda document: json.dumps(document).encode()))
def test_a_body_is_json_or_an_error_of_ours(raw: bytes) -> None:
    try:
        parse_json(raw)
    except QuarryError as error:
        assert error.detail


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(config=OBJECTS, text=st.text(max_size=100) | JSON.map(json.dumps))
def test_a_config_and_a_job_file_are_values_or_errors_of_ours(
    tmp_path: Path, config: dict[str, Any], text: str
) -> None:
    small = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "vocab_size": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(small | config))
    (tmp_path / "job.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
    for read in (lambda: read_config(tmp_path, "auto"), lambda: read_document(tmp_path / "job.yaml")):
        try:
            read()
        except QuarryError as error:
            assert error.detail
