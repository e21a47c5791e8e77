"""What of a conversation the template writes: what it leaves out, how it sees calls, where answers are."""

from pathlib import Path
from typing import Any

import pytest

from service.plan.sources.rows import RejectedError
from tests.support import templates
from tests.support.tokenized import a_tokenizer, chat, decode, encoded, of_folder, pieces
from tests.unit.plan.test_samples import CALL, CALL_TEXT, CALLED, EMPTY_THOUGHT, THOUGHT, TWO, rejected

ADD = {"type": "function", "function": {"name": "add"}}
LEFT_OUT = [
    (CALLED, templates.CHATML, "the calls of message 1, of 'assistant'"),
    (
        ("user: x", {"role": "assistant", "tool_calls": [CALL, ADD]}),
        templates.QWEN3.replace("message.tool_calls or []", "(message.tool_calls or [])[:1]"),
        "the calls of message 1, of 'assistant'",
    ),
    (
        ({"role": "developer", "content": "Be brief."}, *TWO),
        "developer",
        "the text of message 0, of 'developer'",
    ),
    ((*TWO, {"role": "system", "content": "e"}, *TWO), "system", "the text of message 4, of 'system'"),
    (
        ("user: x", {"role": "tool", "content": "user"}, "assistant: y"),
        "tool",
        "the text of message 1, of 'tool'",
    ),
]


@pytest.mark.parametrize("loss", ["assistant", "all"])
@pytest.mark.parametrize(("turns", "template", "what"), LEFT_OUT)
def test_a_sample_of_which_the_template_leaves_something_out_is_a_reject(
    tmp_path: Path, turns: tuple[Any, ...], template: str, what: str, loss: str
) -> None:
    if template in ("developer", "system", "tool"):
        kept = f"in messages if message.role != '{template}' %}}"
        template = templates.CALLING.replace("in messages %}", kept, 1)
    reject = rejected(a_tokenizer(tmp_path, template, loss=loss), chat(*turns))
    assert reject.reason == "template-failed" and f"the template leaves out {what}: pass" in reject.detail


EVERY = "{% for m in messages %}{{ '<|im_start|>' + m.role + m.content"
KNOWN = """
{%- for call in m.tool_calls or [] %}
    {%- for tool in tools if call.function.name == tool.function.name %}{{ call | tojson }}{% endfor %}
{%- endfor %}"""


@pytest.mark.parametrize(
    ("turns", "template"),
    [
        (TWO, EVERY + " | upper }}"),
        (TWO, EVERY + "[:9] }}"),
        (CALLED, EVERY + " }}" + KNOWN),
        (
            ({"role": "system", "content": ""}, *TWO),
            EVERY.replace(" %", " if m.role != 'system' %", 1) + " }}",
        ),
    ],
)
def test_what_a_template_writes_in_another_form_is_not_left_out(
    tmp_path: Path, turns: tuple[Any, ...], template: str
) -> None:
    tokenizer = a_tokenizer(tmp_path, template + "{% endfor %}", loss="all")
    encoded(tokenizer, chat(*turns, tools=[ADD]))


def test_tools_may_be_left_out_since_the_system_may_have_said_them(tmp_path: Path) -> None:
    encoded(a_tokenizer(tmp_path), chat(*TWO, tools=[{"type": "function", "function": {"name": "add"}}]))


def test_an_answer_of_the_source_may_be_left_out_where_the_target_answers(tmp_path: Path) -> None:
    tokenizer = a_tokenizer(tmp_path, generate={"max_tokens": 16})
    asked = chat("user: x", {"role": "assistant", "tool_calls": [CALL]})
    assert encoded(tokenizer, asked).ids.tolist() == encoded(tokenizer, chat("user: x")).ids.tolist()


def test_a_call_may_be_the_function_itself_and_no_calls_are_no_key(tmp_path: Path) -> None:
    either = templates.QWEN3.replace(
        "in message.tool_calls or []", "in message.tool_calls or ['none']"
    ).replace("call.function", "(call.function or call)")
    # A template that asks whether the key is there would write a call.
    template = "{{% if messages[-1].tool_calls is defined %}}{}{{% else %}}{}{{% endif %}}"
    tokenizer = a_tokenizer(tmp_path, template.format(either, templates.CHATML))
    flat = {"name": "add", "arguments": '{"a": 1}'}
    runs, _ = pieces(tokenizer, chat("user: x", {"role": "assistant", "tool_calls": [flat]}))
    assert runs == [EMPTY_THOUGHT + CALL_TEXT]
    none = {"role": "assistant", "content": "y", "tool_calls": []}
    assert pieces(tokenizer, chat("user: x", none))[0] == ["y<|im_end|>"]


@pytest.mark.parametrize("first", ["", "{{ messages | selectattr('role', 'eq', 'user') | list | length }}"])
def test_earlier_calls_are_found_where_results_may_only_follow_calls(tmp_path: Path, first: str) -> None:
    """As in Mistral's templates, which also write the tools before the last question."""
    fails = "{% if not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{% endif %}"
    template = first + templates.QWEN3.replace("== 'tool' %}", "== 'tool' %}" + fails)
    turns: tuple[Any, ...] = (CALLED[0], "assistant: Well.", *CALLED[1:], "user: Sure?", "assistant: Yes.")
    runs, _ = pieces(a_tokenizer(tmp_path, template), chat(*turns))
    assert runs == ["Well.<|im_end|>", CALL_TEXT, "Two.<|im_end|>", EMPTY_THOUGHT + "Yes.<|im_end|>"]


def test_an_answer_begins_behind_its_prompt_also_where_the_reasoning_before_it_is_dropped(
    tmp_path: Path,
) -> None:
    """As in the templates of GLM 4.5 and gpt-oss."""
    empty = "{%- if not message.reasoning_content or loop.index0 < ns.last_query %}{{ '<think></think>' }}"
    reasons = "{%- if loop.index0 > ns.last_query and (loop.last or message.reasoning_content) %}"
    template = templates.QWEN3.replace(reasons, empty + "{% else %}")
    runs, _ = pieces(a_tokenizer(tmp_path, template), chat(*CALLED, "assistant: Or so.", *TWO[:2]))
    said = (CALL_TEXT, "Two.<|im_end|>", "Or so.<|im_end|>", "It is one.<|im_end|>")
    assert runs == [f"<think></think>{text}" for text in said]


def test_the_last_turn_is_found_where_a_question_behind_it_drops_the_reasoning_before_it(
    tmp_path: Path,
) -> None:
    """As in TRL's template for Diffusion Gemma, which marks the reasoning, the calls and the content each."""
    think = "{% generation %}{{ message.reasoning_content }}{% endgeneration %}"
    marked = f"'assistant' %}}{{% if messages[-1].role != 'user' %}}{think}{{% endif %}}"
    template = templates.GENERATION.replace("'assistant' %}", marked, 1)
    tokenizer = a_tokenizer(tmp_path, template, loss="last_turn")
    runs, whole = pieces(tokenizer, chat(*THOUGHT[:2], "assistant: Sorry.", "user: Bye."))
    assert runs == ["Sorry.<|im_end|>"] and "Let me see." not in whole


@pytest.mark.parametrize("function", [{}, {"function": None}, {"function": "add"}])
def test_the_end_of_an_earlier_call_is_found_whatever_its_form(
    tmp_path: Path, function: dict[str, Any]
) -> None:
    template = templates.QWEN3.replace("call.function", "call")
    call = {"name": "add", "arguments": {"a": 1}} | function
    runs, _ = pieces(a_tokenizer(tmp_path, template), chat(TWO[0], CALLED[1] | {"tool_calls": [call]}, *TWO))
    assert runs[0] == CALL_TEXT


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("x | tojson + (' id' if message != messages[-1] else '')", "{}"),
        ("(x if x is string else 1 / 0)", "{"),
    ],
)
def test_the_end_of_an_earlier_call_is_found_behind_the_content_where_the_last_ones_differ(
    tmp_path: Path, written: str, arguments: str
) -> None:
    """As in Apriel's template, which leaves out the id, or where arguments that are no JSON stay text."""
    template = templates.QWEN3.replace("call.function.arguments | tojson", written)
    template = template.replace("{{- '<tool_call>", "{% set x = call.function.arguments %}{{- '<tool_call>")
    call = {"function": {"name": "add", "arguments": arguments}}
    runs, _ = pieces(a_tokenizer(tmp_path, template), chat(TWO[0], CALLED[1] | {"tool_calls": [call]}, *TWO))
    said = arguments + (" id" if "id" in written else "")
    assert runs[0] == f"<tool_call>\nadd {said}\n</tool_call><|im_end|>"


@pytest.mark.parametrize(
    "arguments",
    ["{{ x }}", "{% for held in x.values() %}<|message|>{{ held }}<|message|>{% endfor %}"],
)
def test_a_result_that_is_written_within_the_turn_of_its_call_is_a_reject(
    tmp_path: Path, arguments: str
) -> None:
    """As in Gemma 4's template, which also has a mark for quotation."""
    result = "{% if m.tool_calls and loop.nextitem %}{{ '[' + loop.nextitem.content + ']' }}{% endif %}"
    calls = "{% for call in m.tool_calls or [] %}{% set x = call.function.arguments %}" + arguments
    template = EVERY.replace("m.content", f"'\n' }}}}{calls}{{% endfor %}}{result}{{{{ m.content").replace(
        "messages %}", "messages %}{% if m.role != 'tool' %}"
    )
    template += " + '<|im_end|>' }}{% endif %}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    user, call, *rest = CALLED
    reject = rejected(a_tokenizer(tmp_path, template), chat(user, {**call, "content": "I add."}, *rest))
    assert reject.reason == "turn-boundaries" and "the last turn is closed by" in reject.detail


def test_a_header_that_takes_the_space_before_an_answer_is_not_supervised(tmp_path: Path) -> None:
    path = templates.write_target(tmp_path / "model", templates.MISTRAL) / "tokenizer.json"
    path.write_text(path.read_text().replace('"rstrip": false', '"rstrip": true'))
    runs, _ = pieces(of_folder(path.parent), chat(*TWO))
    assert runs == ["It is one.</s>", "Now two.</s>"]


ASKED_ONLY = templates.CHATML.replace("if add_gen", "if messages[-1].role == 'user' and add_gen")
ALWAYS_ASKS = templates.CHATML.replace("if add_generation_prompt", "if true")
LEFT_OPEN = ASKED_ONLY.replace(
    "+ '<|im_end|>\\n' }}", "}}{{ '<|im_end|>\\n' if not loop.last or add_generation_prompt }}"
)
"""Ends no last turn, as Qwen1.5's first template."""


@pytest.mark.parametrize(
    ("template", "turns", "second"),
    [
        (ALWAYS_ASKS, TWO[:2], "Sorry."),
        (ALWAYS_ASKS, TWO[1:2], "Sorry."),
        (ASKED_ONLY, TWO[:2], "Sorry."),
        (ASKED_ONLY, TWO[:2], "<|im_start|>assistant\nSorry."),
        (ASKED_ONLY, ("system: Be brief.", "assistant: It is one.", "user: And now?"), "Two."),
    ],
)
def test_the_header_of_an_answer_that_follows_no_question_is_not_supervised(
    tmp_path: Path, template: str, turns: tuple[str, ...], second: str
) -> None:
    runs, _ = pieces(a_tokenizer(tmp_path, template), chat(*turns, f"assistant: {second}"))
    assert runs == ["It is one.<|im_end|>", f"{second}<|im_end|>"]


def test_the_header_of_a_second_answer_is_not_supervised_where_reasoning_is_dropped(tmp_path: Path) -> None:
    template = templates.QWEN3.replace("if add_gen", "if messages[-1].role == 'user' and add_gen")
    runs, _ = pieces(a_tokenizer(tmp_path, template), chat(*THOUGHT[:2], "assistant: Sorry.", *TWO[2:]))
    assert runs[:2] == ["Since.<|im_end|>", "Sorry.<|im_end|>"]


def test_the_header_of_a_second_answer_is_not_supervised_where_it_opens_no_reasoning(tmp_path: Path) -> None:
    """As in Reka Edge's template, where two answers come before the first question."""
    template = templates.QWEN3_THINKING.replace("if add_gen", "if messages[-1].role == 'user' and add_gen")
    template = template.replace("if loop.index0 > ns.last_query", "if -1 < ns.last_query < loop.index0")
    runs, _ = pieces(a_tokenizer(tmp_path, template), chat("assistant: Hello.", "assistant: Sorry.", *TWO))
    assert runs[:2] == ["Hello.<|im_end|>", "Sorry.<|im_end|>"]


@pytest.mark.parametrize("first", [TWO[:2], TWO[1:2]])
def test_the_header_of_a_later_answer_may_begin_with_the_end_of_the_one_before(
    tmp_path: Path, first: tuple[str, ...]
) -> None:
    runs, _ = pieces(a_tokenizer(tmp_path, LEFT_OPEN), chat(*first, "assistant: Sorry."))
    assert runs == ["It is one.", "Sorry."]


@pytest.mark.parametrize("second", ["assistant: Sorry.", "user: Sure?"])
def test_what_begins_the_next_message_ends_no_answer(tmp_path: Path, second: str) -> None:
    """As in axolotl's template for Metharme, which ends no turn, and all with the end token."""
    template = """
{%- for m in messages %}{{ ('<|start|>' if m.role == 'user' else '<|message|>') + m.content }}{% endfor %}
{{- '<|message|>' if add_generation_prompt else eos_token }}"""
    runs, _ = pieces(a_tokenizer(tmp_path, template), chat(*TWO[:2], second, *TWO[2:]))
    assert (runs[0], runs[-1]) == ("It is one.", "Now two.</s>")


@pytest.mark.parametrize(
    ("template", "answer", "end"),
    [
        (templates.HARMONY, "a", "<|return|>"),
        (templates.QWEN3, "think", "<|im_end|>"),
        (templates.QWEN3, "\n", "<|im_end|>"),
        (templates.CHATML, "end", "<|im_end|>"),
        (templates.GENERATION.replace("end|>' }}{% endg", "end|>\\n' }}{% endg"), "end", "<|im_end|>"),
        (templates.CHATML, "", "<|im_end|>"),
        (templates.CHATML.replace("<|im_end|>", ""), "It is one.", ""),
        (templates.KEEPS_REASONING.replace("+ '<|im_end|>\\n' ", ""), "in", ""),
    ],
)
def test_an_answer_of_the_target_is_found_behind_what_the_template_writes_before_it(
    tmp_path: Path, template: str, answer: str, end: str
) -> None:
    tokenizer = a_tokenizer(tmp_path, template, generate={"max_tokens": 16})
    told = [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]
    ends = [(None, tokenizer.texts.marks.get(end))]
    row = tokenizer.supervised(tokenizer.chat(told, None, None), [1], last_only=False, ends=ends)
    places = row.mask.nonzero()[0]
    assert decode(tokenizer, row.ids[places]) == answer + end
    assert decode(tokenizer, row.ids[places[-1] + 1 :]).isspace() or places[-1] == len(row.ids) - 1


def test_an_answer_of_the_target_that_was_cut_behind_an_added_token_keeps_it(tmp_path: Path) -> None:
    tokenizer = a_tokenizer(tmp_path, generate={"max_tokens": 16})
    told = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "so<|end|>"}]
    row = tokenizer.supervised(tokenizer.chat(told, None, None), [1], last_only=False, ends=[(None, None)])
    assert decode(tokenizer, row.ids[row.mask.nonzero()[0]]) == "so<|end|>"


@pytest.mark.parametrize(
    ("last", "said"),
    [("<|end|>", "so<|end|><|im_end|>"), ("<|im_start|>", "so"), (None, "so")],
)
def test_a_mark_that_the_text_of_an_answer_lacks_is_its_own_if_the_target_wrote_it(
    tmp_path: Path, last: str | None, said: str
) -> None:
    """As Command A's `<|END_RESPONSE|>`; another one is the template's."""
    template = templates.CHATML.replace("'<|im_end|>", "'<|end|><|im_end|>")
    tokenizer = a_tokenizer(tmp_path, template, generate={"max_tokens": 16})
    told = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "so"}]
    marks = tokenizer.texts.marks
    ends = [(None if last is None else marks[last], marks["<|im_end|>"])]
    row = tokenizer.supervised(tokenizer.chat(told, None, None), [1], last_only=False, ends=ends)
    assert decode(tokenizer, row.ids[row.mask.nonzero()[0]]) == said


@pytest.mark.parametrize("about", [{}, {"reasoning_content": "why"}])
@pytest.mark.parametrize("is_cut", [False, True])
def test_an_answer_that_ends_with_what_begins_the_next_message_keeps_it(
    tmp_path: Path, about: dict[str, str], is_cut: bool
) -> None:
    """As GLM's `<|user|>`. An answer that was cut has none."""
    template = templates.KEEPS_REASONING.replace("+ '<|im_end|>\\n' ", "")
    tokenizer = a_tokenizer(tmp_path, template, generate={"max_tokens": 16})
    question = {"role": "user", "content": "q"}
    told = [question, {"role": "assistant", "content": "so", **about}, question]
    ends = [(None, None if is_cut else tokenizer.texts.marks["<|im_start|>"])]
    row = tokenizer.supervised(tokenizer.chat(told, None, None), [1], last_only=False, ends=ends)
    said = decode(tokenizer, row.ids[row.mask.nonzero()[0]])
    assert said.endswith("so" if is_cut else "so<|im_start|>")


def said_of(folder: Path, template: str, answer: dict[str, str], end: str | None, *then: str) -> str:
    """Return the supervised text of an answer of the target, which ended it with this mark."""
    tokenizer = a_tokenizer(folder, template, generate={"max_tokens": 16})
    told = [{"role": "user", "content": "q"}, {"role": "assistant", **answer}]
    told += [{"role": "user", "content": text} for text in then]
    ends = [(None, end and tokenizer.texts.marks[end])]
    row = tokenizer.supervised(tokenizer.chat(told, None, None), [1], last_only=True, ends=ends)
    return decode(tokenizer, row.ids[row.mask.nonzero()[0]])


def test_a_header_in_the_generation_block_is_not_the_answers(tmp_path: Path) -> None:
    """As in TRL's template for gpt-oss; the prompt has it."""
    template = """
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '<|im_start|>user\\n' + m.content + '<|im_end|>' }}{% else %}{% generation %}
        {{- '<|im_start|>assistant\\n' + (m.reasoning_content or '') + m.content + '<|im_end|>' }}
    {%- endgeneration %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
    answer = {"content": "so", "reasoning_content": "why"}
    assert said_of(tmp_path, template, answer, "<|im_end|>") == "whyso<|im_end|>"


@pytest.mark.parametrize(
    ("end_mark", "content", "said"),
    [
        ("<|im_end|>", "", "<think>\nwhy"),
        ("<|im_end|>", "so", "<think>\nwhy\n</think>so"),
        ("<|end|><|im_end|>", "so", "<think>\nwhy\n</think>so"),
        ("", "so", "<think>\nwhy\n</think>so"),
    ],
)
def test_what_follows_an_answer_with_reasoning_that_was_cut_is_not_supervised(
    tmp_path: Path, end_mark: str, content: str, said: str
) -> None:
    template = templates.KEEPS_REASONING.replace("<|im_end|>", end_mark)
    answer = {"content": content, "reasoning_content": "why"}
    assert said_of(tmp_path, template, answer, None, "x") == said


def test_an_answer_whose_text_ends_with_an_end_mark_keeps_its_own(tmp_path: Path) -> None:
    answer = {"content": "so<|im_end|>"}
    assert said_of(tmp_path, templates.CHATML, answer, "<|im_end|>") == "so<|im_end|><|im_end|>"


def test_a_generation_block_that_only_ends_the_conversation_is_no_answer(tmp_path: Path) -> None:
    """As in TRL's template for Phi-3."""
    trailer = "{% if not add_generation_prompt %}{% generation %}</s>{% endgeneration %}{% endif %}"
    template = templates.GENERATION + trailer
    assert said_of(tmp_path, template, {"content": "so"}, "<|im_end|>") == "so<|im_end|>"


def test_an_answer_of_the_target_that_has_no_place_in_the_rendering_is_a_reject(tmp_path: Path) -> None:
    inside = templates.GENERATION.replace(
        " + '<|im_end|>' }}{% endgeneration %}{{ '", " }}{% endgeneration %}{{ '<|im_end|>"
    )
    tokenizer = a_tokenizer(tmp_path, inside, generate={"max_tokens": 16})
    told = [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]
    with pytest.raises(RejectedError, match="1 answers have 0 places in the rendering"):
        tokenizer.supervised(tokenizer.chat(told, None, None), [1], last_only=False, ends=[(None, None)])
