"""The target's final norm: makes of a pre-norm state what the model's own head is fed. Imports torch.

Legend: T tokens, H hidden size.
"""

from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from schemas.dataset.errors import DatasetError
from schemas.dataset.files import RangeFile
from schemas.identity import FinalNorm

MAX_BYTES = 2**24
"""Of a file of the final norm: its weight and bias are two vectors [H]."""


@dataclass(frozen=True, slots=True)
class NormWeights:
    """The final norm as the checkpoint stores it, [H] each; one without a weight has a weight of ones."""

    norm: FinalNorm
    weight_H: torch.Tensor
    bias_H: torch.Tensor | None

    def __call__(self, states_TH: torch.Tensor) -> torch.Tensor:
        """Return the post-norm states [T, H] in the dtype given, rounded where the engines round.

        An RMSNorm rounds before it multiplies by its weight; Gemma's and LayerNorm only at the end.
        """
        dtype, kind = states_TH.dtype, self.norm.kind
        centred_TH, inverse_T1 = self.centred(states_TH)
        x_TH = centred_TH * inverse_T1
        if kind == "rmsnorm":
            x_TH = x_TH.to(dtype)
        weight_H = self.weight_H.to(x_TH.dtype)
        x_TH = x_TH * (1.0 + weight_H if kind == "gemma_rmsnorm" else weight_H)
        if self.bias_H is not None:
            x_TH = x_TH + self.bias_H.to(x_TH.dtype)
        return x_TH.to(dtype)

    @property
    def centres(self) -> bool:
        """Say whether the norm takes the mean away."""
        return self.norm.kind == "layernorm"

    def centred(self, states_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the centred states [T, H] and the inverse of their root mean square [T, 1], in float32."""
        x_TH = states_TH.float()
        if self.centres:
            x_TH = x_TH - x_TH.mean(dim=-1, keepdim=True)
        return x_TH, torch.rsqrt(x_TH.pow(2).mean(dim=-1, keepdim=True) + self.norm.eps)


def norm_bytes(weights: NormWeights) -> bytes:
    """Return the safetensors file of a final norm: the same norm gives the same bytes.

    Its metadata holds `final_norm`, the JSON of `FinalNorm`, as its only key, because safetensors writes
    several in any order.
    """
    tensors = {"weight": weights.weight_H} | ({} if weights.bias_H is None else {"bias": weights.bias_H})
    content: bytes = save(tensors, metadata={"final_norm": weights.norm.model_dump_json()})
    return content


def read_norm_file(file: RangeFile, name: str, norm: FinalNorm, hidden_size: int) -> NormWeights:
    """Read what `norm_bytes` made, from a file called `name`. Raises DatasetError, OSError."""
    if file.num_bytes > MAX_BYTES:
        raise DatasetError(f"{name} has {file.num_bytes} bytes; a final norm has at most {MAX_BYTES}")
    try:
        tensors: dict[str, torch.Tensor] = load(file.read(0, file.num_bytes).tobytes())
    except (SafetensorError, EOFError, KeyError) as error:  # the last: torch has no such dtype
        raise DatasetError(f"{name} is not a safetensors file: {error}") from error
    shapes = {key: list(tensor.shape) for key, tensor in tensors.items()}
    if "weight" not in shapes or any(shape != [hidden_size] for shape in shapes.values()):
        raise DatasetError(f"{name} holds {shapes}, expected a weight of [{hidden_size}]")
    return NormWeights(norm, tensors["weight"], tensors.get("bias"))
