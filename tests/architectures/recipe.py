"""What a tiny model is made from."""

from dataclasses import dataclass, field
from typing import Any, Literal

from schemas.request import Dtype

HIDDEN_SIZE, NUM_LAYERS, VOCAB_SIZE, MAX_POSITION, WINDOW = 128, 8, 512, 512, 64

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 256,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_POSITION,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
"""Given to each config class as far as it knows the key; a recipe's own keys come over it."""

Loader = Literal["AutoModelForCausalLM", "AutoModelForImageTextToText"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model whose `config.json` says architecture `name`; `variant` tells two of one architecture apart.

    `config` goes to the config class of `model_type`, `text` to its language part where it has one. `dtype`
    is another one than float32 where the engine's CPU build has no kernel for that. `first_layer` is 1 where
    the engine cannot return the embeddings. `options` are the engine's, `loader` is transformers' class;
    `made_by` is the import path of a function that writes the model, where transformers cannot.
    """

    name: str
    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    text: dict[str, Any] | None = None
    variant: str = ""
    dtype: Dtype = "float32"
    first_layer: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    loader: Loader = "AutoModelForCausalLM"
    made_by: str = ""
    num_layers: int = NUM_LAYERS
    note: str = ""

    @property
    def key(self) -> str:
        """The row's name in the table."""
        return f"{self.name}, {self.variant}" if self.variant else self.name
