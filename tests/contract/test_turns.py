"""Conversations whose every assistant's turn is the target's: rows, masks, endings, and what is counted."""

from collections.abc import Callable
from typing import Any

import pyarrow.parquet as pq
import pytest

from schemas.job import JobState
from service.capture import unit_run
from tests.support import templates
from tests.support.talked import CONVERSATION, END, THREE, Talked
from tests.support.talking_engine import Said, TalkingEngine


@pytest.mark.parametrize("capture", ["one_pass", "second_prefill"])
def test_a_conversation_is_one_row_of_the_targets_answers(talked: Talked, capture: str) -> None:
    job = talked.run(THREE, capture=capture)
    ((source_id, text, supervised),) = talked.rows(job)
    last = "three" if capture == "one_pass" else f"three{END}"
    assert supervised == [f" one {END}", f"two</think>{END}", last]
    chatml = [("system", "Be short."), ("user", "first"), ("assistant", " one "), ("user", "second")]
    chatml += [("assistant", "two</think>"), ("user", "third")]
    asked = "".join(f"<|im_start|>{role}\n{said}{END}\n" for role, said in chatml)
    assert (source_id, text) == ("talk", f"{asked}<|im_start|>assistant\n{last}")
    assert talked.counts(job) == {"conversations in one row": 1}


@pytest.mark.parametrize("talked", [templates.LLAMA3.replace("<|eot_id|>", END)], indirect=True)
@pytest.mark.parametrize("capture", ["one_pass", "second_prefill"])
def test_where_a_template_changes_answers_each_turn_is_a_row_with_the_prompt_as_it_is_served(
    talked: Talked, capture: str
) -> None:
    """The template trims: so does the prompt of the next turn; the row of an answer has it as it came."""
    script = lambda prompt: (f" answer {prompt.count('user<')} ", "end")  # noqa: E731
    job = talked.run(script, capture=capture)
    rows = talked.rows(job)
    assert [source_id for source_id, _, _ in rows] == ["talk#turn-1", "talk#turn-2", "talk#turn-3"]
    end = "" if capture == "one_pass" else END
    assert [supervised for _, _, supervised in rows] == [[f" answer {n} {end}"] for n in (1, 2, 3)]
    assert "\n\nanswer 1<|im_end|>" in rows[1][1]
    assert talked.counts(job) == {"conversations in a row a turn": 1, "drift": 3}


@pytest.mark.parametrize("talked", [templates.CHATML.replace("<|im_end|>", "<|endoftext|>")], indirect=True)
def test_a_turn_that_the_template_ends_otherwise_than_the_target_has_the_templates_mark(
    talked: Talked,
) -> None:
    """The target's own mark is no part of the conversation as it is served, but for the last one."""
    job = talked.run(THREE, capture="second_prefill")
    ((_, text, supervised),) = talked.rows(job)
    assert supervised == [" one ", "two</think>", f"three{END}"]
    assert text.count("<|endoftext|>") == 6
    assert talked.counts(job) == {"conversations in one row": 1}


ENDINGS: dict[str, tuple[Said, dict[str, Any]]] = {
    "length": (("word " * 30, "end"), {}),
    "stop string": (("so STOP", "stop"), {"stop": ["STOP"]}),
    "repeats itself": (("so so so", "repeats"), {"repeats": {"pattern": 4, "times": 3}}),
    "empty": ((" ", "end"), {}),
}
FIELDS = {"stop string": "stop", "repeats itself": "repeats"}


@pytest.mark.parametrize("how", ENDINGS)
@pytest.mark.parametrize("ending", ["keep", "cut", "reject"])
@pytest.mark.parametrize(
    "talked", [templates.CHATML, templates.LLAMA3.replace("<|eot_id|>", END)], indirect=True
)
def test_what_becomes_of_an_answer_that_ends_otherwise_is_a_choice_and_counted(
    talked: Talked, how: str, ending: str
) -> None:
    """The second of three answers: kept, the end of the conversation before it, or none of it is stored."""
    said, options = ENDINGS[how]
    is_whole = talked.tokenizer.chat_template == templates.CHATML and how != "stop string"
    script = lambda prompt: said if "second" in prompt and "third" not in prompt else ("good", "end")  # noqa: E731
    endings = {FIELDS.get(how, how): ending}
    job = talked.run(script, CONVERSATION, {"id": "other", "text": "first"}, endings=endings, **options)
    answers = [answer for source_id, _, runs in talked.rows(job) if source_id != "other" for answer in runs]
    kept = {"keep": 3, "cut": 1, "reject": 0}[ending]
    assert len(answers) == kept
    assert talked.counts(job)[how] == 1
    if ending == "keep":
        assert talked.rejects(job) == []
    elif ending == "cut":
        left = [] if is_whole else [(f"talk#turn-{turn}", turn, "conversation-ended") for turn in (2, 3)]
        assert talked.rejects(job) == left
    else:
        every = [("talk", 0)] if is_whole else [(f"talk#turn-{turn}", turn) for turn in (1, 2, 3)]
        assert talked.rejects(job) == [(*one, "answer-rejected") for one in every]


@pytest.mark.parametrize("capture", ["one_pass", "second_prefill"])
def test_a_row_that_a_prefill_captures_is_no_answer_of_one_pass_for_the_second_run(
    talked: Talked, monkeypatch: pytest.MonkeyPatch, capture: str
) -> None:
    """As a conversation whose context is full: the rows that one pass captures would not be tested."""
    answers: list[dict[int, int]] = []

    async def noted(*arguments: Any) -> None:
        answers.append(arguments[-2])

    monkeypatch.setattr(unit_run, "run_again", noted)
    samples = CONVERSATION, {"id": "other", "text": "first"}
    job = talked.run(lambda prompt: ("good", "end"), *samples, capture=capture, changes={"max_tokens": 75})
    assert job.progress.samples_written == 2
    (places,) = answers
    of_other = [row["prompt_tokens"] for row in talked.shop.rows(job.id) if row["source_id"] == "other"]
    assert list(places.values()) == of_other if capture == "one_pass" else len(places) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "talked", [templates.CHATML, templates.LLAMA3.replace("<|eot_id|>", END)], indirect=True
)
@pytest.mark.parametrize("room", range(70, 130, 7))
def test_a_context_that_is_full_ends_a_conversation_at_the_last_whole_turn(talked: Talked, room: int) -> None:
    """However much room there is, no row is longer, and none ends in half an answer."""
    job = talked.run(
        lambda prompt: ("an answer of a few words", "end"),
        changes={"max_tokens": room},
        capture="second_prefill",
    )
    assert job.progress.samples_written + job.progress.samples_rejected == job.progress.samples_planned
    for row, (_, text, runs) in zip(talked.shop.rows(job.id), talked.rows(job), strict=True):
        assert row["num_tokens"] <= room
        assert set(runs) == {f"an answer of a few words{END}"} and text.endswith(runs[-1])
    counts = talked.counts(job) if job.progress.units_done else {}
    answers = sum(len(runs) for _, _, runs in talked.rows(job))
    assert not job.progress.units_done or (answers == 3) != bool(counts.get("context full"))


@pytest.mark.slow
def test_each_sample_is_answered_by_the_entry_that_its_id_draws(talked: Talked) -> None:
    """By their weights, the same whenever it runs; the index names it."""
    mix = [{"name": "short", "weight": 1, "max_tokens": 2}, {"name": "long", "weight": 3, "max_tokens": 9}]
    samples = [{"id": f"s{n}", "text": f"question {n}"} for n in range(60)]
    asked = {"turns": "last", "mix": mix, "capture": "second_prefill"}
    job = talked.run(lambda _: ("word " * 30, "end"), *samples, **asked)
    lengths = {row["source_id"]: row["num_tokens"] - row["prompt_tokens"] for row in talked.shop.rows(job.id)}
    assert set(lengths.values()) == {2, 9}
    assert 5 <= list(lengths.values()).count(2) <= 25
    paths = (talked.shop.settings.dataset_dir(job.id) / "index" / job.id).glob("*.parquet")
    index = [row for path in paths for row in pq.read_table(path).to_pylist()]
    assert {row["label_mix"]: lengths[row["source_id"]] for row in index} == {"short": 2, "long": 9}


@pytest.mark.parametrize("drift", ["keep", "rerender", "reject"])
@pytest.mark.parametrize("turns", ["all", "last"])
def test_a_row_whose_text_becomes_other_tokens_is_kept_rendered_again_or_rejected(
    talked: Talked, drift: str, turns: str
) -> None:
    """The target says a word in two tokens that the tokenizer has as one."""
    whole = talked.tokenizer.encode("the", add_special_tokens=False)
    parts = [talked.tokenizer.encode(part, add_special_tokens=False) for part in ("t", "he")]
    assert len(whole) < sum(map(len, parts))
    TalkingEngine.said_ids = [token for part in parts for token in part]
    job = talked.run(lambda _: ("", "end"), turns=turns, drift=drift, capture="second_prefill")
    rows = talked.rows(job)
    if drift == "reject":
        assert rows == [] and talked.rejects(job) == [("talk", 0, "drift")]
        return
    is_looked_for = turns == "all" or drift != "keep"
    assert talked.counts(job).get("drift", 0) == is_looked_for
    ((_, text, runs),) = rows
    assert set(runs) == {f"the{END}"}
    (row,) = talked.shop.rows(job.id)
    as_rendered = talked.tokenizer.encode(text, add_special_tokens=False) == row["input_ids"]
    assert as_rendered is (drift == "rerender")


@pytest.mark.parametrize("talked", [templates.CHATML.replace("'<|im_", "'<|endoftext|><|im_")], indirect=True)
def test_special_tokens_that_the_template_writes_as_the_target_does_are_no_drift(talked: Talked) -> None:
    """As Command A's `<|END_RESPONSE|>`, which the text of an answer does not have."""
    sample = CONVERSATION | {"messages": CONVERSATION["messages"][:2]}
    job = talked.run(lambda _: ("one<|endoftext|>", "end"), sample, drift="reject")
    assert [runs for _, _, runs in talked.rows(job)] == [[f"one<|endoftext|>{END}"]]


TRAILER = "{% if not add_generation_prompt %}{% generation %}The end.{% endgeneration %}{% endif %}"


@pytest.mark.parametrize("talked", [templates.GENERATION + TRAILER], indirect=True)
def test_a_row_with_the_tokens_of_its_rendering_is_no_drift_though_its_answers_are_not_found(
    talked: Talked,
) -> None:
    job = talked.run(THREE, drift="reject")
    assert [runs for _, _, runs in talked.rows(job)] == [[f" one {END}", f"two</think>{END}", f"three{END}"]]
    assert talked.counts(job) == {"conversations in one row": 1}


CALLS = (
    templates.CHATML.replace(
        "message.content + '<|im_end|>\\n' }}",
        "(message.content or '') }}{%- for call in message.tool_calls or [] %}"
        "{{ '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}"
        "{% endfor %}{{ '<|im_end|>\\n' }}",
    )
    + "{# {{ tools }} #}"
)
"""Calls as Hermes and Qwen write them."""
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("add", "look")
]
WITH_TOOLS = {
    "id": "talk",
    "tools": TOOLS,
    "messages": [
        {"role": "user", "content": "one and one?"},
        {
            "role": "assistant",
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "sure?"},
    ],
}


def call(name: str, arguments: str = '{"a": 1}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


FIRST = {
    "same": call("add", '{"a": 7}'),
    "another": call("look"),
    "none": "it is two",
    "unknown": call("fly"),
    "broken": call("add", "[1]"),
}
"""What the target answers first, by the conversation's id, which its question has."""


def asked(name: str) -> dict[str, Any]:
    """Return the conversation with tools whose question names it."""
    (question, *rest) = WITH_TOOLS["messages"]
    return WITH_TOOLS | {"id": name, "messages": [question | {"content": f"{name}: one and one?"}, *rest]}


def by_question(prompt: str) -> Said:
    """Return the next answer: the conversation's own first one, then those to the source's results."""
    (first,) = (said for name, said in FIRST.items() if f"{name}: one and one?" in prompt)
    return by_results((first, "end"), ("Two, I say.", "end"), ("Sure.", "end"))(prompt)


@pytest.mark.slow
@pytest.mark.parametrize("talked", [CALLS], indirect=True)
def test_a_call_is_followed_by_the_sources_result_if_it_is_of_the_same_tool(talked: Talked) -> None:
    """vLLM's own parser reads it. Whatever the arguments are, the result is the source's."""
    job = talked.run(by_question, *map(asked, FIRST), tool_parser="hermes", max_tokens=80)
    assert job.state is JobState.COMPLETED, job.problem
    ended, broken = "conversation-ended", "broken-tool-call"
    assert set(talked.rejects(job)) == {
        *((f"{name}#turn-{turn}", turn, ended) for name in ("another", "none") for turn in (2, 3)),
        *((f"{name}#turn-{turn}", turn, broken) for name in ("unknown", "broken") for turn in (1, 2, 3)),
    }
    rows = {source_id: (text, runs) for source_id, text, runs in talked.rows(job)}
    assert set(rows) == {"same#turn-1", "same#turn-2", "same#turn-3", "another#turn-1", "none#turn-1"}
    first = FIRST["same"]
    said = [f"{first}{END}", f"Two, I say.{END}", f"Sure.{END}"]
    assert [rows[f"same#turn-{turn}"][1] for turn in (1, 2, 3)] == [[text] for text in said]
    assert f"{first}{END}\n<|im_start|>tool\n2{END}" in rows["same#turn-2"][0]
    counts = talked.counts(job)
    assert (counts["another tool"], counts["broken tool call"]) == (2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("talked", [CALLS], indirect=True)
def test_a_call_of_another_tool_than_the_sources_is_rejected_if_so_asked(talked: Talked) -> None:
    choice = {"tool_parser": "hermes", "max_tokens": 80, "endings": {"other_tool": "reject"}}
    job = talked.run(by_question, asked("same"), asked("another"), **choice)
    assert job.state is JobState.COMPLETED, job.problem
    assert {(turn, reason) for _, turn, reason in talked.rejects(job)} == {
        (turn, "answer-rejected") for turn in (1, 2, 3)
    }
    assert {source_id.split("#")[0] for source_id, _, _ in talked.rows(job)} == {"same"}
    assert talked.counts(job)["another tool"] == 1


def by_results(*answers: Said) -> Callable[[str], Said]:
    return lambda prompt: answers[max(prompt.count("<|im_start|>assistant"), 1) - 1]


WITH_IDS = CALLS.replace("call.function | tojson", "call.id ~ call.function | tojson")


@pytest.mark.slow
@pytest.mark.parametrize("talked", [WITH_IDS], indirect=True)
def test_a_call_that_the_sources_result_follows_has_the_id_of_the_sources_call(talked: Talked) -> None:
    """The result names the call that it is of: an id of the engine's own would be another one."""
    asked, (call_of_source, *rest) = WITH_TOOLS["messages"][0], WITH_TOOLS["messages"][1:]
    called = {"role": "assistant", "tool_calls": [{"id": "c7", **call_of_source["tool_calls"][0]}]}
    sample = WITH_TOOLS | {"messages": [asked, called, *rest]}
    script = by_results((call("add"), "end"), ("Two.", "end"), ("Sure.", "end"))
    job = talked.run(script, sample, tool_parser="hermes", max_tokens=80)
    assert job.state is JobState.COMPLETED, job.problem
    assert '<tool_call>\nc7{"name": "add"' in talked.rows(job)[1][1]


@pytest.mark.slow
@pytest.mark.parametrize("talked", [CALLS], indirect=True)
def test_a_mark_with_which_a_call_itself_ends_is_kept_when_the_row_is_rendered_again(
    talked: Talked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `</tool_call>` in the tokenizer of GLM, whose template ends no turn: its next message does."""
    monkeypatch.setattr(TalkingEngine, "end_token", "<|endoftext|>")
    parts = [talked.tokenizer.encode(part, add_special_tokens=False) for part in ("t", "he")]
    TalkingEngine.said_ids = [token for part in parts for token in part]
    said, asked = call("add") + END, WITH_TOOLS | {"messages": WITH_TOOLS["messages"][:1]}
    job = talked.run(lambda _: (said, "end"), asked, tool_parser="hermes", max_tokens=80, drift="rerender")
    assert [runs for _, _, runs in talked.rows(job)] == [[f"the{said}"]]
    assert talked.counts(job)["drift"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("talked", [CALLS], indirect=True)
def test_tools_in_another_form_than_the_parsers_are_rejected_by_name(talked: Talked) -> None:
    sample = WITH_TOOLS | {"tools": [tool["function"] for tool in TOOLS]}
    other = {"id": "other", "text": "keeps the job from having no row"}
    job = talked.run(lambda _: ("Two.", "end"), sample, other, tool_parser="hermes")
    assert job.state is JobState.COMPLETED, job.problem
    assert {(reject.source_id, reject.reason) for reject in talked.every_reject(job)} >= {
        ("talk#turn-1", "invalid-sample")
    }
    assert "tools" in talked.every_reject(job)[0].detail


@pytest.mark.slow
def test_a_parser_that_vllm_does_not_have_fails_the_job_by_name(talked: Talked) -> None:
    job = talked.run(THREE, tool_parser="nonsense")
    assert job.state is JobState.FAILED
    assert job.problem is not None
    assert (job.problem.field, "nonsense" in job.problem.detail) == ("generate.tool_parser", True)


@pytest.mark.parametrize("talked", [templates.LLAMA3.replace("<|eot_id|>", END)], indirect=True)
def test_an_answer_whose_text_leaves_special_tokens_out_is_not_put_into_the_next_prompt(
    talked: Talked,
) -> None:
    """A server would read its channels and give them to the template apart: only a parser can do that."""
    job = talked.run(lambda _: ("<|endoftext|>analysis", "end"), capture="second_prefill")
    assert [source_id for source_id, _, _ in talked.rows(job)] == ["talk#turn-1"]
    assert talked.rejects(job) == [("talk#turn-2", 2, "drift"), ("talk#turn-3", 3, "drift")]
