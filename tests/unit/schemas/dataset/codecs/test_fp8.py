"""The quantization's bound over every bit pattern of the 16-bit dtypes and over samples of float32."""

import numpy as np
import pytest
import torch

from schemas.dataset.codecs.fp8 import (
    _QUANTIZED_ELEMENTS,
    LARGEST,
    LARGEST_CODE,
    SMALLEST_SCALE,
    VALUES,
    NotQuantizedError,
    Quantizer,
    dequantize,
    half_steps,
    misfits,
    scales_of,
)

DTYPES = ["bfloat16", "float16", "float32"]


def largest_of(states_TH: torch.Tensor) -> torch.Tensor:
    return states_TH.abs().amax(dim=1).float()


def quantized(states_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes_TH = torch.empty(states_TH.shape, dtype=torch.uint8)
    return codes_TH, Quantizer(states_TH.shape[1]).quantize(states_TH, largest_of(states_TH), codes_TH)


def patterns(dtype: torch.dtype) -> torch.Tensor:
    """Return finite values: all of a dtype of 16 bits, or as many of float32."""
    if dtype == torch.float32:
        draw = np.random.default_rng(0)
        bits = torch.from_numpy(draw.integers(0, 2**32, 2**16, dtype=np.uint32).view(np.int32))
    else:
        bits = torch.from_numpy(np.arange(2**16, dtype=np.uint16).view(np.int16))
    values = bits.view(dtype)
    return values[values.isfinite()]


def off_by(states_TH: torch.Tensor, codes_TH: torch.Tensor, scales_T: torch.Tensor) -> torch.Tensor:
    """Return the error of every value, float64, without the last rounding to the dtype."""
    stored = VALUES[codes_TH.int()].double() * scales_T.double()[:, None]
    return (stored - states_TH.double()).abs()


def most_off(states_TH: torch.Tensor, scales_T: torch.Tensor) -> torch.Tensor:
    """Return half an ulp of e4m3, by the format's definition, and what a quotient's rounding adds."""
    relative = states_TH.double().abs() / 17
    flat = scales_T.double()[:, None] * 2.0**-10
    return torch.maximum(relative, flat.expand_as(relative)) * (1 + 2.0**-16)


def test_the_table_is_the_formats_own_definition():
    for code, value in enumerate(VALUES.tolist()):
        sign, exponent, mantissa = -1.0 if code >> 7 else 1.0, code >> 3 & 0xF, code & 7
        if exponent == 15 and mantissa == 7:
            assert np.isnan(value)
        elif exponent == 0:
            assert value == sign * mantissa * 2.0**-9
        else:
            assert value == sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden_size", "alike"), [(1, False), (7, False), (64, False), (64, True)])
def test_every_value_is_within_half_an_ulp_of_what_was_captured_and_none_grows(dtype, hidden_size, alike):
    """Among any others, and among those of its own magnitude."""
    values = patterns(getattr(torch, dtype))
    random = torch.randperm(len(values), generator=torch.Generator().manual_seed(1))
    order = values.float().abs().argsort() if alike else random
    states_TH = values[order][: len(values) // hidden_size * hidden_size].view(-1, hidden_size)
    codes_TH, scales_T = quantized(states_TH)
    assert bool((off_by(states_TH, codes_TH, scales_T) <= most_off(states_TH, scales_T)).all())
    assert not bool(misfits(codes_TH, scales_T).any())
    assert bool(dequantize(codes_TH, scales_T, states_TH.dtype).isfinite().all())
    largest_T = largest_of(states_TH)
    grown_T = largest_of(dequantize(codes_TH, scales_T, torch.float32)) > largest_T
    assert bool((~grown_T | (largest_T < LARGEST * SMALLEST_SCALE)).all())


def test_a_product_is_exact_in_float32_so_that_it_is_rounded_once():
    largest = patterns(torch.float32).abs()
    scales_T = scales_of(largest)
    values = VALUES[: LARGEST_CODE + 1]
    due = values.double()[None] * scales_T.double()[:, None]
    normal = (due == 0) | (due >= 2.0**-126)
    assert torch.equal((values[None] * scales_T[:, None]).double()[normal], due[normal])


def test_a_token_of_zeros_is_zero_again():
    states_TH = torch.zeros(2, 8, dtype=torch.bfloat16)
    codes_TH, scales_T = quantized(states_TH)
    assert scales_T.tolist() == [SMALLEST_SCALE] * 2
    assert torch.equal(dequantize(codes_TH, scales_T, torch.bfloat16), states_TH)


@pytest.mark.parametrize(
    "shape", [(3, 3), (1, _QUANTIZED_ELEMENTS + 1), (70, 1000), (3, _QUANTIZED_ELEMENTS // 2)]
)
def test_a_token_has_its_own_scale_whatever_lies_beside_it_or_in_its_chunk(shape):
    states_TH = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    states_TH *= 10.0 ** torch.arange(len(states_TH))[:, None].remainder(7)
    codes_TH, scales_T = quantized(states_TH)
    for token in {0, len(states_TH) // 2, len(states_TH) - 1}:
        alone, scale = quantized(states_TH[token : token + 1])
        assert torch.equal(alone[0], codes_TH[token])
        largest = float(states_TH[token].abs().max())
        assert float(scale[0]) == float(scales_T[token]) == pytest.approx(largest / LARGEST, rel=2.0**-18)


def test_no_captured_value_lies_farther_than_its_half_step():
    values = patterns(torch.float16)
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(3))
    states_TH = values[order].view(-1, 62)
    codes_TH, scales_T = quantized(states_TH)
    off = off_by(states_TH, codes_TH, scales_T)
    for token, scale in enumerate(scales_T.tolist()):
        half_H = half_steps(codes_TH[token], scale)
        assert bool((off[token] <= half_H.double() * (1 + 2.0**-16)).all())


@pytest.mark.parametrize("shape", [(1, 1), (70, 1000), (2 * _QUANTIZED_ELEMENTS // 4096 + 1, 4096)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_that_replace_their_states_are_those_of_torchs_own_conversion(shape, dtype):
    states_TH = torch.randn(shape, generator=torch.Generator().manual_seed(6)).to(getattr(torch, dtype))
    scales_T = scales_of(largest_of(states_TH))
    expected_TH = (states_TH.float() * scales_T.reciprocal()[:, None]).to(torch.float8_e4m3fn)
    codes_TH = states_TH.view(torch.uint8).view(-1)[: states_TH.numel()].view(shape)
    got_T = Quantizer(shape[1]).quantize(states_TH, largest_of(states_TH), codes_TH)
    assert torch.equal(codes_TH, expected_TH.view(torch.uint8))
    assert torch.equal(got_T, scales_T)


class Wrong(Quantizer):
    """Stores one wrong code."""

    change = 0

    def _prove(self, halves_TH, codes_TH, begin):
        codes_TH[-1, -1] ^= self.change
        super()._prove(halves_TH, codes_TH, begin)


@pytest.mark.parametrize("change", [1, 2, 0x80])
@pytest.mark.parametrize("hidden_size", [8, 20_000])
def test_a_wrong_code_is_found_when_it_is_made(hidden_size, change):
    """The next code, the one after it, and that of the other sign."""
    states_TH = torch.randn((3, hidden_size), generator=torch.Generator().manual_seed(4)) + 3
    codes_TH = torch.empty(states_TH.shape, dtype=torch.uint8)
    wrong = Wrong(hidden_size)
    wrong.change = change
    with pytest.raises(NotQuantizedError, match="token"):
        wrong.quantize(states_TH, largest_of(states_TH), codes_TH)


def test_values_that_are_not_finite_never_pass():
    states_TH = torch.ones(3, _QUANTIZED_ELEMENTS // 2)
    states_TH[2, 7] = float("nan")
    with pytest.raises(NotQuantizedError, match="token 2"):
        quantized(states_TH)


def test_codes_and_scales_that_no_rounding_makes_are_told():
    codes_TH, scales_T = quantized(torch.randn((5, 16), generator=torch.Generator().manual_seed(5)))
    codes_TH[1][codes_TH[1] & 0x7F == LARGEST_CODE] -= 8
    codes_TH[2, 0] = 0x7F
    scales_T[3] = float("inf")
    scales_T[4] *= 1 + 2.0**-22
    assert misfits(codes_TH, scales_T).tolist() == [False, True, True, True, True]
