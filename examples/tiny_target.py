"""Makes a small target: a tokenizer, a chat template and a model trained for one to three minutes on a CPU.

The text is `conversations.jsonl`, so the model's greedy answers read like Python's documentation and are not
noise: the generated samples, the masks and the logit check have something to be right about. The same recipe
gives the same target on the same machine; it is kept under `.cache/targets/` by the recipe's hash.
"""

import dataclasses
import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "targets"
CONVERSATIONS = Path(__file__).with_name("conversations.jsonl")

Arch = Literal["qwen3", "llama", "qwen3_moe"]

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}
{{- message.content or '' -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' + (call | tojson) + '</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>' -}}
{%- endgeneration -%}
{%- else -%}
{{- message.content + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

PLAIN_CHAT_TEMPLATE = CHAT_TEMPLATE.replace("{%- generation -%}\n", "").replace("{%- endgeneration -%}\n", "")
"""The same text without the marks that say what the model wrote: most published templates have none."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that decides a target. `hidden` is a multiple of 64; a step trains on `batch * window` tokens."""

    arch: Arch = "qwen3"
    layers: int = 8
    hidden: int = 128
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    vocab: int = 2048
    max_position: int = 2048
    chat_template: str = CHAT_TEMPLATE
    tied: bool = False
    seed: int = 0
    steps: int = 360
    batch: int = 4
    window: int = 256
    learning_rate: float = 3e-3


@dataclass(frozen=True, slots=True)
class Training:
    """Mean loss in nats a token over the first and the last ten steps."""

    loss_before: float
    loss_after: float
    tokens_seen: int


def conversations() -> list[list[dict[str, Any]]]:
    """Return the turns of every conversation of the demo."""
    return [json.loads(line)["messages"] for line in CONVERSATIONS.read_text().splitlines()]


def make_tokenizer(recipe: Recipe) -> "PreTrainedTokenizerFast":
    """Train a byte-level BPE of `recipe.vocab` tokens on the conversations."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    turns = (turn["content"] or "" for messages in conversations() for turn in messages)
    bpe.train_from_iterator(turns, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        model_max_length=recipe.max_position,
        chat_template=recipe.chat_template,
    )


def make_config(recipe: Recipe, tokenizer: "PreTrainedTokenizerFast") -> "PretrainedConfig":
    """Return the model's config: heads of 32, two query heads for each key-value head."""
    from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

    kinds = {"qwen3": Qwen3Config, "llama": LlamaConfig, "qwen3_moe": Qwen3MoeConfig}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": recipe.hidden * 2}
    return kinds[recipe.arch](
        vocab_size=recipe.vocab,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.hidden * 3,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.hidden // 32,
        num_key_value_heads=recipe.hidden // 64,
        head_dim=32,
        max_position_embeddings=recipe.max_position,
        tie_word_embeddings=recipe.tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **(experts if recipe.arch == "qwen3_moe" else {}),
    )


def make_model(recipe: Recipe, tokenizer: "PreTrainedTokenizerFast") -> "PreTrainedModel":
    """Return the untrained model in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(recipe.seed)
    return AutoModelForCausalLM.from_config(make_config(recipe, tokenizer), dtype=torch.float32)


def train(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerFast", recipe: Recipe) -> Training:
    """Train `model` in place on windows of the rendered conversations; the number of steps is fixed."""
    import torch

    rendered = [tokenizer.apply_chat_template(turns, tokenize=False) for turns in conversations()]
    token_ids = tokenizer([text + END_OF_TEXT for text in rendered])["input_ids"]
    stream = torch.tensor([token for ids in token_ids for token in ids])
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, recipe.steps))
    losses = []
    # One thread is nearly as fast on so small a model, and does not crawl where the cores have other work.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model.train()
    for batch in _batches(stream, recipe):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    torch.set_num_threads(threads)
    return Training(_mean(losses[:10]), _mean(losses[-10:]), recipe.steps * recipe.batch * recipe.window)


def _rate(step: int, steps: int) -> float:
    """Return the share of the learning rate: ten steps of warm-up, then a half cosine down to a twentieth."""
    return min((step + 1) / 10, 0.525 + 0.475 * math.cos(math.pi * step / steps))


def _batches(stream: "torch.Tensor", recipe: Recipe) -> Iterator["torch.Tensor"]:
    """Yield `[batch, window]` token ids cut from `stream` at seeded places."""
    import torch

    places = torch.Generator().manual_seed(recipe.seed)
    for _ in range(recipe.steps):
        starts = torch.randint(len(stream) - recipe.window, (recipe.batch,), generator=places)
        yield torch.stack([stream[start : start + recipe.window] for start in starts.tolist()])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def save(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerFast", recipe: Recipe, folder: Path
) -> None:
    """Write safetensors, configs, tokenizer and chat template to `folder`."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.to(getattr(torch, recipe.dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_target(folder: Path, recipe: Recipe) -> Training:
    """Make the trained target of `recipe` in `folder`."""
    tokenizer = make_tokenizer(recipe)
    model = make_model(recipe, tokenizer)
    training = train(model, tokenizer, recipe)
    save(model, tokenizer, recipe, folder)
    (folder / "training.json").write_text(json.dumps(dataclasses.asdict(training), indent=2) + "\n")
    return training


def cached_target(recipe: Recipe, cache: Path = CACHE) -> Path:
    """Return the folder of `recipe`'s target, made if it is missing; a half-made one never has that name."""
    digest = hashlib.sha256(CONVERSATIONS.read_bytes() + Path(__file__).read_bytes())
    digest.update(json.dumps(dataclasses.asdict(recipe), sort_keys=True).encode())
    folder = cache / f"{recipe.arch}-{digest.hexdigest()[:16]}"
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".making-", dir=cache))
    try:
        make_target(draft, recipe)
        draft.rename(folder)
    except OSError:
        if not folder.exists():  # else another process was first, with the same target
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder
