"""Rows of other people's datasets: what becomes a sample, and what a reject."""

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from schemas.source import Sample
from service.plan.sources import RejectReason, RowReject
from service.plan.sources.conversations import FUNCTION_CALL, read_row, used_columns
from tests.unit.plan.test_sources import ANSWER, ASK, turns


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


SYSTEM = {"role": "system", "content": "be brief"}
PARTS = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        # Keys that mean nothing are ignored, and so is what is empty.
        (
            {"messages": [ASK | {"weight": 0, "name": None}, ANSWER | {"tool_calls": []}], "x": 3},
            [ASK, ANSWER],
        ),
        ({"messages": [ASK | {"content": PARTS}]}, [ASK | {"content": "one two"}]),
        ({"conversations": [ASK, ANSWER], "system": "be brief"}, [SYSTEM, ASK, ANSWER]),
        ({"prompt": "q", "messages": [ASK, ANSWER]}, [ASK, ANSWER]),
        ({"messages": [ASK, ANSWER], "system": "be brief"}, [SYSTEM, ASK, ANSWER]),
        ({"messages": [SYSTEM, ASK], "system": "be long"}, [SYSTEM, ASK]),
        ({"messages": [ASK, ANSWER | {"weight": 1.0}]}, [ASK, ANSWER]),
        ({"messages": [ASK | {"train": False}, ANSWER | {"loss": True, "train": True}]}, [ASK, ANSWER]),
        ({"messages": [ASK | {"images": []}, ANSWER], "images": [], "image": None}, [ASK, ANSWER]),
    ],
)
def test_openai_messages_are_read(row: dict[str, Any], expected: list[dict[str, Any]]) -> None:
    assert turns(read_row(row)[1]) == expected


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "hello", "id": 7}, Sample(id="7", text="hello")),
        ({"prompt": "hello", "id": ""}, Sample(text="hello")),
        ({"token_ids": [1, 2], "loss_mask": [0, 1]}, Sample(token_ids=(1, 2), loss_mask=(0, 1))),
        ({"input_ids": [1, 2], "attention_mask": [1, 1]}, Sample(token_ids=(1, 2))),
        ({"text": "x", "response": "y"}, Sample(text="x")),
        ({"text": "a caption", "image": "a.png"}, Sample(text="a caption")),
    ],
)
def test_text_and_token_ids_are_read(row: dict[str, Any], expected: Sample) -> None:
    assert read_row(row)[1] == expected


TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)], ids=["list", "text"])
def test_reasoning_tool_calls_and_tools_are_kept(tools: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    row = {
        "messages": [
            ASK,
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
            {"role": "tool", "content": "1", "tool_call_id": "c"},
        ],
        "tools": tools,
    }
    content = read_row(row)[1]
    assert turns(content)[1] == {"role": "assistant", "tool_calls": [call], "reasoning_content": "hm"}
    assert isinstance(content, Sample) and content.tools == tuple(TOOLS)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_read_by_each_of_its_names(name: str) -> None:
    others = {"reasoning_content": "", "reasoning": None}
    (turn,) = turns(read_row({"messages": [{"role": "assistant", "content": "4", **others, name: "hm"}]})[1])
    assert turn == {"role": "assistant", "content": "4", "reasoning_content": "hm"}


def test_all_that_a_sharegpt_answer_says_is_read() -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    more = {"reasoning": "hm", "tool_calls": calls}
    (turn,) = turns(read_row({"conversations": [{"from": "gpt", "value": "4"} | more]})[1])
    assert turn == {"role": "assistant", "content": "4", "reasoning_content": "hm", "tool_calls": calls}


def test_sharegpt_conversations_are_read_with_their_roles() -> None:
    said = [("system", "s"), ("human", "h"), ("gpt", "g"), ("user", "u"), ("function_call", '{"name": "f"}')]
    said += [("observation", "o"), ("tool", "t"), ("assistant", "a")]
    row = {"conversations": [{"from": who, "value": what} for who, what in said]}
    content = turns(read_row(row)[1])
    expected = ["system", "user", "assistant", "user", "assistant", "tool", "tool", "assistant"]
    assert [turn["role"] for turn in content] == expected
    assert content[4]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    assert [turn.get("content") for turn in content] == ["s", "h", "g", "u", None, "o", "t", "a"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([1], RejectReason.NOT_AN_OBJECT),
        (None, RejectReason.NOT_AN_OBJECT),
        ({}, RejectReason.NO_SAMPLE),
        ({"question": "q"}, RejectReason.NO_SAMPLE),
        ({"messages": None, "text": None}, RejectReason.NO_SAMPLE),
        ({"messages": "hello"}, RejectReason.INVALID_SAMPLE),
        ({"messages": ["hello"]}, RejectReason.INVALID_SAMPLE),
        ({"messages": []}, RejectReason.INVALID_SAMPLE),
        ({"messages": [{"role": "wizard", "content": "x"}]}, RejectReason.UNKNOWN_ROLE),
        ({"messages": [{"content": "x"}]}, RejectReason.UNKNOWN_ROLE),
        ({"messages": [{"role": ["user"], "content": "x"}]}, RejectReason.UNKNOWN_ROLE),
        ({"messages": [{"role": "user"}]}, RejectReason.INVALID_SAMPLE),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, RejectReason.NOT_TEXT),
        ({"messages": [{"role": "user", "content": [3]}]}, RejectReason.NOT_TEXT),
        ({"messages": [{"role": "user", "content": 3}]}, RejectReason.NOT_TEXT),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, RejectReason.INVALID_SAMPLE),
        ({"messages": [ASK], "tools": "{"}, RejectReason.INVALID_SAMPLE),
        ({"messages": [ASK], "tools": "3"}, RejectReason.INVALID_SAMPLE),
        ({"messages": [ASK], "tools": '[{"name": "f", "name": "g"}]'}, RejectReason.INVALID_SAMPLE),
        ({"conversations": [{"from": "wizard", "value": "x"}]}, RejectReason.UNKNOWN_ROLE),
        ({"conversations": [{"from": "human"}]}, RejectReason.NOT_TEXT),
        ({"conversations": [{"from": "function_call", "value": "f("}]}, RejectReason.BAD_TOOL_CALL),
        ({"conversations": [{"from": "function_call", "value": "[]"}]}, RejectReason.BAD_TOOL_CALL),
        ({"token_ids": [1, "2"]}, RejectReason.INVALID_SAMPLE),
        ({"token_ids": [1, -2]}, RejectReason.INVALID_SAMPLE),
        ({"token_ids": [1, 2], "loss_mask": [1]}, RejectReason.INVALID_SAMPLE),
        ({"token_ids": [1, 2], "loss_mask": [1, 2]}, RejectReason.INVALID_SAMPLE),
        ({"text": "x", "loss_mask": [0, 1]}, RejectReason.INVALID_SAMPLE),
        ({"messages": [ASK, ANSWER], "loss_mask": [0]}, RejectReason.INVALID_SAMPLE),
        ({"input_ids": [1, 2], "labels": [-100, 2]}, RejectReason.INVALID_SAMPLE),
        ({"input_ids": [1, 2], "assistant_masks": [0, 1]}, RejectReason.INVALID_SAMPLE),
        ({"input_ids": [1, 2], "attention_mask": [0, 1]}, RejectReason.INVALID_SAMPLE),
        ({"input_ids": [1], "loss_mask": [0], "attention_mask": [False]}, RejectReason.INVALID_SAMPLE),
        ({"prompt": "x", "completion": "y"}, RejectReason.INVALID_SAMPLE),
        ({"prompt": "x", "response": ""}, RejectReason.INVALID_SAMPLE),
        ({"messages": [ASK, ANSWER | {"weight": 0}]}, RejectReason.INVALID_SAMPLE),
        ({"messages": [ASK, ANSWER | {"weight": 0.5}]}, RejectReason.INVALID_SAMPLE),
        ({"conversations": [{"from": "gpt", "value": "a", FUNCTION_CALL: {}}]}, RejectReason.BAD_TOOL_CALL),
        ({"conversations": [ASK, {"from": "gpt", "value": "a", "weight": 0.0}]}, RejectReason.INVALID_SAMPLE),
        ({"messages": [ASK, ANSWER | {"loss": False}, ASK, ANSWER]}, RejectReason.INVALID_SAMPLE),
        ({"messages": [ASK, ANSWER | {"train": False}, ASK, ANSWER]}, RejectReason.INVALID_SAMPLE),
        ({"messages": [ASK, ANSWER | {"train_detail": [{"train": False}]}]}, RejectReason.INVALID_SAMPLE),
        ({"messages": [ASK, ANSWER], "images": ["a.png"]}, RejectReason.NOT_TEXT),
        ({"messages": [ASK | {"audios": ["a.wav"]}, ANSWER]}, RejectReason.NOT_TEXT),
        ({"conversations": [{"from": "human", "value": "<image>q"}], "image": "a"}, RejectReason.NOT_TEXT),
        ({"messages": [ASK, ANSWER | {"function_call": {"name": "f"}}]}, RejectReason.BAD_TOOL_CALL),
        ({"messages": [ASK, ANSWER | {"thinking": 3}]}, RejectReason.INVALID_SAMPLE),
        ({"messages": [ASK, ANSWER | {"tool_calls": [nested(65)]}]}, RejectReason.INVALID_SAMPLE),
        ({"messages": [ASK], "tools": [nested(900)]}, RejectReason.INVALID_SAMPLE),
        ({"text": 3}, RejectReason.NOT_TEXT),
        ({"text": "x", "id": ["a"]}, RejectReason.INVALID_SAMPLE),
        ({"text": "x", "id": "a" * 1000}, RejectReason.INVALID_SAMPLE),
        ({"text": "x", "id": 10**1000}, RejectReason.INVALID_SAMPLE),
        ({"text": "x", "id": []}, RejectReason.INVALID_SAMPLE),
        ({"text": "x", "id": True}, RejectReason.INVALID_SAMPLE),
    ],
)
def test_a_bad_row_is_a_reject_with_a_reason(row: Any, expected: RejectReason) -> None:
    content = read_row(row)[1]
    assert isinstance(content, RowReject) and content.reason is expected


def test_images_are_read_beside_conversations_alone() -> None:
    """Those beside a caption are ignored, and may not fit in memory."""
    assert used_columns(["image", "text", "topic", "score"], ["topic"]) == ["text", "topic"]
    assert used_columns(["video", "messages"], []) == ["video", "messages"]
    assert used_columns(["image"], []) == []


def test_a_label_that_is_bytes_is_their_text_or_a_reject() -> None:
    assert read_row({"text": "x", "tongue": b"en"}, ("tongue",))[1] == Sample(
        text="x", labels={"tongue": "en"}
    )
    content = read_row({"text": "x", "tongue": b"\xff"}, ("tongue",))[1]
    assert isinstance(content, RowReject) and content.detail.startswith("labels: ")


def test_a_label_nested_too_deep_is_a_reject() -> None:
    content = read_row({"text": "x", "topic": nested(2000)}, ["topic"])[1]
    assert isinstance(content, RowReject) and content.detail.startswith("labels: nested too deep")


def test_a_reject_says_where_in_the_row_the_fault_is() -> None:
    content = read_row({"conversations": [{"from": "human"}]})[1]
    assert (
        isinstance(content, RowReject) and content.detail == "conversations: a turn of 'human' has no 'value'"
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "type", "text", "tool_calls", "x"]), inner
        )
    ),
    max_leaves=12,
)
KEYS = st.sampled_from(
    ["id", "messages", "conversations", "system", "tools", "token_ids", "loss_mask", "text", "prompt"]
)


@given(st.dictionaries(KEYS, JSON, max_size=4))
def test_no_row_raises(row: dict[str, Any]) -> None:
    content = read_row(row)[1]
    assert isinstance(content, Sample) or (content.reason in RejectReason and 0 < len(content.detail) <= 500)
