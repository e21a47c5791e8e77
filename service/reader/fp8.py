"""States from the codes and scales of the lossy `fp8` form: their product, rounded once to the model's dtype.

Codes are OCP's E4M3 (torch's float8_e4m3fn), one byte an element; scales are one float32 a token, cut so that
every product is exact in float32.

Legend: T tokens, H hidden size.
"""

import torch

SCALE_BYTES = 4
_CHUNK_ELEMENTS = 32_768
"""Multiplied at a time: what lies between the steps stays in a core's cache."""
_VALUES = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()
"""What each code stands for; torch takes one apart five times as long as it takes to look it up."""


def multiply(codes_TH: torch.Tensor, scales_T: torch.Tensor, out_TH: torch.Tensor) -> None:
    """Fill `out_TH` [T, H], of any float dtype, from codes, uint8 [T, H], and scales, float32 [T]."""
    num_tokens, hidden_size = codes_TH.shape
    step = max(1, _CHUNK_ELEMENTS // hidden_size)
    for begin in range(0, num_tokens, step):
        part = slice(begin, begin + step)
        values = _VALUES.index_select(0, codes_TH[part].reshape(-1).int()).view(-1, hidden_size)
        out_TH[part] = values.mul_(scales_T[part, None])
