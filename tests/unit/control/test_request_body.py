"""A body that is wrong says where, in its author's words; and no body costs more than it weighs."""

import json
from datetime import date
from typing import Any

import pytest

from schemas.request import ExtractRequest
from service.control.request_body import MAX_ERRORS_LISTED, parse_body, parse_json, read_body
from service.errors import RequestError

GOOD: dict[str, Any] = {"model": "a/b", "source": {"kind": "inline", "samples": [{"text": "hello"}]}}


def refusal(**changes: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_body(ExtractRequest, GOOD | changes)
    return caught.value


def with_samples(*samples: Any) -> dict[str, Any]:
    return {"kind": "inline", "samples": list(samples)}


def test_a_good_body_becomes_a_request_and_its_own_json_reads_back_equal():
    request = parse_body(ExtractRequest, GOOD)
    assert read_body(ExtractRequest, request.canonical_json().encode()) == request


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"modle": "x"}, "modle"),
        ({"layers": "eagle9"}, "layers"),
        ({"layers": [1, 1]}, "layers"),
        ({"layers": [1, 2000]}, "layers.1"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**400}, "max_tokens"),
        ({"source": {}}, "source"),
        ({"source": {"kind": "inline"}}, "source.samples"),
        ({"source": {"kind": "file", "path": "x", "sample": 1}}, "source.sample"),
        ({"source": with_samples({"text": "a"}, {"txt": "a"})}, "source.samples.1.txt"),
        ({"source": with_samples({"text": "a", "token_ids": [1]})}, "source.samples.0"),
        ({"source": with_samples({"messages": [{"role": "user"}]})}, "source.samples.0.messages.0"),
        ({"source": with_samples({"token_ids": [1, -1]})}, "source.samples.0.token_ids.1"),
        ({"source": with_samples({"token_ids": [1, True]})}, "source.samples.0.token_ids.1"),
        ({"generate": {"max_tokens": 4, "temperature": float("nan")}}, "generate.temperature"),
        ({"storage": {"compression": "zip"}}, "storage.compression"),
        ({"hub": {"repo_id": "no-slash"}}, "hub.repo_id"),
    ],
)
def test_a_wrong_field_is_named_by_its_path_in_the_body(changes: dict[str, Any], field: str):
    assert refusal(**changes).field == field


def test_an_unknown_field_and_a_missing_one_say_what_to_do():
    assert refusal(x=1).cure == "remove the field, or fix its spelling"
    with pytest.raises(RequestError) as caught:
        parse_body(ExtractRequest, {"model": "a/b"})
    assert (caught.value.field, caught.value.cure) == ("source", "add the field")


def test_a_source_without_its_kind_says_what_to_add():
    part = {"source": {"path": "rows.jsonl"}}
    for source, field in (
        (part["source"], "source"),
        ({"kind": "mix", "sources": [part]}, "source.sources.0.source"),
    ):
        error = refusal(source=source)
        assert (error.field, error.detail) == (field, f"{field}: has no 'kind'")
        assert error.cure == "add a 'kind', such as 'file' or 'hub'"


def test_several_wrong_fields_are_all_told_and_the_first_is_named():
    error = refusal(dtype="int4", loss="none")
    assert error.field == "dtype"
    assert "dtype:" in error.detail
    assert "loss:" in error.detail


def test_a_body_that_is_not_an_object_is_refused():
    for document in (None, 1, "x", [GOOD]):
        with pytest.raises(RequestError) as caught:
            parse_body(ExtractRequest, document)
        assert caught.value.field is None


def test_an_infinity_inside_a_tool_is_refused_by_name():
    tools = [{"type": "function", "limit": float("inf")}]
    error = refusal(source=with_samples({"messages": [{"role": "user", "content": "x"}], "tools": tools}))
    assert error.field == "source.samples.0.tools.0"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"NaN",
        b'{"model": NaN}',
        b'{"model": "\\ud800"}',
        b"[" * 100_000,
        b"1" * 10_000,
        b"{'model': 'x'}",
        b"{} {}",
    ],
)
def test_what_is_not_json_is_refused_with_the_place_of_the_fault(raw: bytes):
    with pytest.raises(RequestError, match="line 1 column"):
        parse_json(raw)


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (b'{"a": 1, "b": {"a": 1}, "a": 1}', "a"),
        (b'{"b": [{"a": 1}, {"c": {"x": [], "x": []}}], "c": 1}', "b.1.c.x"),
        (b'{"a": 1, "\\u0061": 2}', "a"),
    ],
)
def test_a_field_that_is_given_twice_is_refused_since_either_may_be_meant(raw: bytes, field: str):
    with pytest.raises(RequestError) as caught:
        parse_json(raw)
    assert (caught.value.field, caught.value.detail) == (field, f"the body has several {field!r}")


@pytest.mark.parametrize(
    "changes",
    [
        {"source": with_samples(*[{"token_ids": ["x"] * 100_000}] * 10)},
        {f"x{number}": 1 for number in range(100_000)},
        {"x" * 1_000_000: 1},
        {"source": {"kind": "y" * 1_000_000}},
    ],
    ids=["a million token ids", "many fields", "a long name", "a long value"],
)
def test_many_or_long_faults_are_told_in_part(changes: dict[str, Any]):
    error = refusal(**changes)
    assert len(error.detail) < 2000
    assert len(error.field or "") < 2000


def test_more_errors_than_are_told_are_counted():
    error = refusal(**{f"x{number}": 1 for number in range(MAX_ERRORS_LISTED + 7)})
    assert error.detail.endswith("and 7 more")


@pytest.mark.parametrize("value", [date(2026, 1, 1), float("inf"), {1: 1, "a": 2}], ids=str)
def test_a_tool_that_no_json_holds_is_refused_by_its_field(value: object):
    assert refusal(tools=[{"a": value}]).field == "tools.0"


def test_a_nul_in_a_text_is_kept():
    body = json.dumps(GOOD | {"source": with_samples({"text": "a\0b"})})
    request = read_body(ExtractRequest, body.encode())
    assert isinstance(request, ExtractRequest)
    assert "a\\u0000b" in request.canonical_json()
