"""The target's final norm: turns a pre-norm state into the input of the model's own head. Imports torch.

Legend: T tokens, H hidden size.
"""

from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from schemas.dataset.errors import DatasetError
from schemas.dataset.files import RangeFile
from schemas.identity import FinalNorm
from schemas.names import FINAL_NORM_PATH

MAX_BYTES = 2**24
"""Maximum size of a final norm's file: weight and bias are two vectors [H]."""


@dataclass(frozen=True, slots=True)
class NormWeights:
    """The final norm as stored in the checkpoint, [H] each; a norm without a weight has a weight of ones."""

    norm: FinalNorm
    weight_H: torch.Tensor
    bias_H: torch.Tensor | None

    def __call__(self, states_TH: torch.Tensor) -> torch.Tensor:
        """Return the post-norm states [T, H] in the dtype of `states_TH`, rounded where the engines round.

        RMSNorm rounds before multiplying by the weight; Gemma's RMSNorm and LayerNorm round only at the end.
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

    def is_that_of(self, other: "NormWeights", dtype: torch.dtype) -> bool:
        """Return whether both norms are the same when their weights are rounded to `dtype`."""
        if (self.norm, self.bias_H is None) != (other.norm, other.bias_H is None):
            return False
        pairs = [(self.weight_H, other.weight_H)]
        if self.bias_H is not None and other.bias_H is not None:
            pairs.append((self.bias_H, other.bias_H))
        return all(torch.equal(own_H.to(dtype), theirs_H.to(dtype)) for own_H, theirs_H in pairs)

    @property
    def centres(self) -> bool:
        """Whether the norm subtracts the mean."""
        return self.norm.kind == "layernorm"

    def centred(self, states_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the centred states [T, H] and the inverse of their root mean square [T, 1], in float32."""
        x_TH = states_TH.float()
        if self.centres:
            x_TH = x_TH - x_TH.mean(dim=-1, keepdim=True)
        return x_TH, torch.rsqrt(x_TH.pow(2).mean(dim=-1, keepdim=True) + self.norm.eps)


def norm_bytes(weights: NormWeights) -> bytes:
    """Return the safetensors file of a final norm: the same norm gives the same bytes.

    Its metadata has `final_norm`, the JSON of `FinalNorm`, as its only key, because safetensors writes
    several keys in arbitrary order.
    """
    tensors = {"weight": weights.weight_H} | ({} if weights.bias_H is None else {"bias": weights.bias_H})
    content: bytes = save(tensors, metadata={"final_norm": weights.norm.model_dump_json()})
    return content


def read_norm_file(file: RangeFile, norm: FinalNorm, hidden_size: int) -> NormWeights:
    """Read a file written by `norm_bytes`. Raises DatasetError, OSError."""
    if file.num_bytes > MAX_BYTES:
        raise DatasetError(
            f"{FINAL_NORM_PATH} has {file.num_bytes} bytes; a final norm has at most {MAX_BYTES}"
        )
    try:
        tensors: dict[str, torch.Tensor] = load(file.read(0, file.num_bytes).tobytes())
    except (SafetensorError, EOFError, KeyError) as error:  # KeyError: torch has no such dtype
        raise DatasetError(f"{FINAL_NORM_PATH} is not a safetensors file: {error}") from error
    shapes = {key: list(tensor.shape) for key, tensor in tensors.items()}
    if "weight" not in shapes or any(shape != [hidden_size] for shape in shapes.values()):
        raise DatasetError(f"{FINAL_NORM_PATH} holds {shapes}, expected a weight of [{hidden_size}]")
    if not all(tensor.is_floating_point() for tensor in tensors.values()):
        dtypes = {key: str(tensor.dtype) for key, tensor in tensors.items()}
        raise DatasetError(f"{FINAL_NORM_PATH} holds {dtypes}, expected floating-point numbers")
    return NormWeights(norm, tensors["weight"], tensors.get("bias"))
