"""Turns in renderings: where they are found, and what is said where they cannot be."""

import pytest

from service.plan.boundaries import PROBE, TurnFinder, UnstableBoundaries, probe
from service.plan.rendering import ChatTemplate, Conversation, Messages, RenderTooLong
from tests.support import templates

MARKS = templates.MARKS
ANSWERS_REPEAT_THEIR_QUESTION = templates.CHATML.replace(
    "+ message.content +",
    "+ message.content + (messages[loop.index0 - 1].content if message.role == 'assistant' else '') +",
)


def finder(source: str, messages: Messages = PROBE, trailer: str = "") -> tuple[TurnFinder, str]:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    chat = Conversation.of(template, messages)
    return TurnFinder(chat, MARKS, trailer), chat.rendering.text


def test_a_span_runs_from_the_prompt_to_all_that_closes_the_turn() -> None:
    found, whole = finder(templates.CHATML)
    assert [whole[slice(*found.span(turn))] for turn in (1, 3)] == [
        "first answer<|im_end|>\n",
        "second answer<|im_end|>\n",
    ]


def test_a_trailer_is_found_once_for_the_template_and_is_no_part_of_the_last_turn() -> None:
    trailer = probe(ChatTemplate(templates.TRAILER, {}), MARKS)
    assert trailer == "\nThat was all."
    found, whole = finder(templates.TRAILER, trailer=trailer)
    assert whole[slice(*found.span(3))] == "second answer<|im_end|>"
    assert probe(ChatTemplate(templates.CHATML, {}), MARKS) == ""
    assert probe(ChatTemplate(templates.HARMONY, {}), MARKS) == ""


def test_the_stand_in_is_a_word_that_the_conversation_does_not_hold() -> None:
    said = "QuarryStandIn and QuarryStandInX"
    messages = (*PROBE[:1], {"role": "assistant", "content": said, "reasoning_content": "hm"}, *PROBE[2:])
    found, whole = finder(templates.QWEN3, messages)
    assert whole[slice(*found.span(1))] == said + "<|im_end|>\n"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for m in messages %}{{ m.content + m.content }}{% endfor %}END", "exactly once"),
        (
            "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}END",
            "exactly once",
        ),
        (templates.UNMARKED_TRAILER, "is closed by"),
        (templates.STRIPPED_REASONING, "not how the rendering of its answer begins"),
        ("{{ messages[-1].content }}" + templates.CHATML, "exactly once"),
        (ANSWERS_REPEAT_THEIR_QUESTION, "the span found for 'first answer' is "),
    ],
)
def test_a_template_whose_turns_cannot_be_told_apart_is_named_with_the_reason(
    source: str, reason: str
) -> None:
    with pytest.raises(UnstableBoundaries, match=reason):
        probe(ChatTemplate(source, {}), MARKS)


def test_what_depends_on_the_turn_itself_is_not_guessed() -> None:
    """An earlier turn whose length stands at the very beginning of every longer conversation."""
    shifting = "{{ messages[1].content | length if messages | length > 2 }}" + templates.CHATML
    with pytest.raises(UnstableBoundaries, match="depends on what it says"):
        finder(shifting)[0].span(1)


def test_a_turn_without_text_of_its_own_is_refused() -> None:
    silent = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(UnstableBoundaries, match="no text of its own"):
        finder(silent)[0].span(3)


def test_too_many_turns_for_the_length_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.plan.boundaries.MAX_RENDERED_CHARS", 100)
    with pytest.raises(RenderTooLong, match="too many turns"):
        finder(templates.CHATML)[0].span(1)
