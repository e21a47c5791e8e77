"""Token ids and loss masks: checked by decoding what is supervised."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import ByT5Tokenizer

from schemas.source import Sample
from service.errors import OptionRefused, TemplateRefused, UnknownModel
from service.plan.samples import SampleTokenizer
from service.plan.sources import RejectReason, RowReject
from tests.support import templates
from tests.support.tokenized import a_tokenizer, chat, decode, encoded, of_folder, pieces


def rejected(tokenizer: SampleTokenizer, sample: Sample) -> RowReject:
    (reject,) = tokenizer.rows(sample, "")
    assert isinstance(reject, RowReject), reject
    return reject


TWO = ("user: What is it?", "assistant: It is one.", "user: And now?", "assistant: Now two.")
THOUGHT = (
    "user: Why?",
    {"role": "assistant", "content": "Since.", "reasoning_content": "Let me see."},
    "user: Sure?",
    {"role": "assistant", "content": "Yes.", "reasoning_content": "Again."},
)

GREETING = {"role": "assistant", "content": "Hello.", "reasoning_content": "A greeting."}

CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLED = (
    "user: One and one?",
    {"role": "assistant", "reasoning_content": "I add.", "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
    "assistant: Two.",
)
CALL_TEXT = '<tool_call>\nadd {"a": 1}\n</tool_call><|im_end|>'
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
SUPERVISED: dict[str, tuple[str, tuple[Any, ...], list[str]]] = {
    "chatml": (templates.CHATML, TWO, ["It is one.<|im_end|>", "Now two.<|im_end|>"]),
    "llama3": (templates.LLAMA3, TWO, ["It is one.<|eot_id|>", "Now two.<|eot_id|>"]),
    "mistral": (templates.MISTRAL, TWO, [" It is one.</s>", " Now two.</s>"]),
    "harmony": (templates.HARMONY, TWO, ["<|message|>It is one.<|end|>", "<|message|>Now two.<|return|>"]),
    "generation": (templates.GENERATION, TWO, ["It is one.<|im_end|>", "Now two.<|im_end|>"]),
    "strict": (templates.STRICT_ROLES, TWO, ["It is one.<|im_end|>", "Now two.<|im_end|>"]),
    "trailer": (templates.TRAILER, TWO, ["It is one.<|im_end|>", "Now two.<|im_end|>"]),
    "qwen3": (templates.QWEN3, TWO, ["It is one.<|im_end|>", EMPTY_THOUGHT + "Now two.<|im_end|>"]),
    "thinking": (
        templates.QWEN3_THINKING,
        TWO,
        ["It is one.<|im_end|>", "\n</think>\n\nNow two.<|im_end|>"],
    ),
    "reasoning of the last turn alone": (
        templates.QWEN3,
        THOUGHT,
        ["Since.<|im_end|>", "<think>\nAgain.\n</think>\n\nYes.<|im_end|>"],
    ),
    "reasoning of the last turn alone, and no end mark": (
        templates.QWEN3.replace("<|im_end|>", ""),
        THOUGHT,
        ["Since.\n", "<think>\nAgain.\n</think>\n\nYes.\n"],
    ),
    "a call of an earlier exchange": (
        templates.QWEN3,
        (*CALLED, *TWO[:2]),
        [CALL_TEXT, "Two.<|im_end|>", EMPTY_THOUGHT + "It is one.<|im_end|>"],
    ),
    "neither tool nor system": (
        templates.QWEN3,
        ("system: Be brief.", *CALLED),
        ["<think>\nI add.\n</think>\n\n" + CALL_TEXT, EMPTY_THOUGHT + "Two.<|im_end|>"],
    ),
    "a template that is stable with reasoning alone": (
        templates.NEEDS_REASONING,
        THOUGHT,
        ["Let me see.\n</think>Since.<|im_end|>", "Again.\n</think>Yes.<|im_end|>"],
    ),
    "begins with the assistant": (
        templates.CHATML,
        ("assistant: Hello.", "user: Hi.", "assistant: Well?"),
        ["Hello.<|im_end|>", "Well?<|im_end|>"],
    ),
    "begins with the assistant, which reasons": (
        templates.KEEPS_REASONING,
        (GREETING, *THOUGHT[2:]),
        ["<think>\nA greeting.\n</think>Hello.<|im_end|>", "<think>\nAgain.\n</think>Yes.<|im_end|>"],
    ),
    "begins with the assistant, which does not reason": (
        templates.KEEPS_REASONING,
        ("assistant: Hello.", *THOUGHT[2:]),
        ["<think></think>Hello.<|im_end|>", "<think>\nAgain.\n</think>Yes.<|im_end|>"],
    ),
    "begins with the assistant, whose prompt opens the reasoning": (
        templates.NEEDS_REASONING,
        (GREETING, *THOUGHT[2:]),
        ["A greeting.\n</think>Hello.<|im_end|>", "Again.\n</think>Yes.<|im_end|>"],
    ),
    "is the assistant's alone": (
        templates.QWEN3,
        (GREETING,),
        ["<think>\nA greeting.\n</think>\n\nHello.<|im_end|>"],
    ),
    "begins with the assistant, whose reasoning is dropped": (
        templates.QWEN3,
        (GREETING, "user: Hi.", "assistant: Well?"),
        ["Hello.<|im_end|>", EMPTY_THOUGHT + "Well?<|im_end|>"],
    ),
    "begins with the assistant, in another format": (
        templates.HARMONY,
        ("assistant: Hello.", *TWO[:2]),
        ["<|message|>Hello.<|end|>", "<|message|>It is one.<|return|>"],
    ),
    "begins with the assistant, and has no header": (
        templates.MISTRAL,
        ("assistant: Hello.", *TWO[:2]),
        ["Hello.</s>", " It is one.</s>"],
    ),
    "a word that stands for a turn elsewhere": (
        templates.QWEN3,
        (
            TWO[0],
            {"role": "assistant", "content": "QuarryStandIn and QuarryStandInX", "reasoning_content": "hm"},
            *TWO[2:],
        ),
        ["QuarryStandIn and QuarryStandInX<|im_end|>", EMPTY_THOUGHT + "Now two.<|im_end|>"],
    ),
    "emoji and spaces": (
        templates.CHATML,
        (TWO[0], {"role": "assistant", "content": "  na\u00efve \U0001f469\u200d\U0001f52c!  "}),
        ["  na\u00efve \U0001f469\u200d\U0001f52c!  <|im_end|>"],
    ),
}


@pytest.mark.parametrize(("template", "turns", "expected"), SUPERVISED.values(), ids=SUPERVISED)
def test_what_the_model_itself_writes_is_supervised(
    tmp_path: Path, template: str, turns: tuple[Any, ...], expected: list[str]
) -> None:
    runs, whole = pieces(a_tokenizer(tmp_path, template), chat(*turns))
    assert runs == expected
    assert "Let me see." not in whole or template == templates.NEEDS_REASONING


def test_the_tools_of_a_sample_reach_its_template(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    _, whole = pieces(a_tokenizer(tmp_path, templates.QWEN3), chat(*TWO, tools=tools))
    assert "# Tools" in whole


STRICT_MARKED = templates.STRICT_ROLES.replace(templates.CHATML, templates.GENERATION)


@pytest.mark.parametrize("template", [templates.CHATML, templates.GENERATION, templates.QWEN3, STRICT_MARKED])
def test_last_turn_supervises_the_last_assistant_turn_alone(tmp_path: Path, template: str) -> None:
    runs, _ = pieces(a_tokenizer(tmp_path, template, loss="last_turn"), chat(*TWO, "user: Bye."))
    assert runs == ["Now two.<|im_end|>"]


def test_the_last_turn_is_found_where_all_ends_with_a_generated_mark(tmp_path: Path) -> None:
    end = "{% if not add_generation_prompt %}{% generation %}{{ eos_token }}{% endgeneration %}{% endif %}"
    tokenizer = a_tokenizer(tmp_path, templates.GENERATION + end, loss="last_turn")
    assert pieces(tokenizer, chat(*TWO, "assistant: Bye."))[0] == ["Bye.<|im_end|>", "</s>"]


def test_loss_all_supervises_every_token_even_with_unstable_turns(tmp_path: Path) -> None:
    runs, whole = pieces(a_tokenizer(tmp_path, templates.TRAILER, loss="all"), chat(*TWO))
    assert runs == [whole] and whole.endswith("That was all.")


def test_plain_text_and_bare_token_ids_are_supervised_whole(tmp_path: Path) -> None:
    tokenizer = a_tokenizer(tmp_path)
    runs, whole = pieces(tokenizer, Sample(text="One line of text."))
    assert runs == [whole] == ["One line of text."]
    for mask in (None, (0, 1, 0)):
        tokens = encoded(tokenizer, Sample(token_ids=(5, 6, 7), loss_mask=mask))
        assert (tokens.ids.tolist(), tokens.mask.tolist()) == ([5, 6, 7], list(mask or (1, 1, 1)))


@pytest.mark.parametrize("text", ["<s>Hello.", "Hello.", "<s><s>Hello."])
def test_a_text_begins_with_one_begin_token_unless_it_has_more(tmp_path: Path, text: str) -> None:
    tokenizer = a_tokenizer(tmp_path)
    library = tokenizer.texts.of_library
    adds_it = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", library.bos_token_id)])
    library.backend_tokenizer.post_processor = adds_it
    _, whole = pieces(tokenizer, Sample(text=text))
    assert whole == ("<s><s><s>Hello." if text.startswith("<s><s>") else "<s>Hello.")
    assert rejected(tokenizer, Sample(text="")).reason == "empty"  # no row of a begin token alone


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_a_template_sees_reasoning_by_the_name_that_it_asks_for(tmp_path: Path, name: str) -> None:
    template = templates.QWEN3.replace("reasoning_content", name)
    assert "Let me see." in pieces(a_tokenizer(tmp_path, template), chat(*THOUGHT[:2]))[1]


ANSWERS_REPEAT_THEIR_QUESTION = templates.CHATML.replace(
    "+ message.content +",
    "+ message.content + (messages[loop.index0 - 1].content if message.role == 'assistant' else '') +",
)
ANSWERS_ARE_LEFT_OUT = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}END"
UNSTABLE = [
    ("{% for m in messages %}{{ m.content + m.content }}{% endfor %}END", "content exactly once"),
    (ANSWERS_ARE_LEFT_OUT, "content exactly once"),
    ("{{ messages[-1].content }}" + templates.CHATML, "content exactly once"),
    (templates.UNMARKED_TRAILER, "the last turn is closed by"),
    (templates.STRIPPED_REASONING, "not how the rendering of its answer begins"),
    (ANSWERS_REPEAT_THEIR_QUESTION, "the span found for 'first answer' is "),
    (
        "{{ messages[1].content | length if messages | length > 2 }}" + templates.QWEN3_THINKING,
        "the text before turn 1 depends on what it says",
    ),
    (
        templates.HARMONY.replace(
            "messages %}", "messages %}{{ messages[1].content | length if loop.index == 3 }}"
        ),
        "the text after turn 1 depends on what it says",
    ),
]


@pytest.mark.parametrize(("template", "reason"), UNSTABLE)
def test_a_template_without_stable_turns_is_refused_by_name_with_the_cure(
    tmp_path: Path, template: str, reason: str
) -> None:
    with pytest.raises(TemplateRefused, match=f"no stable turn boundaries: .*{reason}") as caught:
        a_tokenizer(tmp_path, template).rows(chat(*TWO[:2]), "")
    assert caught.value.field == "chat_template"
    assert caught.value.cure is not None and "{% generation %}" in caught.value.cure
    assert str(tmp_path / "model") in caught.value.detail


def test_a_conversation_of_too_many_turns_for_its_length_is_a_reject(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = a_tokenizer(tmp_path)
    monkeypatch.setattr("service.plan.boundaries.MAX_RENDERED_CHARS", 10_000)
    encoded(tokenizer, chat(*TWO))
    reject = rejected(tokenizer, chat(*TWO * 20))
    assert reject.reason is RejectReason.RENDER_TOO_LONG and "too many turns" in reject.detail


def test_a_template_that_does_not_render_a_plain_conversation_is_refused(tmp_path: Path) -> None:
    for only_parts in ("message.content[0].text", "(message.content[0].text or '')"):
        template = templates.CHATML.replace("message.content", only_parts)
        with pytest.raises(TemplateRefused, match="does not render a plain conversation") as caught:
            a_tokenizer(tmp_path / f"{len(template)}", template, loss="all").rows(chat(*TWO), "")
        assert caught.value.field == "chat_template" and caught.value.cure


def test_a_template_from_the_request_replaces_the_models(tmp_path: Path) -> None:
    tokenizer = a_tokenizer(tmp_path, templates.STRIPPED_REASONING, chat_template=templates.GENERATION)
    assert pieces(tokenizer, chat(*TWO))[0] == ["It is one.<|im_end|>", "Now two.<|im_end|>"]
    assert tokenizer.template_sha256 != a_tokenizer(tmp_path, templates.STRIPPED_REASONING).template_sha256


def test_messages_need_a_template(tmp_path: Path) -> None:
    tokenizer = a_tokenizer(tmp_path, None)
    assert tokenizer.template_sha256 is None
    encoded(tokenizer, Sample(text="text needs none"))
    with pytest.raises(TemplateRefused, match="has no chat template"):
        tokenizer.rows(chat(*TWO), "")


LOOPS = "{% for a in range(9999) %}" * 2 + "{{ messages[0].content }}" + "{% endfor %}" * 2
ENDLESS = "{% if messages[0].content | length > 20 %}" + LOOPS + "{% endif %}" + templates.CHATML
BARE = "{% for m in messages %}{{ 'Q:' + m.content + ' A:' if m.role == 'user' else m.content }}{% endfor %}"
BOOM = "{{ '!' if messages and 'boom' in messages[-1].content }}" + templates.CHATML.replace(
    "message.content +", "message.content.replace('assistant\\n', '') +"
)
SURROGATE = {"role": "assistant", "content": "", "tool_calls": [{"a": "\ud800"}]}
GENERATE = {"generate": {"max_tokens": 40}, "config": {"max_position_embeddings": 51}}


def case(
    sample: Sample, reason: str, detail: str = "", template: str = templates.CHATML, **options: Any
) -> tuple[Any, ...]:
    return template, options, sample, reason, detail


ASKED = chat("user: Anybody?")
SHORT, EMPTY = chat(*TWO[:2]), chat(TWO[0], {"role": "assistant", "content": ""})
REJECTED = [
    case(Sample(token_ids=()), "empty"),
    case(Sample(text=""), "empty"),
    case(Sample(token_ids=(1, 100_000)), "id-outside-vocabulary", "100000"),
    case(Sample(token_ids=(1, 2), loss_mask=(0, 0)), "nothing-supervised"),
    case(chat("user: x", SURROGATE), "invalid-sample", "surrogates", templates.CALLING),
    case(ASKED, "nothing-supervised", "no assistant turn"),
    case(ASKED, "nothing-supervised", "no assistant turn", templates.GENERATION),
    case(chat("assistant: Hello."), "template-failed", "roles must alternate", templates.STRICT_ROLES),
    case(chat("user: " + "x" * 10**5), "render-too-long", "", ENDLESS, loss="all"),
    case(chat("user: Go.", "assistant: boom"), "turn-boundaries", "", BOOM),
    case(EMPTY, "turn-boundaries", "turn 1 has no text of its own", BARE),
    case(chat(*TWO), "turn-boundaries", "", templates.NEEDS_REASONING),
    case(SHORT, "nothing-supervised", "among the first 4", max_tokens=4),
    case(SHORT, "too-long", "4 are allowed", max_tokens=4, on_too_long="reject"),
    # It is rejected before its turns are looked for.
    case(SHORT, "too-long", "", templates.NEEDS_REASONING, max_tokens=4, on_too_long="reject"),
    case(SHORT, "too-few-supervised", "7 of the 8 supervised tokens", min_supervised_tokens=8),
    case(chat("assistant: Hello."), "no-prompt", **GENERATE),
    case(Sample(token_ids=(1,) * 11), "too-long", "10 are allowed", **GENERATE),
]


@pytest.mark.parametrize(("template", "options", "sample", "reason", "detail"), REJECTED)
def test_a_sample_that_cannot_be_trained_on_is_a_named_reject(
    tmp_path: Path, template: str, options: dict[str, Any], sample: Sample, reason: str, detail: str
) -> None:
    reject = rejected(a_tokenizer(tmp_path, template, **options), sample)
    assert reject.reason == reason and detail in reject.detail


def test_a_long_sample_is_cut_with_its_mask(tmp_path: Path) -> None:
    whole = encoded(a_tokenizer(tmp_path), chat(*TWO))
    cut = encoded(a_tokenizer(tmp_path, max_tokens=26), chat(*TWO))
    assert len(whole.ids) > 26
    assert cut.ids.tolist() == whole.ids[:26].tolist() and cut.mask.tolist() == whole.mask[:26].tolist()


@pytest.mark.parametrize(("length", "kept"), [(98, 98), (99, 99), (100, 99), (150, 99)])
def test_no_prompt_is_longer_than_the_engine_takes(tmp_path: Path, length: int, kept: int) -> None:
    tokenizer = a_tokenizer(tmp_path, config={"max_position_embeddings": 100})
    assert len(encoded(tokenizer, Sample(token_ids=(1,) * length)).ids) == kept


def test_a_layer_of_a_sample_is_one_parquet_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert a_tokenizer(tmp_path).limit_tokens > 10
    monkeypatch.setattr("schemas.dataset.columns.MAX_VALUE_BYTES", 64 * 2 * 10 + 127)
    assert a_tokenizer(tmp_path).limit_tokens == 10
    assert a_tokenizer(tmp_path, generate={"max_tokens": 4}).limit_tokens == 6


def test_a_generate_job_asks_with_the_conversation_before_the_last_answer(tmp_path: Path) -> None:
    tokenizer = a_tokenizer(tmp_path, generate={"max_tokens": 8})
    asked = encoded(tokenizer, chat(*TWO))
    assert not asked.mask.any()
    assert decode(tokenizer, asked.ids).endswith("And now?<|im_end|>\n<|im_start|>assistant\n")
    assert encoded(tokenizer, chat(*TWO[:3])).ids.tolist() == asked.ids.tolist()


def test_a_generate_job_leaves_room_for_the_answer(tmp_path: Path) -> None:
    tokenizer = a_tokenizer(tmp_path, **GENERATE)
    assert tokenizer.limit_tokens == 10
    encoded(tokenizer, Sample(token_ids=(1,) * 10))


def test_an_answer_that_leaves_no_room_for_a_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionRefused) as caught:
        a_tokenizer(tmp_path, generate={"max_tokens": 4096}, max_tokens=4096)
    assert caught.value.field == "generate.max_tokens"


def calling(arguments: Any) -> Sample:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return chat("user: x", {"role": "assistant", "tool_calls": [call]})


def test_call_arguments_given_as_json_text_reach_the_template_as_an_object(tmp_path: Path) -> None:
    def ids(arguments: Any) -> list[int]:
        return list(encoded(a_tokenizer(tmp_path, templates.QWEN3), calling(arguments)).ids)

    assert ids('{"a": [1, 2]}') == ids({"a": [1, 2]}) != ids("no json") != ids("[" * 100_000)
    assert ids(None) == ids("") == ids({})


def test_call_arguments_that_have_a_key_twice_are_rejected(tmp_path: Path) -> None:
    tokenizer = a_tokenizer(tmp_path, templates.QWEN3)
    assert "several 'a'" in rejected(tokenizer, calling('{"a": 1, "a": 2}')).detail


def test_the_day_does_not_change_the_tokens(tmp_path: Path) -> None:
    _, whole = pieces(a_tokenizer(tmp_path, templates.DATED), chat(*TWO))
    assert whole.startswith("2024-07-26")


def test_a_folder_without_a_tokenizer_is_an_unknown_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"num_hidden_layers": 8, "hidden_size": 4, "vocab_size": 9, "max_position_embeddings": 32}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnknownModel, match="tokenizer") as caught:
        of_folder(folder)
    assert caught.value.field == "model"


def test_a_tokenizer_without_offsets_serves_all_but_masks_of_conversations(tmp_path: Path) -> None:
    folder = templates.write_target(tmp_path / "model", vocab_size=1000)
    for path in folder.glob("tokenizer*"):
        path.unlink()
    ByT5Tokenizer(chat_template=templates.CHATML).save_pretrained(folder)
    encoded(of_folder(folder, loss="all"), chat(*TWO))
    encoded(of_folder(folder), Sample(text="abc"))
    with pytest.raises(TemplateRefused, match="which characters") as caught:
        of_folder(folder).rows(chat(*TWO), "")
    assert caught.value.field == "loss" and caught.value.cure
