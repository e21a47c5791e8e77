"""Options of a chat template, and the tools that a job gives its samples."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from schemas.generate import MAX_KWARGS_CHARS
from service.errors import TemplateRefused
from tests.support import templates
from tests.support.tokenized import a_tokenizer, chat, encoded, pieces

TWO = ("user: What is one?", "assistant: It is one.", "user: And two?", "assistant: Now two.")


def test_the_tools_of_a_job_are_those_of_samples_without_any(tmp_path: Path) -> None:
    tokenizer = a_tokenizer(tmp_path, templates.QWEN3, tools=[{"name": "of the job"}])
    assert "of the job" in pieces(tokenizer, chat(*TWO))[1]
    text = pieces(tokenizer, chat(*TWO, tools=[{"name": "its own"}]))[1]
    assert "its own" in text and "of the job" not in text


SWITCHED = "{%- if thinking | default(true) %}{{ '<|start|>' }}{% endif %}" + templates.CHATML


@pytest.mark.parametrize("options", [{}, {"thinking": True}, {"thinking": False}], ids=str)
def test_options_reach_the_template_as_transformers_hands_them_on(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    tokenizer = a_tokenizer(tmp_path, SWITCHED, chat_template_kwargs=options)
    sample = chat(*TWO)
    messages = [message.for_template() for message in sample.messages or ()]
    theirs = tokenizer.texts.of_library.apply_chat_template(messages, return_dict=False, **options)
    assert encoded(tokenizer, sample).ids.tolist() == theirs
    assert pieces(tokenizer, sample)[0] == ["It is one.<|im_end|>", "Now two.<|im_end|>"]


def test_an_option_that_the_template_does_not_read_is_refused(tmp_path: Path) -> None:
    """A misspelt one would change nothing, without a word."""
    with pytest.raises(TemplateRefused, match="does not read 'thinkin'") as caught:
        a_tokenizer(tmp_path, SWITCHED, chat_template_kwargs={"thinkin": False}).rows(chat(*TWO), "")
    assert caught.value.field == "chat_template_kwargs.thinkin" and caught.value.cure


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"messages": []}, "filled in for each sample"),
        ({"add_generation_prompt": True}, "filled in for each sample"),
        ({"thinking": "x" * MAX_KWARGS_CHARS}, "characters as JSON"),
    ],
    ids=["messages", "generation prompt", "long"],
)
def test_an_option_that_no_template_takes_is_refused_by_the_schema(
    tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValidationError, match=why):
        a_tokenizer(tmp_path, SWITCHED, chat_template_kwargs=options)


def test_answers_cannot_be_counted_before_they_are_generated(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="before they are generated"):
        a_tokenizer(tmp_path, min_supervised_tokens=2, generate={"max_tokens": 4})
