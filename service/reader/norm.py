"""The target's final norm, so that a pre-norm state becomes what the model's own head sees.

Legend: T tokens, H hidden size.
"""

import json
from dataclasses import dataclass

import torch

from service.reader.errors import ReaderError
from service.reader.files import Files
from service.reader.shard import About

FINAL_NORM_FILE = "final_norm.safetensors"


@dataclass(frozen=True, slots=True)
class FinalNorm:
    """`kind` is `rmsnorm`, `gemma_rmsnorm` (multiplies by 1 + weight) or `layernorm`; weights are [H]."""

    kind: str
    eps: float
    weight_H: torch.Tensor | None
    bias_H: torch.Tensor | None

    def __call__(self, states_TH: torch.Tensor) -> torch.Tensor:
        """Return the post-norm states [T, H] in the dtype given, rounded where the engines round.

        An RMSNorm rounds before it multiplies by its weight; Gemma's and LayerNorm only at the end.
        """
        dtype = states_TH.dtype
        x_TH = states_TH.float()
        if self.kind == "layernorm":
            x_TH = x_TH - x_TH.mean(dim=-1, keepdim=True)
        x_TH = x_TH * torch.rsqrt(x_TH.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        if self.kind == "rmsnorm":
            x_TH = x_TH.to(dtype)
        if self.weight_H is not None:
            weight_H = self.weight_H.to(x_TH.dtype)
            x_TH = x_TH * (1.0 + weight_H if self.kind == "gemma_rmsnorm" else weight_H)
        if self.bias_H is not None:
            x_TH = x_TH + self.bias_H.to(x_TH.dtype)
        return x_TH.to(dtype)


def read_final_norm(files: Files, about: About) -> FinalNorm:
    """Read the dataset's `final_norm.safetensors`. Raises ReaderError."""
    tensors = _safetensors(files)
    return FinalNorm(about.norm_kind, about.norm_eps, tensors.get("weight"), tensors.get("bias"))


_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def _safetensors(files: Files) -> dict[str, torch.Tensor]:
    """Read a small safetensors file: 8 bytes of header length, a JSON header, the tensors' bytes."""
    file = files.open(FINAL_NORM_FILE)
    length = torch.empty(8, dtype=torch.uint8)
    file.read_into(length.view(1, -1), 0)
    header_bytes = int.from_bytes(bytes(length.tolist()), "little")
    if header_bytes > 2**20:
        raise ReaderError(f"{FINAL_NORM_FILE} is no safetensors file")
    header = torch.empty(header_bytes, dtype=torch.uint8)
    file.read_into(header.view(1, -1), 8)
    tensors = {}
    for name, about in json.loads(bytes(header.tolist())).items():
        if name == "__metadata__":
            continue
        begin, end = about["data_offsets"]
        raw = torch.empty(end - begin, dtype=torch.uint8)
        file.read_into(raw.view(1, -1), 8 + header_bytes + begin)
        tensors[name] = raw.view(_DTYPES[about["dtype"]]).view(about["shape"])
    return tensors
