"""Puts a target of random weights on disk: with vLLM's tiny dummy weights, layers round to equal states."""

from pathlib import Path

from benchmarks.workload import Target

LARGE = 2**27
"""Weights of a matrix of all layers: more of them are drawn by the GPU, where there is one."""
MORE = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768},
    "gemma3_text": {"sliding_window": 256, "sliding_window_pattern": 2},
}
"""What an architecture's config needs besides."""


def write_target(
    target: Target, folder: Path, max_tokens: int, architecture: str = "llama", dtype: str = "bfloat16"
) -> None:
    """Write a model of this shape, for requests of `max_tokens`, into `folder`.

    A GPU makes a large one if there is one.
    Weights of norms are spread, so that a missing norm shows. The tokenizer has a word for each id: nothing
    is tokenized, but servers ask for one.
    """
    import torch
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        architecture,
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_hidden_layers=target.num_layers,
        num_attention_heads=target.num_heads,
        num_key_value_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        max_position_embeddings=2 * max_tokens,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,  # its embedding would be zero
        **MORE.get(architecture, {}),
    )
    is_large = target.num_layers * target.hidden_size * target.intermediate_size > LARGE
    with torch.device("cuda" if is_large and torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    del model, weight
    # torch would keep the memory that an engine on the same GPU needs.
    torch.cuda.empty_cache()
    words = {f"w{number}": number for number in range(target.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
