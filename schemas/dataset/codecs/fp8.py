"""The lossy `fp8` encoding of a layer: an 8-bit code for every element, and a float32 scale for every token.

Codes are E4M3 of Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv:2209.05433), standardized by
OCP's "8-bit Floating Point Specification" and called `float8_e4m3fn` in torch: a sign, 4 exponent bits with
bias 7, 3 mantissa bits; no infinities, a maximum of 448, one NaN per sign; below 2^-6 in even steps of 2^-9.

A token's scale is its largest magnitude divided by 448, truncated to 20 significant bits, at least 2^-126. So

- nothing overflows: no code is larger than 448, and no product of code and scale than the largest magnitude
  (unless all are below 2^-117);
- a product of 4 and 20 bits is exact in float32, unless it is below 2^-126 where float32 has fewer: what is
  read is rounded once, to the model's dtype;
- a value is off by 1/17 of itself at most, or by 2^-10 of its token's scale where that is more.

`Quantizer` decodes its codes, and checks that every value is within half a step of its code, with a tolerance
of a 128th of that, or half that tolerance at the top of a binade.

Imports torch: import it lazily. Legend: T tokens, H hidden size.
"""

import numpy as np
import torch

from schemas.dataset.memory import scratch

LARGEST = 448.0
LARGEST_CODE = 0x7E
SMALLEST_SCALE = 2.0**-126
_CUT_BITS = 4
"""How many of a float32's 24 significant bits are truncated; a code has 4, so no product needs more
than 24.
"""
_HALF_STEP = 64
"""Half the distance of two codes, in units in the last place of float16 values that are 2^8 times smaller."""
_CHUNK_ELEMENTS = 32_768
"""What is read at a time: torch does not parallelize operations on so few elements."""
_QUANTIZED_ELEMENTS = 1_048_576
"""What is written at a time: so much that the threads of a process seldom meet at its interpreter lock, which
they take after every call. On a virtual machine, eight threads in a process that launches a GPU's kernels
quantized 0.22 GB of states a second in pieces of 32,768 elements, and 0.79 in pieces of 262,144.
"""
VALUES = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()
"""The value of each code."""


class NotQuantizedError(ValueError):
    """A code times its scale is farther from the captured value than rounding explains."""


def scales_of(largest_T: torch.Tensor) -> torch.Tensor:
    """Return the scales, float32 [T], of tokens with these largest magnitudes, float32 [T] and finite."""
    scales_T = (largest_T / LARGEST).contiguous()
    scales_T.view(torch.int32).bitwise_and_(-(1 << _CUT_BITS))
    return scales_T.clamp_(min=SMALLEST_SCALE)


def dequantize(codes_TH: torch.Tensor, scales_T: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the states [T, H] of `dtype`, each a code times its token's scale, rounded once.

    `codes_TH` is uint8, `scales_T` float32. Uses one chunk of memory besides the states.
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
    """Return how far each captured value [H] of a token may be from its code times `scale`: float32.

    That is half a step of the code. If only one value has the largest code, it is nearer, since it determined
    the scale.
    """
    codes_H = codes_H.int()
    exponents_H = ((codes_H >> 3) & 0xF).clamp(min=1)
    half_H = torch.ldexp(torch.full(codes_H.shape, scale), exponents_H - 11)
    alone = (codes_H & 0x7F) == LARGEST_CODE
    if scale > SMALLEST_SCALE and int(alone.sum()) == 1:
        half_H = torch.where(alone, LARGEST * scale * 2.0**-19, half_H)
    return half_H


def misfits(codes_TH: torch.Tensor, scales_T: torch.Tensor) -> torch.Tensor:
    """Return the tokens, bool [T], that no `Quantizer` can have produced.

    A valid scale is finite and has 20 significant bits; a token's largest code is 448, unless the scale is
    the smallest; no code is NaN.
    """
    largest_T = (codes_TH & 0x7F).amax(dim=1)
    smallest_T = scales_T == SMALLEST_SCALE
    cut_T = (scales_T.contiguous().view(torch.int32) & ((1 << _CUT_BITS) - 1)) == 0
    right_T = scales_T.isfinite() & (scales_T >= SMALLEST_SCALE) & cut_T
    return ~(right_T & ((largest_T == LARGEST_CODE) | (smallest_T & (largest_T < LARGEST_CODE))))


class Quantizer:
    """Quantizes layers of one hidden size and checks the result, in scratch memory of its thread.

    Torch should have one thread there (`torch.set_num_threads`): it would divide each step among all cores.
    """

    def __init__(self, hidden_size: int) -> None:
        self._step = max(1, _QUANTIZED_ELEMENTS // hidden_size)

        def chunk(purpose: str, dtype: torch.dtype) -> torch.Tensor:
            memory = torch.from_numpy(scratch(purpose, self._step * hidden_size * dtype.itemsize))
            return memory.view(dtype).view(self._step, hidden_size)

        self._wide_TH, self._found_TH = chunk("wide", torch.float32), chunk("found", torch.float32)
        self._halves_TH, self._bits_TH = chunk("halves", torch.float16), chunk("bits", torch.int16).numpy()

    def quantize(
        self, states_TH: torch.Tensor, largest_T: torch.Tensor, codes_TH: torch.Tensor
    ) -> torch.Tensor:
        """Fill `codes_TH`, uint8 [T, H], from finite states [T, H]; return the scales, float32 [T].

        Both are contiguous. `codes_TH` may start at the same address as the states, and then overwrites them.
        `largest_T` are each token's largest magnitudes, float32. Raises NotQuantizedError if a token cannot
        be restored within its rounding.
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
        """Decode what will be stored, and compare it to the captured values, both as float16 scaled by 2^-8.

        Exponent and mantissa of a code are those of such a float16, including subnormals, and the difference
        of two float16's bits is in units in the last place: only 16 bits per value to compare, not 32.
        """
        bits_TH = self._bits_TH[: len(codes_TH)]
        np.copyto(bits_TH, codes_TH.numpy().view(np.int8))
        np.left_shift(bits_TH, 7, out=bits_TH)
        np.bitwise_and(bits_TH, ~0x4000, out=bits_TH)
        np.subtract(halves_TH.numpy().view(np.int16), bits_TH, out=bits_TH)
        np.add(bits_TH, _HALF_STEP, out=bits_TH)
        # As unsigned integers, negative values are large, also after an overflow, and so are NaNs.
        off_TH = bits_TH.view(np.uint16)
        if off_TH.max() > 2 * _HALF_STEP:
            token = begin + int((off_TH > 2 * _HALF_STEP).any(axis=1).argmax())
            raise NotQuantizedError(f"token {token} does not come back from fp8 within its rounding")
