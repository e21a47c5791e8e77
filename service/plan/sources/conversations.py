"""Converts a row of a dataset into one `Sample` or a named reject. Pure functions.

If a row has several, the first of these columns is used: `messages` (OpenAI), `conversations` (ShareGPT),
`token_ids` or `input_ids` (with `loss_mask`), `text`, `prompt`. Other columns, and unknown keys of a message,
are ignored, except those that say what is supervised or what was answered, and images and the like beside a
conversation: such a row is rejected.
"""

import json
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from schemas.base import first_fault
from schemas.source import Message, Name, Sample
from service.plan.sources.rows import RejectedError, RejectReason, RowReject

CONVERSATIONS = frozenset({"messages", "conversations"})
MEDIA = frozenset({"image", "images", "video", "videos", "audio", "audios"})
"""Keys of a row or message with what is not text, beside a conversation."""
COLUMNS = (
    *("id", "messages", "conversations", "system", "tools"),
    *("token_ids", "input_ids", "loss_mask", "attention_mask", "labels", "assistant_masks"),
    *("text", "prompt", "completion", "response"),
)
"""Every column that is used; columnar files are read only for these and the labels."""

ANSWERS = ("completion", "response")
"""Columns with the answer to a `prompt`."""
WEIGHTS = ("weight", "loss", "train", "train_detail")
"""Keys of an answer that say whether it is supervised, in the formats of OpenAI, ms-swift and axolotl."""
FUNCTION_CALL = "function_call"
"""The speaker of an assistant's tool call."""
ROLES = {role: role for role in ("assistant", "developer", "system", "tool", "user")}
SPEAKERS = ROLES | {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
    FUNCTION_CALL: "assistant",
}
"""ShareGPT's names for the roles."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names that servers and templates give to an answer's reasoning."""
NAME: TypeAdapter[str | None] = TypeAdapter(Name | None)

UTF_16 = BOM_UTF16_LE, BOM_UTF16_BE
"""How a file in UTF-16 begins, of which a line is no text by itself."""

Read = tuple[str | None, Sample | RowReject]
"""A row's own id, if it is usable, and its content."""


def read_line(line: bytes, labels: Sequence[str]) -> Read:
    """Return what `read_row` returns of a line of JSON."""
    try:
        row = json.loads(line, object_pairs_hook=json_object)
    except RejectedError as error:
        return None, error.reject
    except (ValueError, RecursionError) as error:
        return None, RowReject(RejectReason.NOT_JSON, f"{type(error).__name__}: {error}")
    return read_row(row, labels)


def json_object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Raises RejectedError for a key that it has twice: either may be meant."""
    value = dict(pairs)
    if len(value) < len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise RejectedError(RejectReason.INVALID_SAMPLE, f"an object has several {twice!r}")
    return value


def read_row(row: object, labels: Sequence[str] = ()) -> Read:
    """Return the row's own id, if it is usable, and the sample with these labels.

    Never raises, whatever the row contains.
    """
    if not isinstance(row, Mapping):
        detail = f"a row is an object; this one is {_kind(row)}"
        return None, RowReject(RejectReason.NOT_AN_OBJECT, detail)
    own_id = None
    try:
        own_id = _identifier(row.get("id"))
        return own_id, Sample.model_validate({"id": own_id, "labels": _labels(row, labels)} | _fields(row))
    except RejectedError as error:
        return own_id, error.reject
    except ValidationError as error:
        return own_id, RowReject(RejectReason.INVALID_SAMPLE, first_fault(error))


def _fields(row: Mapping[str, Any]) -> dict[str, Any]:
    if row.get("loss_mask") and _first(row, "token_ids", "input_ids") is None:
        raise RejectedError(RejectReason.INVALID_SAMPLE, "'loss_mask' goes with 'token_ids' or 'input_ids'")
    if row.get("messages") is not None:
        messages = [_openai_message(turn, "messages") for turn in _turns(row, "messages")]
    elif row.get("conversations") is not None:
        messages = [_sharegpt_message(turn) for turn in _turns(row, "conversations")]
    elif (ids := _first(row, "token_ids", "input_ids")) is not None:
        masks = isinstance(row.get("labels"), list) or row.get("assistant_masks") is not None
        if masks and row.get("loss_mask") is None:
            detail = "'labels' and 'assistant_masks' are not read: give 'loss_mask', a 0 or 1 for each token"
            raise RejectedError(RejectReason.INVALID_SAMPLE, detail)
        if isinstance(attended := row.get("attention_mask"), list) and 0 in attended:
            detail = "attention_mask: has zeros: leave the padding out of the token ids"
            raise RejectedError(RejectReason.INVALID_SAMPLE, detail)
        return {"token_ids": ids, "loss_mask": row.get("loss_mask")}
    elif (text := _first(row, "text", "prompt")) is not None:
        answers = [name for name in ANSWERS if row.get(name) is not None]
        if row.get("text") is None and answers:
            detail = f"{answers[0]!r} is not read: give 'messages', of which the last is the assistant's"
            raise RejectedError(RejectReason.INVALID_SAMPLE, detail)
        return {"text": _text(text)}
    else:
        needed = "'messages', 'conversations', 'token_ids', 'input_ids', 'text' or 'prompt'"
        columns = sorted(str(key) for key in row)
        raise RejectedError(RejectReason.NO_SAMPLE, f"a row needs one of {needed}; this one has {columns}")
    _refuse_media(row, "row")
    if row.get("system") and messages and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": _text(row["system"])})
    return {"messages": messages, "tools": _tools(row.get("tools"))}


def _labels(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, str | None] | None:
    """Return those label columns that the row has, or else its `labels` have, as text."""
    given = row.get("labels")
    inner = given if isinstance(given, Mapping) else {}
    there = (name for name in names if name in row or name in inner)
    return {name: _label(row.get(name, inner.get(name))) for name in there} or None


def _label(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    holds_json = isinstance(value, bool | int | float | list | dict)
    try:
        if isinstance(value, bytes):  # as some write text to Parquet
            return value.decode()
        return json.dumps(value, default=str) if holds_json else str(value)
    except RecursionError as error:
        raise RejectedError(RejectReason.INVALID_SAMPLE, f"labels: nested too deep: {error}") from error
    except (TypeError, UnicodeDecodeError) as error:  # a map whose keys are dates, or other bytes
        raise RejectedError(RejectReason.INVALID_SAMPLE, f"labels: {error}") from error


def _first(row: Mapping[str, Any], *names: str) -> object:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _identifier(value: object) -> str | None:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    try:
        return NAME.validate_python(None if value == "" else value)
    except ValidationError as error:
        raise RejectedError(RejectReason.INVALID_SAMPLE, f"id: {first_fault(error)}") from error


def _turns(row: Mapping[str, Any], column: str) -> list[Mapping[str, Any]]:
    turns = row[column]
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise RejectedError(RejectReason.INVALID_SAMPLE, f"{column}: a list of objects is needed")
    return turns


def _role(name: object, roles: Mapping[str, str], where: str) -> str:
    role = roles.get(name) if isinstance(name, str) else None
    if role is None:
        raise RejectedError(RejectReason.UNKNOWN_ROLE, f"{where} {name!r} is none of {', '.join(roles)}")
    return role


def _openai_message(turn: Mapping[str, Any], column: str) -> dict[str, Any]:
    role = _role(turn.get("role"), ROLES, f"{column}: role")
    # Columnar files fill missing keys with null, and an empty list of calls means no call.
    kept = {key: turn[key] for key in Message.model_fields if turn.get(key) is not None and turn[key] != []}
    if turn.get(FUNCTION_CALL) is not None:
        raise RejectedError(RejectReason.BAD_TOOL_CALL, f"{column}: give 'tool_calls' for 'function_call'")
    unread = [name for name in WEIGHTS if turn.get(name) not in (None, 1, [])]
    if role == "assistant" and unread:
        detail = f"{column}: {unread[0]!r} is read only as 1: leave the turn out, or give 'token_ids' and"
        raise RejectedError(RejectReason.INVALID_SAMPLE, f"{detail} a 'loss_mask'")
    _refuse_media(turn, column)
    if thoughts := [turn[name] for name in THOUGHTS if turn.get(name) is not None]:
        kept[THOUGHTS[0]] = next(filter(None, thoughts), thoughts[0])
    if "content" in kept:
        kept["content"] = _text(kept["content"])
    return kept


def used_columns(names: Sequence[str], labels: Sequence[str]) -> list[str]:
    """Return those of a table's columns that are read: images only beside conversations, for their size."""
    used = {*COLUMNS, *labels} | (MEDIA if CONVERSATIONS.intersection(names) else frozenset())
    return [name for name in names if name in used]


def _refuse_media(held: Mapping[str, Any], where: str) -> None:
    """Raise RejectedError for a row or message with an image: its text would be captured without it."""
    if there := [name for name in held if name in MEDIA and held[name]]:
        detail = f"{where}: {there[0]!r} cannot be captured: only text can"
        raise RejectedError(RejectReason.NOT_TEXT, detail)


def _sharegpt_message(turn: Mapping[str, Any]) -> dict[str, Any]:
    speaker, value = turn.get("from"), turn.get("value")
    if speaker is None and turn.get("role") is not None:
        return _openai_message(turn, "conversations")
    said = {**turn, "role": _role(speaker, SPEAKERS, "conversations: speaker"), "content": value}
    if speaker == FUNCTION_CALL:
        said |= {"content": None, "tool_calls": _function_calls(value)}
    elif value is None:
        detail = f"conversations: a turn of {speaker!r} has no 'value'"
        raise RejectedError(RejectReason.NOT_TEXT, detail)
    return _openai_message(said, "conversations")


def _function_calls(value: object) -> list[dict[str, Any]]:
    """Read ShareGPT's calls: JSON text of `{"name", "arguments"}`, or a list of them."""
    calls = _parsed(value, RejectReason.BAD_TOOL_CALL, "conversations: a function call is not JSON")
    calls = calls if isinstance(calls, list) else [calls]
    named = [isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls]
    if not calls or not all(named):
        detail = "conversations: a function call needs 'name' and 'arguments'"
        raise RejectedError(RejectReason.BAD_TOOL_CALL, detail)
    functions = [{"name": call["name"], "arguments": call.get("arguments") or {}} for call in calls]
    return [{"type": "function", "function": function} for function in functions]


def _tools(value: object) -> object:
    """Return the tool schemas; datasets often store them as JSON text, since their shapes differ by row."""
    return _parsed(value, RejectReason.INVALID_SAMPLE, "tools: not JSON") or None if value else None


def _parsed(value: object, reason: RejectReason, fault: str) -> Any:  # noqa: ANN401 - it is JSON
    """Return the value of a JSON text; other values are returned unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value, object_pairs_hook=json_object)
    except (ValueError, RecursionError) as error:
        raise RejectedError(reason, f"{fault}: {error}") from error


def _text(content: object) -> str:
    """Return a string content, or the joined text parts of a multimodal content list."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        detail = f"content is text or a list of text parts; this one is {_kind(content)}"
        raise RejectedError(RejectReason.NOT_TEXT, detail)
    return "".join(_text_part(part) for part in content)


def _text_part(part: object) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
    kind = part.get("type") if isinstance(part, Mapping) else _kind(part)
    detail = f"a content part of type {kind!r} cannot be captured: only text can"
    raise RejectedError(RejectReason.NOT_TEXT, detail)
