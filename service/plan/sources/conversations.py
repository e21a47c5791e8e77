"""A row of somebody's dataset -> one `Sample`, or a named reject. Pure.

Understood, in this order where a row has several: `messages` (OpenAI), `conversations` (ShareGPT),
`token_ids` or `input_ids` (with `loss_mask`), `text`, `prompt`. Other columns, and keys of a message that
mean nothing here, are ignored.
"""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from schemas.request import Message, Name, Sample
from service.plan.sources.rows import RejectReason, RowReject

COLUMNS = (
    "id",
    "messages",
    "conversations",
    "system",
    "tools",
    "token_ids",
    "input_ids",
    "loss_mask",
    "text",
    "prompt",
)
"""Every column that is looked at; readers of columnar files read no other."""

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
FUNCTION_CALL = "function_call"
NAME: TypeAdapter[str | None] = TypeAdapter(Name | None)
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


class _BadRow(Exception):
    """Carries a reject out of the nested reading."""

    def __init__(self, reason: RejectReason, detail: str) -> None:
        super().__init__(detail)
        self.reject = RowReject(reason, detail)


def sample_of(row: object) -> Sample | RowReject:
    """Return the sample that `row` holds. Never raises for anything that a row can hold."""
    if not isinstance(row, Mapping):
        return RowReject(RejectReason.NOT_AN_OBJECT, f"a row is an object; this one is {_kind(row)}")
    try:
        return Sample.model_validate(_fields(row))
    except _BadRow as bad:
        return bad.reject
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "row"
        return RowReject(RejectReason.INVALID_SAMPLE, f"{where}: {first['msg']}")


def row_id(row: object) -> str | None:
    """Return the id that the user gave, even to a row that is a reject; none where it cannot stand as one."""
    if not isinstance(row, Mapping):
        return None
    try:
        return NAME.validate_python(_identifier(row.get("id")))
    except (_BadRow, ValidationError):
        return None


def _fields(row: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {"id": _identifier(row.get("id"))}
    if row.get("messages") is not None:
        fields["messages"] = [_openai_message(turn) for turn in _turns(row, "messages")]
    elif row.get("conversations") is not None:
        fields["messages"] = _sharegpt_messages(row)
    elif (ids := _first(row, "token_ids", "input_ids")) is not None:
        return fields | {"token_ids": ids, "loss_mask": row.get("loss_mask")}
    elif (text := _first(row, "text", "prompt")) is not None:
        return fields | {"text": _text(text)}
    else:
        raise _BadRow(
            RejectReason.NO_SAMPLE,
            "a row needs one of 'messages', 'conversations', 'token_ids', 'input_ids', 'text' or 'prompt'; "
            f"this one has {sorted(str(key) for key in row)}",
        )
    return fields | {"tools": _tools(row.get("tools"))}


def _first(row: Mapping[str, Any], *names: str) -> object:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _identifier(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value or None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise _BadRow(RejectReason.INVALID_SAMPLE, f"id: a string or a number; this one is {_kind(value)}")


def _turns(row: Mapping[str, Any], column: str) -> list[Mapping[str, Any]]:
    turns = row[column]
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise _BadRow(RejectReason.INVALID_SAMPLE, f"{column}: a list of objects is needed")
    return turns


def _openai_message(turn: Mapping[str, Any]) -> dict[str, Any]:
    role = turn.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _BadRow(
            RejectReason.UNKNOWN_ROLE, f"messages: role {role!r} is none of {', '.join(sorted(ROLES))}"
        )
    # Columnar files fill absent keys with null, and an empty list of calls is no call.
    kept = {key: turn[key] for key in Message.model_fields if turn.get(key) is not None and turn[key] != []}
    if "content" in kept:
        kept["content"] = _text(kept["content"])
    return kept


def _sharegpt_messages(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = [_sharegpt_message(turn) for turn in _turns(row, "conversations")]
    if row.get("system") and not (messages and messages[0]["role"] == "system"):
        messages.insert(0, {"role": "system", "content": _text(row["system"])})
    return messages


def _sharegpt_message(turn: Mapping[str, Any]) -> dict[str, Any]:
    if turn.get("from") is None and turn.get("role") is not None:
        return _openai_message(turn)
    speaker, value = turn.get("from"), turn.get("value")
    if speaker == FUNCTION_CALL:
        return {"role": "assistant", "tool_calls": _function_calls(value)}
    role = SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        known = ", ".join([*SHAREGPT_ROLES, FUNCTION_CALL])
        raise _BadRow(RejectReason.UNKNOWN_ROLE, f"conversations: speaker {speaker!r} is none of {known}")
    if value is None:
        raise _BadRow(RejectReason.NOT_TEXT, f"conversations: a turn of {speaker!r} has no 'value'")
    return {"role": role, "content": _text(value)}


def _function_calls(value: object) -> list[dict[str, Any]]:
    """Read ShareGPT's calls: JSON text of `{"name", "arguments"}`, or of a list of them."""
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise _BadRow(
            RejectReason.BAD_TOOL_CALL, f"conversations: a function call is not JSON: {error}"
        ) from error
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(
        isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls
    ):
        raise _BadRow(
            RejectReason.BAD_TOOL_CALL, "conversations: a function call needs 'name' and 'arguments'"
        )
    return [
        {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments") or {}}}
        for call in calls
    ]


def _tools(value: object) -> object:
    """Return the tool schemas; datasets often hold them as JSON text, since their shapes differ by row."""
    if not value:
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _BadRow(RejectReason.INVALID_SAMPLE, f"tools: not JSON: {error}") from error
    return value or None


def _text(content: object) -> str:
    """Return a text, or the joined text parts of a multimodal content list."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _BadRow(
            RejectReason.NOT_TEXT, f"content is text or a list of text parts; this one is {_kind(content)}"
        )
    parts = []
    for part in content:
        if (
            not isinstance(part, Mapping)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            kind = part.get("type") if isinstance(part, Mapping) else _kind(part)
            raise _BadRow(
                RejectReason.NOT_TEXT, f"a content part of type {kind!r} cannot be captured: only text can"
            )
        parts.append(part["text"])
    return "".join(parts)
