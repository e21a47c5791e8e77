"""How a conversation is planned whose assistant's turns are the target's: in segments, or a row a turn."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.dataset.shard import LightRow
from schemas.source import Sample
from service.errors import OptionRefused
from service.plan.samples import SampleTokenizer
from service.plan.sources import RejectReason, RowReject
from service.plan.unit_plan import as_written, packed, unpacked
from service.plan.units import RowOutcome, Tokenized, UnitBounds, plan_units
from tests.support import templates
from tests.support.tokenized import a_tokenizer, chat, encoded

THREE = ("user: What is it?", "assistant: It is one.", "user: And now?", "assistant: Now two.", "user: Last?")
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLED = ("user: One and one?", {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "2"})
ALL = {"turns": "all", "max_tokens": 16}
NO_MARK = templates.CHATML.replace("<|im_end|>", "")
COUNTED = "{{ messages | length }}" + templates.CHATML
"""Begins otherwise in each turn."""


def planned(tokenizer: SampleTokenizer, sample: Sample) -> list[Tokenized]:
    rows = tokenizer.rows(sample, "a")
    assert all(isinstance(row, Tokenized) and row.dialogue for row in rows), rows
    return list(rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["CHATML", "QWEN3", "GENERATION", "TRAILER", "STRICT_ROLES", "DATED"])
def test_segments_are_what_the_whole_rendering_has_between_answers(tmp_path: Path, name: str) -> None:
    template = getattr(templates, name)
    tokenizer = a_tokenizer(tmp_path, template, generate=ALL)
    (row,) = planned(tokenizer, chat(*THREE))
    answers = [" one\n", "</think> two"]
    said = (
        "user: What is it?",
        f"assistant: {answers[0]}",
        "user: And now?",
        f"assistant: {answers[1]}",
        "user: Last?",
    )
    whole = a_tokenizer(tmp_path / "other", template, generate={"max_tokens": 16})
    expected = encoded(whole, chat(*said))
    parts = [row.ids, *row.dialogue.segments]
    between = [whole.texts.ids(answer) for answer in answers]
    joined = [parts[0], between[0], parts[1], between[1], parts[2]]
    assert np.concatenate(joined).tolist() == expected.ids.tolist()
    assert row.dialogue.turn == 0 and not row.mask.any()
    assert row.dialogue.most_tokens == sum(map(len, parts)) + 3 * 16


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (templates.LLAMA3, "does not write every answer"),
        (templates.MISTRAL, "does not begin with the turns before"),
        (templates.QWEN3_THINKING, "does not begin with the turns before"),
        (templates.HARMONY, "does not begin with the turns before"),
        (templates.NEEDS_REASONING, "does not begin with the turns before"),
        (NO_MARK, "no added token follows"),
        (
            templates.CHATML.replace("message.content", "message.content | replace('</think>', '')"),
            "does not write every answer",
        ),
        (
            templates.CHATML.replace("message.content", "(message.content or 'nothing')"),
            "does not write every answer",
        ),
        (
            templates.CHATML.replace("message.content", "message.content.lstrip('\\n')"),
            "does not write every answer",
        ),
    ],
    ids=[
        "trims",
        "adds a space",
        "opens reasoning",
        "harmony",
        "needs reasoning",
        "no mark",
        "drops",
        "fills",
        "takes line breaks off",
    ],
)
def test_where_answers_do_not_stay_as_they_are_each_turn_is_a_row(
    tmp_path: Path, template: str, why: str
) -> None:
    """Its planned tokens are those that its prompt begins with, whatever the answers are."""
    tokenizer = a_tokenizer(tmp_path, template, generate=ALL)
    rows = planned(tokenizer, chat(*THREE))
    assert [row.dialogue.turn for row in rows] == [1, 2, 3]
    assert {row.dialogue.segments for row in rows} == {()}
    assert all(why in row.dialogue.why for row in rows)
    blocks = [json.loads(row.dialogue.document)["blocks"] for row in rows]
    assert [[message["content"] for message in block[0]] for (block,) in blocks] == [
        ["What is it?"],
        ["And now?"],
        ["Last?"],
    ]
    for answers in (("x", "y"), ("<think>a</think> b", ""), ("", "\n z ")):
        for turn, row in enumerate(rows, 1):
            said = [THREE[0]]
            for place in range(1, turn):
                said += [f"assistant: {answers[place - 1]}", THREE[2 * place]]
            alone = a_tokenizer(tmp_path / "other", template, generate={"max_tokens": 16})
            whole = encoded(alone, chat(*said))
            assert whole.ids[: len(row.ids)].tolist() == row.ids.tolist()
    assert len({len(row.ids) for row in rows}) <= 2 and len(rows[0].ids) >= len(rows[1].ids) > 0


def test_conversations_with_results_of_tools_need_a_parser_and_have_a_row_a_turn(tmp_path: Path) -> None:
    tokenizer = a_tokenizer(tmp_path, templates.CALLING, generate=ALL)
    with pytest.raises(OptionRefused) as refusal:
        tokenizer.rows(chat(*CALLED), "a")
    assert refusal.value.field == "generate.tool_parser"
    tokenizer = a_tokenizer(tmp_path, templates.CALLING, generate=ALL | {"tool_parser": "hermes"})
    first, second = planned(tokenizer, chat(*CALLED))
    assert "parser" in first.dialogue.why
    (block,) = json.loads(second.dialogue.document)["blocks"]
    assert (block[0][0]["role"], block[1]) == ("tool", [["add", None]])


KNOWS_CALLS = "{%- set ns = namespace(called=false) %}" + templates.CALLING.replace(
    "{{- '<|im_start|>'",
    "{%- if message.role == 'tool' and not ns.called %}{{ raise_exception('no call before') }}{% endif %}"
    "{%- set ns.called = 'tool_calls' in message %}{{- '<|im_start|>'",
)


def test_a_template_that_wants_a_call_before_a_result_sees_one_when_it_is_planned(tmp_path: Path) -> None:
    """As gpt-oss's: answers are not known yet, and those that stand for them call what the source called."""
    tokenizer = a_tokenizer(tmp_path, KNOWS_CALLS, generate=ALL | {"tool_parser": "hermes"})
    assert [row.dialogue.turn for row in planned(tokenizer, chat(*CALLED))] == [1, 2]


@pytest.mark.parametrize(
    ("turns", "blocks"),
    [
        (("user: a",), [["a"]]),
        (("user: a", "assistant: b"), [["a"]]),
        (("system: s", "user: a", "assistant: b", "assistant: c", "user: d"), [["s", "a"], ["d"]]),
        (("user: a", "user: b", "assistant: c", "user: d", "user: e"), [["a", "b"], ["d", "e"]]),
    ],
)
def test_blocks_are_what_is_between_the_assistants_turns(tmp_path: Path, turns: Any, blocks: Any) -> None:
    (row,) = planned(a_tokenizer(tmp_path, generate=ALL), chat(*turns))
    found = json.loads(row.dialogue.document)["blocks"]
    assert [[message["content"] for message in block[0]] for block in found] == blocks
    assert len(row.dialogue.segments) == len(blocks) - 1


def test_what_cannot_be_asked_is_rejected_by_name(tmp_path: Path) -> None:
    tokenizer = a_tokenizer(tmp_path, generate=ALL, max_tokens=60)
    (first,) = tokenizer.rows(chat("assistant: I begin.", "user: no"), "a")
    (long,) = tokenizer.rows(chat("user: " + "long " * 100), "a")
    counting = a_tokenizer(tmp_path / "counting", COUNTED, generate=ALL)
    (other,) = counting.rows(chat(*THREE), "a")
    reasons = [row.reason for row in (first, long, other) if isinstance(row, RowReject)]
    assert reasons == [RejectReason.NO_PROMPT, RejectReason.TOO_LONG, RejectReason.TURN_BOUNDARIES]


def test_a_conversation_stays_in_one_unit_and_two_of_one_id_have_ids_of_their_own(tmp_path: Path) -> None:
    """Their first turns are equal; only what comes later differs."""
    tokenizer = a_tokenizer(tmp_path, templates.LLAMA3, generate=ALL)
    same = [chat(*THREE[:4], f"user: {last}") for last in ("this?", "that?", "this?")]
    outcomes = [
        RowOutcome(position, "a", row)
        for position, sample in enumerate(same)
        for row in tokenizer.rows(sample, "a")
    ]
    seen: set[bytes] = set()

    def is_new(digest: bytes) -> bool:
        return not (digest in seen or seen.add(digest))

    units = list(plan_units(outcomes, UnitBounds(1, 10**6, 1), is_new))
    assert [[(s.position, s.dialogue.turn) for s in unit.samples] for unit in units] == [
        [(0, 1), (0, 2), (0, 3)],
        [(1, 1), (1, 2), (1, 3)],
    ]
    rejected = [(reject.position, reject.turn) for unit in units for reject in unit.rejects]
    assert rejected == [(2, 1), (2, 2), (2, 3)]
    ids = {sample.sample_id for unit in units for sample in unit.samples}
    assert len(ids) == 6


def test_a_plan_keeps_how_its_prompts_go_on_and_then_the_rows_as_they_were_written(tmp_path: Path) -> None:
    """What was answered is asked no second time: the rows hold all tokens, and how many were prompt."""
    tokenizer = a_tokenizer(tmp_path, templates.CHATML, generate=ALL)
    (row,) = planned(tokenizer, chat(*THREE))
    unit = next(iter(plan_units([RowOutcome(0, "a", row)], UnitBounds(1, 10**6, 10), lambda _: True)))
    content = packed(unit.samples)
    plan = unpacked(content, hashlib.sha256(content).hexdigest())
    assert plan["segments"][0].as_py() == [ids.tolist() for ids in row.dialogue.segments]
    assert plan["document"][0].as_py() == row.dialogue.document
    ids = np.arange(30, dtype=np.int32)
    light = LightRow(unit.samples[0].sample_id, "a", 30, 12, 64, ids, (ids > 11).astype(np.uint8), ())
    again = as_written(plan, [light])
    written = unpacked(again, hashlib.sha256(again).hexdigest())
    assert written["input_ids"][0].as_py() == ids.tolist()
    assert (written["prompt_tokens"][0].as_py(), sum(written["loss_mask"][0].as_py())) == (12, 18)
