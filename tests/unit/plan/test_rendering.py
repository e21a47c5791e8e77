"""Chat templates: rendered as transformers does, and refused where they are none."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from service.errors import TemplateRefused
from service.plan.rendering import ChatTemplate, RenderFailed
from tests.support import templates

MESSAGES = [
    {"role": "user", "content": "One & <two>?"},
    {"role": "assistant", "content": " Three.\n", "reasoning_content": "hm"},
    {"role": "user", "content": "Four?"},
    {"role": "assistant", "content": "Five."},
]
MARKS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize(
    "name", ["CHATML", "LLAMA3", "MISTRAL", "QWEN3", "HARMONY", "GENERATION", "STRICT_ROLES"]
)
def test_a_rendering_is_that_of_transformers(name: str, prompted: bool) -> None:
    source = getattr(templates, name)
    tools = [{"type": "function", "function": {"name": "f"}}]
    ours = ChatTemplate(source, MARKS).render(MESSAGES, tools, add_generation_prompt=prompted)
    theirs, spans = render_jinja_template(
        [MESSAGES],
        tools=tools,
        chat_template=source,
        return_assistant_tokens_mask=name == "GENERATION",
        add_generation_prompt=prompted,
        **MARKS,
    )
    assert ours.text == theirs[0]
    assert [list(span) for span in ours.generated] == [list(span) for span in (spans[0] if spans else [])]


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[9].content }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ raise_exception('no') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ undefined_name.attribute }}",
    ],
)
def test_whatever_a_template_raises_is_a_failed_rendering(source: str) -> None:
    with pytest.raises(RenderFailed):
        ChatTemplate(source, {}).render(MESSAGES, None, add_generation_prompt=False)


@pytest.mark.parametrize("source", ["{% for", "{% if %}", "{{ }", "{% nonsense %}", "{{ x|no_such_filter }}"])
def test_what_is_no_template_is_refused(source: str) -> None:
    with pytest.raises(TemplateRefused, match="does not compile") as caught:
        ChatTemplate(source, {})
    assert caught.value.field == "chat_template" and caught.value.cure


@pytest.mark.parametrize(
    "around",
    [
        "{% macro f() %}BLOCK{% endmacro %}{{ f() }}",
        "{% set x %}BLOCK{% endset %}{{ x }}",
        "{% filter upper %}BLOCK{% endfilter %}",
        "{% generation %}BLOCK{% endgeneration %}",
    ],
)
def test_generation_marks_whose_place_is_not_known_are_refused(around: str) -> None:
    with pytest.raises(TemplateRefused, match="cannot be known"):
        ChatTemplate(around.replace("BLOCK", "{% generation %}x{% endgeneration %}"), {})
