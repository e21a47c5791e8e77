"""Puts a target of random weights on disk: with vLLM's tiny dummy weights, layers round to equal states."""

from pathlib import Path

from benchmarks.workload import Target


def write_target(target: Target, folder: Path, max_tokens: int) -> None:
    """Write a Llama of this shape, for requests of `max_tokens`, in bfloat16 into `folder`.

    Its tokenizer has a word for each id: nothing is tokenized, but servers ask for one.
    """
    import torch
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
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
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    words = {f"w{number}": number for number in range(target.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
