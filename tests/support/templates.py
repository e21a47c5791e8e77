"""Small fast tokenizers, and chat templates that mark turns in the ways that the field's templates do."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

MARKS = (
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "[INST]",
    "[/INST]",
    "<|start|>",
    "<|message|>",
    "<|end|>",
    "<|return|>",
)
SAMPLE_TEXT = (
    json.__doc__ or "",
    *(f"the answer is {word}\n\n" for word in ("user", "assistant", "system", "think")),
)

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""A newline follows each end mark."""

CALLING = CHATML.replace("message.content +", "message.content + (message.tool_calls or '') | tojson +")
"""Writes calls."""

LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {{- message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
"""Nothing follows the end mark; content is trimmed."""

MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}
    {%- else %}{{ ' ' + message.content + eos_token }}{% endif %}
{%- endfor %}"""
"""Has no generation prompt: an answer follows the user's turn directly."""

QWEN3 = """\
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last_query = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or message.reasoning_content) %}
            {{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n' + call.function.name + ' ' }}
            {{- call.function.arguments | tojson + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Drops the reasoning of every turn before the last question; knows tools."""

QWEN3_THINKING = QWEN3.replace(
    "{{ '<|im_start|>assistant\\n' }}{% endif %}", "{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)
"""The generation prompt opens the reasoning, which earlier turns do not have."""

HARMONY = """\
{%- for message in messages %}
    {{- '<|start|>' + message.role + '<|message|>' + message.content }}
    {{- '<|return|>' if loop.last and message.role == 'assistant' else '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
"""The last turn ends with another mark than earlier ones."""

GENERATION = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
    {%- else %}{{ message.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Says itself what the assistant writes."""

TRAILER = CHATML + "{% if not add_generation_prompt %}{{ 'That was all.' }}{% endif %}"
"""Appends text at the very end, behind the last end mark."""

UNMARKED_TRAILER = TRAILER.replace("<|im_end|>", "")
"""Appends text at the very end, and has no end mark that it could be told from."""

STRIPPED_REASONING = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""
"""Asks for reasoning that it then leaves out of the last turn too: no rendering follows its own prompt."""

NEEDS_REASONING = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- if message.reasoning_content %}{{ '<think>\\n' + message.reasoning_content + '\\n</think>' }}
        {%- else %}{{ '<think></think>' }}{% endif %}
    {%- endif %}
    {{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""
"""Follows its own prompt only where an answer has reasoning."""

KEEPS_REASONING = NEEDS_REASONING.replace("assistant\\n<think>\\n' }}", "assistant\\n' }}")
"""Renders the reasoning of every turn, or an empty one."""

STRICT_ROLES = (
    """\
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {%- endif %}
{%- endfor %}"""
    + CHATML
)

DATED = "{{ strftime_now('%Y-%m-%d') }}" + CHATML


@cache
def _tokenizer_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(SAMPLE_TEXT, trainer)
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    return tokenizer.to_str()


def write_target(folder: Path, template: str | None = CHATML, **config: Any) -> Path:
    """Write config, tokenizer and template of a model without weights; `config` overrides `config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_tokenizer_json()), bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    told = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 8,
        "hidden_size": 64,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 2048,
        "dtype": "bfloat16",
    } | config
    (folder / "config.json").write_text(json.dumps({k: v for k, v in told.items() if v is not None}))
    return folder
