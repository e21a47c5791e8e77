"""The lossy `fp8` form of a layer: a code of 8 bits for every element, and one float32 scale for every token.

Codes are E4M3 of Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv:2209.05433), which OCP's "8-bit
Floating Point Specification" made a standard and torch calls `float8_e4m3fn`: a sign, 4 bits of exponent with
bias 7, 3 of mantissa; no infinities, 448 the largest, one NaN a sign; below 2^-6 in even steps of 2^-9.

A token's scale is its largest magnitude over 448, cut to 20 significant bits and at least 2^-126. So

- nothing overflows: no code is larger than 448, and no product of code and scale than the largest magnitude
  (unless all are below 2^-117);
- a product of 4 and 20 bits is exact in float32, unless it is below 2^-126 where float32 has fewer: what is
  read is rounded once, to the model's dtype;
- a value is off by 1/17 of itself at most, or by 2^-10 of its token's scale where that is more.

`Quantizer` decodes what it has made, and holds every value against half a step of its code: to within a 128th
of that, and at the top of a binade to half of that last bound.

Imports torch: import it lazily. Legend: T tokens, H hidden size.
"""

import numpy as np
import torch

LARGEST = 448.0
LARGEST_CODE = 0x7E
SMALLEST_SCALE = 2.0**-126
_CUT_BITS = 4
"""Of a float32's 24 significant bits; a code has 4, and so no product needs more than 24."""
_HALF_STEP = 64
"""Half of the distance of two codes, in last places of the float16 that are 2^8 times less."""
_CHUNK_ELEMENTS = 32_768
"""Torch shares no operation of so few elements among threads, and the scratch stays in the core's cache."""
VALUES = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()
"""The value of each code."""


class NotQuantizedError(ValueError):
    """A code times its scale is farther from what was captured than rounding explains."""


def scales_of(largest_T: torch.Tensor) -> torch.Tensor:
    """Return the scales float32 [T] of tokens whose largest magnitudes are float32 [T], finite."""
    scales_T = (largest_T / LARGEST).contiguous()
    scales_T.view(torch.int32).bitwise_and_(-(1 << _CUT_BITS))
    return scales_T.clamp_(min=SMALLEST_SCALE)


def dequantize(codes_TH: torch.Tensor, scales_T: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the states [T, H] of `dtype`, each a code times its token's scale, rounded once.

    `codes_TH` is uint8, `scales_T` float32. Memory beside the states: one chunk.
    """
    num_tokens, hidden_size = codes_TH.shape
    out_TH = torch.empty((num_tokens, hidden_size), dtype=dtype, device="cpu")
    step = max(1, _CHUNK_ELEMENTS // hidden_size)
    for begin in range(0, num_tokens, step):
        part = slice(begin, begin + step)
        values = VALUES.index_select(0, codes_TH[part].reshape(-1).int()).view(-1, hidden_size)
        out_TH[part] = values.mul_(scales_T[part, None])
    return out_TH


def half_steps(codes_H: torch.Tensor, scale: float) -> torch.Tensor:
    """Return how far each captured value [H] of a token may lie from its code times `scale`: float32.

    That is half a step of the code. The largest magnitude, if one value has its code alone, lies nearer: it
    made the scale.
    """
    codes_H = codes_H.int()
    exponents_H = ((codes_H >> 3) & 0xF).clamp(min=1)
    half_H = torch.ldexp(torch.full(codes_H.shape, scale), exponents_H - 11)
    alone = (codes_H & 0x7F) == LARGEST_CODE
    if scale > SMALLEST_SCALE and int(alone.sum()) == 1:
        half_H = torch.where(alone, LARGEST * scale * 2.0**-19, half_H)
    return half_H


def misfits(codes_TH: torch.Tensor, scales_T: torch.Tensor) -> torch.Tensor:
    """Return the tokens, bool [T], that no `Quantizer` made.

    A scale is finite and of 20 bits; a token's largest code is 448, unless the scale is the smallest, and
    none is NaN.
    """
    largest_T = (codes_TH & 0x7F).amax(dim=1)
    smallest_T = scales_T == SMALLEST_SCALE
    cut_T = (scales_T.contiguous().view(torch.int32) & ((1 << _CUT_BITS) - 1)) == 0
    right_T = scales_T.isfinite() & (scales_T >= SMALLEST_SCALE) & cut_T
    return ~(right_T & ((largest_T == LARGEST_CODE) | (smallest_T & (largest_T < LARGEST_CODE))))


class Quantizer:
    """Quantizes layers of one hidden size, and proves it; owns its scratch. Lives on one thread."""

    def __init__(self, hidden_size: int) -> None:
        """Make scratch for a chunk of tokens."""
        self._step = max(1, _CHUNK_ELEMENTS // hidden_size)
        shape = (self._step, hidden_size)
        # Named, because an engine may have another device for what is made without one.
        self._wide_TH, self._found_TH = (torch.empty(shape, device="cpu") for _ in range(2))
        self._halves_TH = torch.empty(shape, dtype=torch.float16, device="cpu")
        self._bits_TH = np.empty(shape, np.int16)

    def quantize(
        self, states_TH: torch.Tensor, largest_T: torch.Tensor, codes_TH: torch.Tensor
    ) -> torch.Tensor:
        """Fill `codes_TH`, uint8 [T, H], from finite states [T, H]; return the scales, float32 [T].

        Both are contiguous. `codes_TH` may begin where the states do, and then replaces them. `largest_T` are
        each token's largest magnitudes, float32. Raises NotQuantizedError for a token that does not come back
        as it must.
        """
        scales_T = scales_of(largest_T)
        inverses_T, halved_T = scales_T.reciprocal(), (scales_T * 2.0**8).reciprocal_()
        whole = (states_TH, inverses_T[:, None], halved_T[:, None], codes_TH)
        for number, (part_TH, inverses_T1, halved_T1, part_codes_TH) in enumerate(
            zip(*(torch.split(one, self._step) for one in whole), strict=True)
        ):
            wide_TH, found_TH, halves_TH = self._wide_TH, self._found_TH, self._halves_TH
            if (size := len(part_TH)) < self._step:
                wide_TH, found_TH, halves_TH = wide_TH[:size], found_TH[:size], halves_TH[:size]
            wide_TH.copy_(part_TH)
            part_codes_TH.view(torch.float8_e4m3fn).copy_(torch.mul(wide_TH, inverses_T1, out=found_TH))
            halves_TH.copy_(wide_TH.mul_(halved_T1))
            self._prove(halves_TH, part_codes_TH, number * self._step)
        return scales_T

    def _prove(self, halves_TH: torch.Tensor, codes_TH: torch.Tensor, begin: int) -> None:
        """Decode what will be stored, and hold it against what was captured, 2^8 times less and as float16.

        Exponent and mantissa of a code are those of such a float16, the even steps too, and a float16's bits
        count its last places: 16 bits a value to compare, not 32.
        """
        bits_TH = self._bits_TH[: len(codes_TH)]
        np.copyto(bits_TH, codes_TH.numpy().view(np.int8))
        np.left_shift(bits_TH, 7, out=bits_TH)
        np.bitwise_and(bits_TH, ~0x4000, out=bits_TH)
        np.subtract(halves_TH.numpy().view(np.int16), bits_TH, out=bits_TH)
        np.add(bits_TH, _HALF_STEP, out=bits_TH)
        # Without a sign what is negative is large, also after an overflow, and so is a NaN.
        off_TH = bits_TH.view(np.uint16)
        if off_TH.max() > 2 * _HALF_STEP:
            token = begin + int((off_TH > 2 * _HALF_STEP).any(axis=1).argmax())
            raise NotQuantizedError(f"token {token} does not come back from fp8 within its rounding")
