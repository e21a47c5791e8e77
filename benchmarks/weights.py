"""Puts a target of random weights on disk: with vLLM's tiny dummy weights, layers round to equal states."""

from pathlib import Path

from benchmarks.workload import Target


def write_target(target: Target, folder: Path) -> None:
    """Write config and bfloat16 weights of a Llama of this shape into `folder`; no row needs a tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig
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
        max_position_embeddings=2 * target.longest_prompt,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
