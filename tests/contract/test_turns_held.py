"""Conversations against templates, answers and sources that mean ill: nothing is off without being said."""

from typing import Any

import pytest

from schemas.job import JobState
from service.capture.answering import Planned, Row
from service.capture.engine import PromptRefused
from service.plan.child.process import Child
from service.store import units
from tests.support import templates
from tests.support.talked import CONVERSATION, END, THREE, Talked, by_turn
from tests.support.talking_engine import Said, TalkingEngine

REASONED = by_turn(("<think>hm</think>one", "end"), ("<think>hm</think>two", "end"), ("three", "end"))
WRITTEN = "message.content"


def chatml(content: str) -> str:
    return templates.CHATML.replace(WRITTEN, f"({content})")


FORGETS = chatml("message.content.split('</think>')[-1] if loop.length in (4, 5) else message.content")
"""Only while two or three turns are there: the whole conversation has them as they were."""
WORD_BY_WORD = chatml("message.content | replace('three', '3')")
HINTS = templates.CHATML.replace(
    "{%- if add_generation_prompt %}",
    "{%- if add_generation_prompt and messages | length > 2 and 'error' in messages[-2].content %}"
    "{{ '<|im_start|>system\\ncareful<|im_end|>\\n' }}{% endif %}{%- if add_generation_prompt %}",
)


@pytest.mark.parametrize(
    ("talked", "script", "answers"),
    [
        (WORD_BY_WORD, by_turn(("one", "end"), ("three", "end"), ("x", "end")), 2),
        (HINTS, by_turn(("one", "end"), ("an error", "end"), ("x", "end")), 2),
        (chatml("message.content[:3000]"), by_turn(("a", "end"), ("b", "end"), ("c", "end")), 3),
    ],
    ids=["a word", "a line for its sake", "a length that is planned for"],
    indirect=["talked"],
)
def test_a_template_that_changes_an_answer_that_no_probe_has_ends_the_conversation_there(
    talked: Talked, script: Any, answers: int
) -> None:
    job = talked.run(script)
    rows = talked.rows(job)
    assert sum(len(runs) for _, _, runs in rows) == answers
    assert talked.counts(job).get("changed by the template", 0) == (len(rows) == 1)


@pytest.mark.parametrize("talked", [FORGETS], indirect=True)
def test_a_template_that_changes_answers_of_short_conversations_alone_has_a_row_a_turn(
    talked: Talked,
) -> None:
    job = talked.run(REASONED)
    assert talked.counts(job)["conversations in a row a turn"] == 1
    assert "</think>" not in talked.rows(job)[1][1].split("second")[0]


@pytest.mark.parametrize("talked", [templates.HARMONY], indirect=True)
@pytest.mark.parametrize("drift", ["keep", "reject"])
def test_a_template_whose_turns_cannot_be_found_again_fails_no_job(talked: Talked, drift: str) -> None:
    """It ends the last turn with another mark: what was said is kept, and said to be other than its text."""
    job = talked.run(THREE, CONVERSATION, {"id": "other", "text": "first"}, drift=drift)
    assert job.state is JobState.COMPLETED, job.problem
    assert talked.counts(job)["drift"] == 3
    reasons = [reason for _, _, reason in talked.rejects(job)]
    assert reasons == ([] if drift == "keep" else ["turn-boundaries"] * 3)


CALLED = '<tool_call>\n{"name": "add"}\n</tool_call>'


@pytest.mark.parametrize(
    "messages",
    [
        [
            {"role": "user", "content": "one and one?"},
            {"role": "assistant", "content": CALLED},
            {"role": "tool", "content": "2"},
        ],
        [{"role": "user", "content": "one and one?"}, {"role": "tool", "content": "2"}],
    ],
    ids=["as text", "none"],
)
def test_results_of_tools_that_no_call_of_the_source_precedes_are_rejected_by_name(
    talked: Talked, messages: list[dict[str, Any]]
) -> None:
    """A target that called nothing would be told a result."""
    sample = {"id": "talk", "messages": [*messages, {"role": "assistant", "content": "Two."}]}
    job = talked.run(THREE, sample, CONVERSATION | {"id": "other"})
    assert talked.rejects(job) == [("talk", 0, "bad-tool-call")]
    assert "tool_calls" in talked.every_reject(job)[0].detail


ENDS_OTHERWISE = templates.CHATML.replace("<|im_end|>", "<|endoftext|>")


@pytest.mark.parametrize("talked", [ENDS_OTHERWISE], indirect=True)
def test_an_answer_of_nothing_but_a_mark_that_the_template_has_not_fails_no_job(talked: Talked) -> None:
    job = talked.run(by_turn(("", "end"), ("two", "end"), ("three", "end")), capture="second_prefill")
    assert job.state is JobState.COMPLETED, job.problem
    ((_, _, runs),) = talked.rows(job)
    assert runs == ["two", f"three{END}"]


@pytest.mark.parametrize("capture", ["one_pass", "second_prefill"])
@pytest.mark.parametrize(
    "talked", [templates.CHATML, templates.LLAMA3.replace("<|eot_id|>", END)], indirect=True
)
def test_turns_that_were_answered_stay_where_the_engine_refuses_a_later_prompt(
    talked: Talked, capture: str
) -> None:
    def script(prompt: str) -> Said:
        if "third" in prompt:
            raise PromptRefused("too hot")
        return "good", "end"

    job = talked.run(script, capture=capture)
    assert sum(len(runs) for _, _, runs in talked.rows(job)) == 2
    in_turns = talked.tokenizer.chat_template != templates.CHATML
    assert talked.rejects(job) == ([("talk#turn-3", 3, "engine-refused")] if in_turns else [])


def test_an_answer_that_ends_in_two_ways_is_counted_as_both(talked: Talked) -> None:
    job = talked.run(lambda _: (" \n" * 60, "end"), max_tokens=8)
    counts = talked.counts(job)
    assert counts["length"] == counts["empty"] == 3


def test_a_mixture_leaves_each_sample_the_room_of_its_own_entry(talked: Talked) -> None:
    mix = [{"name": "short", "weight": 1, "max_tokens": 4}, {"name": "long", "weight": 1, "max_tokens": 300}]
    samples = [{"id": f"s{n}", "token_ids": [40 + n] * 310} for n in range(8)]
    job = talked.run(lambda _: ("yes", "end"), *samples, turns="last", mix=mix, changes={"max_tokens": 400})
    reasons = {reason for _, _, reason in talked.rejects(job)}
    assert 0 < len(talked.rows(job)) < 8 and reasons == {"too-long"}


THINKS_AT_LAST = templates.CHATML.replace(
    WRITTEN, "('<think></think>' if loop.last and message.role == 'assistant' else '') + message.content"
)


@pytest.mark.parametrize("talked", [THINKS_AT_LAST], indirect=True)
def test_what_a_template_adds_to_an_answer_is_not_supervised_when_it_is_rendered_again(
    talked: Talked,
) -> None:
    job = talked.run(THREE, CONVERSATION, drift="rerender", capture="second_prefill")
    ((_, text, runs),) = talked.rows(job)
    assert text.endswith(f"<think></think>three{END}")
    assert runs == [f" one {END}", f"two</think>{END}", f"three{END}"]


@pytest.mark.parametrize("talked", [templates.LLAMA3.replace("<|eot_id|>", END)], indirect=True)
def test_a_stop_string_is_cut_where_a_server_cuts_it(talked: Talked) -> None:
    """The last token holds it twice: what comes before the first one is the answer."""
    job = talked.run(lambda prompt: ("It is two..", "stop"), stop=["."], capture="second_prefill")
    rows = talked.rows(job)
    assert f"It is two{END}" in rows[1][1] and "It is two." not in rows[1][1].split("second")[0]


def test_a_renderer_that_dies_costs_a_unit_an_attempt_and_no_row(
    talked: Talked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. Its process dies while an answer is read. 2. Another one is started for the next attempt."""
    ask, asked = Child.ask, 0

    def dying(self: Child, *question: object) -> object:
        nonlocal asked
        asked += 1
        if asked == 2:
            self.close()
        return ask(self, *question)

    monkeypatch.setattr(Child, "ask", dying)
    job = talked.run(THREE)
    assert job.state is JobState.COMPLETED, job.problem
    assert len(talked.rows(job)) == 1
    assert {row.attempts for row in talked.shop.store.read(units.of_job, job.id)} == {2}


def test_a_mark_that_was_not_said_is_not_supervised_when_a_row_is_rendered_again(talked: Talked) -> None:
    """The last answer ends for want of room: the template's mark behind it is nobody's answer."""
    parts = [talked.tokenizer.encode(part, add_special_tokens=False) for part in ("t", "he")]
    TalkingEngine.said_ids = [token for part in parts for token in part]
    script = by_turn(("", "end"), ("", "end"), (" word" * 40, "end"))
    job = talked.run(script, drift="rerender", capture="second_prefill")
    ((_, text, runs),) = talked.rows(job)
    assert runs[:2] == [f"the{END}"] * 2
    assert runs[2].startswith("the word") and text.endswith(runs[2]) and END not in runs[2]
    assert talked.counts(job) == {"conversations in one row": 1, "length": 1, "drift": 1}


@pytest.mark.parametrize(
    ("mask", "runs"), [([], (0,)), ([1, 1], (0, 2, 0)), ([1, 0, 0], (0, 1, 2)), ([0, 1], (1, 1, 0))]
)
def test_runs_end_with_what_is_not_supervised(mask: list[int], runs: tuple[int, ...]) -> None:
    planned = Planned(0, [7, 7], [], False, None, 9, 9, [], None, False)
    row = Row(planned, ids=[7, 7, *(5 for _ in mask)], mask=[0, 0, *mask])
    assert row.runs() == runs
