"""The target's final norm and output head on CPU, and how far two right computations of a logit may differ.

Imports torch: import it lazily. The model itself is never read.

Legend: N rows, H hidden size, V vocabulary, C a slice of the vocabulary.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import save

from schemas.identity import FinalNorm
from schemas.request import Dtype
from service.errors import EngineRefused
from service.head_weights import HeadWeights, NormWeights, read_head, read_norm, text_config

_SIGMAS = 8.0
_SLICE_ELEMENTS = 2**24
_FLOAT32_ROUNDOFF = 2.0**-24


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of the next token, and for each logit the error that rounding explains; float32.

    The bound is derived from the dtype and the weights, not fitted to data. With u the dtype's unit roundoff,
    z = sum_j w_j y_j a logit of the normed state y, and s_j the share of y_j that comes from the stored state
    x_j (for an RMSNorm s = y):

    - independent: rounding the stored state, and the normed state thrice (before and after its weight in the
      engine, once here), each moves element j by a uniform error of at most u. They add up to a Gaussian of
      variance u^2/3 sum_j w_j^2 (s_j^2 + 3 y_j^2); 8 sigma of it is not met in 1e14 logits.
    - common: the rounding of a few massive elements of x moves the norm's divisor, hence z, by at most u |z|;
      z is stored in the dtype, u |z|; a matmul that is split over H may add up its parts in the dtype,
      u (|z| + S) with S^2 = sum_j (w_j y_j)^2. A soft cap rounds three times more, a scale once.
    - accumulation: H additions in float32 on either side walk sqrt(2 H) 2^-24 (|z| + S), as one sigma.
    """

    values_NV: torch.Tensor
    logit_bounds_NV: torch.Tensor

    def bound(self, row: int, token: int) -> float:
        """Return how far row `row`'s log-probability of `token` may be from another right computation of it.

        That is the logit's own error, and that of the log of the sum over all: log sum_v p_v exp(bound_v).
        """
        bounds_V = self.logit_bounds_NV[row]
        return float(bounds_V[token] + torch.logsumexp(self.values_NV[row] + bounds_V, dim=0))

    def may_swap(self, row: int, first: int, second: int) -> bool:
        """Say whether rounding may have swapped the order of two tokens' logits in row `row`."""
        gap = abs(float(self.values_NV[row, first] - self.values_NV[row, second]))
        return gap <= float(self.logit_bounds_NV[row, first] + self.logit_bounds_NV[row, second])


class Head:
    """Final norm and output head of one model, in the dtype that the engine runs it in."""

    def __init__(self, norm: NormWeights, head: HeadWeights, dtype: Dtype) -> None:
        """Cast the stored weights like the engine does. Raises EngineRefused if their shapes do not fit."""
        if norm.weight_H.shape != head.weight_VH.shape[1:]:
            shapes = f"final norm {list(norm.weight_H.shape)}, output head {list(head.weight_VH.shape)}"
            raise EngineRefused(f"shapes that do not fit: {shapes}", field="model")
        self.final_norm: FinalNorm = norm.norm
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.norm_weight = norm.weight_H.to(self.dtype)
        self._norm_bias_H = None if norm.bias_H is None else norm.bias_H.to(self.dtype)
        self._weight_VH = head.weight_VH.to(self.dtype)
        self._bias_V = None if head.bias_V is None else head.bias_V.to(self.dtype)
        self._scale, self._soft_cap = head.scale, head.soft_cap

    @classmethod
    def load(cls, folder: Path, dtype: Dtype) -> Self:
        """Read final norm and head from the safetensors files in `folder`. Raises EngineRefused."""
        config = text_config(folder)
        return cls(read_norm(folder, config), read_head(folder, config), dtype)

    @property
    def vocab_size(self) -> int:
        """V, the config's, without the padding a checkpoint may hold."""
        return len(self._weight_VH)

    def logprobs(self, rows_NH: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities [N, V] of the next token, float32, from pre-norm states [N, H]."""
        return self.logprobs_with_bounds(rows_NH).values_NV

    def logprobs_with_bounds(self, rows_NH: torch.Tensor) -> Logprobs:
        """Return what pre-norm states [N, H] say of the next token, and how surely.

        The norm runs in float32 and its result is rounded to the dtype; the matmul runs in float32.
        """
        normed_NH, share_NH = self._norm(rows_NH)
        variance_NH = share_NH.square() + 3 * normed_NH.square()
        logits, bounds = zip(*self._slices(normed_NH, variance_NH), strict=True)
        logits_NV = torch.cat(logits, dim=1)
        return Logprobs(torch.log_softmax(logits_NV, dim=1), torch.cat(bounds, dim=1))

    def _norm(self, rows_NH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normed state, rounded to the dtype, and the state's share in it; both float32."""
        x_NH = rows_NH.float()
        weight_H = self.norm_weight.float()
        if self.final_norm.kind == "gemma_rmsnorm":
            weight_H = 1.0 + weight_H
        centre_N1 = x_NH.mean(dim=1, keepdim=True) if self.final_norm.kind == "layernorm" else 0.0
        centred_NH = x_NH - centre_N1
        scale_NH = torch.rsqrt(centred_NH.square().mean(dim=1, keepdim=True) + self.final_norm.eps) * weight_H
        normed_NH = centred_NH * scale_NH
        if self._norm_bias_H is not None:
            normed_NH = normed_NH + self._norm_bias_H.float()
        return normed_NH.to(self.dtype).float(), x_NH * scale_NH

    def _slices(
        self, normed_NH: torch.Tensor, variance_NH: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield logits and bounds [N, C] by slices of the vocabulary, to keep the float32 copies small."""
        u = torch.finfo(self.dtype).eps / 2
        hidden_size = normed_NH.shape[1]
        walk = math.sqrt(2 * hidden_size) * _FLOAT32_ROUNDOFF
        after = (3 if self._soft_cap else 0) + (1 if self._scale != 1.0 else 0)
        step = max(1, _SLICE_ELEMENTS // hidden_size)
        for start in range(0, self.vocab_size, step):
            weight_CH = self._weight_VH[start : start + step].to(torch.float32, copy=True)
            z_NC = normed_NH @ weight_CH.T
            if self._bias_V is not None:
                z_NC = z_NC + self._bias_V[start : start + step].float()
            squared_HC = weight_CH.square_().T
            spread_NC = (normed_NH.square() @ squared_HC).sqrt()
            rounding_NC = (u / math.sqrt(3)) * (variance_NH @ squared_HC).sqrt()
            size_NC = z_NC.abs() + spread_NC
            bound_NC = _SIGMAS * (rounding_NC + walk * size_NC) + u * (2 * z_NC.abs() + size_NC)
            if self._soft_cap is not None:
                z_NC = torch.tanh(z_NC / self._soft_cap) * self._soft_cap
            logits_NC = z_NC * self._scale
            yield logits_NC, bound_NC * abs(self._scale) + after * u * logits_NC.abs()


def final_norm_bytes(folder: Path) -> bytes:
    """Return a safetensors file of the final norm in `folder`: `weight` [H], perhaps `bias` [H], as stored.

    Its metadata holds `final_norm`, the JSON of `FinalNorm`: one key, because safetensors writes several in
    any order, and the same dataset must be the same bytes. Raises EngineRefused.
    """
    norm = read_norm(folder, text_config(folder))
    tensors = {"weight": norm.weight_H} | ({} if norm.bias_H is None else {"bias": norm.bias_H})
    content: bytes = save(tensors, metadata={"final_norm": norm.norm.model_dump_json()})
    return content
