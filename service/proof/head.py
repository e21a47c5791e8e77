"""The target's final norm and output head on CPU, and how far two right computations of a logit may differ.

Imports torch: import it lazily. The model itself is never read.

Legend: N rows, H hidden size, V vocabulary, C a slice of the vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import save

from connector.vector_math import settle_vector_math
from schemas.dataset.norm import NormWeights
from schemas.identity import FinalNorm
from schemas.request import Dtype
from service.errors import EngineRefused
from service.proof.head_weights import HeadWeights, read_head, read_norm, text_config
from service.proof.storing import Storing

_SLICE_ELEMENTS = 2**24
_FLOAT32_ROUNDOFF = 2.0**-24


@dataclass(frozen=True, slots=True)
class Opinion:
    """What N states say of the next token, beside one that somebody else named for each; all [N].

    `logprob` is of the named token and `gap` how far its logit is below that of `own_token`, the argmax. The
    sigmas are the deviations that rounding alone gives them.
    """

    own_token: torch.Tensor
    logprob: torch.Tensor
    sigma: torch.Tensor
    gap: torch.Tensor
    gap_sigma: torch.Tensor


@dataclass(frozen=True, slots=True)
class Gaps:
    """By how much the logits of N states differ between the first of K tokens and each of them; both [N, K].

    The sigmas are the deviations that rounding alone gives the gaps.
    """

    gap: torch.Tensor
    sigma: torch.Tensor


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
        settle_vector_math()
        config = text_config(folder)
        return cls(read_norm(folder, config), read_head(folder, config), dtype)

    @property
    def vocab_size(self) -> int:
        """V, the config's, without the padding a checkpoint may hold."""
        return len(self._weight_VH)

    def logprobs(self, rows_NH: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities [N, V] of the next token, float32, from pre-norm states [N, H].

        The norm runs in float32 and its result is rounded to the dtype; the matmul runs in float32.
        """
        normed_NH, _ = self._norm(rows_NH)
        return torch.log_softmax(self._logits(normed_NH), dim=1)

    def opinion(
        self, rows_NH: torch.Tensor, named_N: torch.Tensor, half_NH: torch.Tensor | None = None
    ) -> Opinion:
        """Hold pre-norm states [N, H] against one named token each, `named_N` of 0..V-1.

        `half_NH` says how far each captured value may lie from the stored one (`service.proof.storing`).

        The deviations follow from the dtype and the weights; nothing is fitted to data. With u the dtype's
        unit roundoff, a rounding is a uniform relative error of at most u, of variance u^2/3. Let y be the
        normed state and s the stored state's share in it (for an RMSNorm s = y), z a logit and c its slope
        behind soft cap and scale. To first order errors e_j of y_j move the named token's log-probability by
        sum_j d_j e_j with d = c_t w_t - sum_v p_v c_v w_v, and the gap likewise with d = c_o w_o - c_t w_t.
        In units of u^2/3 the variances are:

        - sum_j d_j^2 (s_j^2 + 3 y_j^2): the stored state is rounded once, the normed one before and after its
          weight in the engine and once here;
        - (d . y)^2: the norm's divisor moves with the rounding of a few massive elements;
        - k z^2 + sum_j (c w_j y_j)^2 for each logit: it is stored in the dtype (k counts this, a scale, and a
          soft cap thrice), and a matmul that is split over H may add up its parts in the dtype;

        and beside them 2 H 2^-48 (z^2 + sum_j (c w_j y_j)^2) for H additions in float32 on either side, and
        V 2^-48 for those of the softmax.
        """
        normed_NH, share_NH = self._norm(rows_NH)
        logits_NV = self._logits(normed_NH)
        logprobs_NV = torch.log_softmax(logits_NV, dim=1)
        chance_NV, slope_NV = logprobs_NV.exp(), self._slope(logits_NV)
        mean_NH, square_NH = torch.zeros_like(normed_NH), torch.zeros_like(normed_NH)
        for start, weight_CH in self._slices():
            part = slice(start, start + len(weight_CH))
            mean_NH += (chance_NV[:, part] * slope_NV[:, part]) @ weight_CH
            if half_NH is not None:
                square_NH += (chance_NV[:, part] * slope_NV[:, part].square()) @ weight_CH.square()
        row_N = torch.arange(len(rows_NH))
        own_N = logits_NV.argmax(dim=1)
        own_NH = slope_NV[row_N, own_N, None] * self._weight_VH[own_N].float()
        named_NH = slope_NV[row_N, named_N, None] * self._weight_VH[named_N].float()

        rounding = _Rounding(normed_NH, share_NH, self._unit, self._roundings)
        others_N = self._unit * self._roundings * (chance_NV * logits_NV).square().sum(dim=1)
        softmax = self.vocab_size * _FLOAT32_ROUNDOFF**2
        named_variance_N = rounding.of_logit(logits_NV[row_N, named_N], named_NH)
        own_variance_N = rounding.of_logit(logits_NV[row_N, own_N], own_NH)
        variance_N = rounding.through_norm(named_NH - mean_NH) + named_variance_N + others_N + softmax
        gap_variance_N = rounding.through_norm(own_NH - named_NH) + named_variance_N + own_variance_N
        if half_NH is not None:
            storing = self._storing(rows_NH, half_NH)
            variance_N += storing.of_product(named_NH - mean_NH)
            variance_N += storing.of_softmax(mean_NH, square_NH)
            gap_variance_N += storing.of_product(own_NH - named_NH)
        return Opinion(
            own_token=own_N,
            logprob=logprobs_NV[row_N, named_N],
            sigma=variance_N.sqrt(),
            gap=logits_NV[row_N, own_N] - logits_NV[row_N, named_N],
            gap_sigma=gap_variance_N.sqrt(),
        )

    def gaps(
        self, rows_NH: torch.Tensor, tokens_NK: torch.Tensor, half_NH: torch.Tensor | None = None
    ) -> Gaps:
        """Hold pre-norm states [N, H] against K tokens each of 0..V-1; reads K rows of the head for each.

        A difference of logits is one of log-probabilities too, so that no sum over the vocabulary is needed.
        The deviations are those of `opinion`.
        """
        normed_NH, share_NH = self._norm(rows_NH)
        weight_NKH = self._weight_VH[tokens_NK].float()
        bias_NK = None if self._bias_V is None else self._bias_V[tokens_NK].float()
        logits_NK = self._shaped(torch.einsum("nh,nkh->nk", normed_NH, weight_NKH), bias_NK)
        direction_NKH = self._slope(logits_NK)[..., None] * weight_NKH
        rounding = _Rounding(normed_NH[:, None], share_NH[:, None], self._unit, self._roundings)
        each_NK = rounding.of_logit(logits_NK, direction_NKH)
        variance_NK = rounding.through_norm(direction_NKH[:, :1] - direction_NKH) + each_NK[:, :1] + each_NK
        if half_NH is not None:
            storing = self._storing(rows_NH[:, None], half_NH[:, None])
            variance_NK += storing.of_product(direction_NKH[:, :1] - direction_NKH)
        return Gaps(logits_NK[:, :1] - logits_NK, variance_NK.sqrt())

    @property
    def _unit(self) -> float:
        """Variance of one rounding to the dtype, relative to the square of what is rounded."""
        return float((torch.finfo(self.dtype).eps / 2) ** 2 / 3)

    @property
    def _roundings(self) -> int:
        """Count how often a logit is rounded to the dtype."""
        return 1 + (3 if self._soft_cap else 0) + (1 if self._scale != 1.0 else 0)

    def _norm(self, rows_NH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normed state, rounded to the dtype, and the state's share in it; both float32."""
        x_NH = rows_NH.float()
        centred_NH, power_N1 = self._centred(x_NH)
        scale_NH = power_N1.rsqrt() * self._gain_H
        normed_NH = centred_NH * scale_NH
        if self._norm_bias_H is not None:
            normed_NH = normed_NH + self._norm_bias_H.float()
        return normed_NH.to(self.dtype).float(), x_NH * scale_NH

    def _centred(self, x_NH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return float32 states [..., H] as the norm centres them, and the mean square with eps [..., 1]."""
        if self.final_norm.kind == "layernorm":
            x_NH = x_NH - x_NH.mean(dim=-1, keepdim=True)
        return x_NH, x_NH.square().mean(dim=-1, keepdim=True) + self.final_norm.eps

    @property
    def _gain_H(self) -> torch.Tensor:
        """What the norm multiplies by, float32."""
        weight_H = self.norm_weight.float()
        return 1.0 + weight_H if self.final_norm.kind == "gemma_rmsnorm" else weight_H

    def _storing(self, rows: torch.Tensor, half: torch.Tensor) -> Storing:
        """Return what storing made of pre-norm states [..., H] under this norm."""
        centred, power = self._centred(rows.float())
        centres = self.final_norm.kind == "layernorm"
        return Storing(rows == 0, half, centred * power.rsqrt(), self._gain_H * power.rsqrt(), centres)

    def _logits(self, normed_NH: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V] of normed states."""
        z_NV = torch.cat([normed_NH @ weight_CH.T for _, weight_CH in self._slices()], dim=1)
        return self._shaped(z_NV, None if self._bias_V is None else self._bias_V.float())

    def _shaped(self, bare: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Make logits of bare products of states and weights: bias, soft cap, scale."""
        if bias is not None:
            bare = bare + bias
        if self._soft_cap is not None:
            bare = torch.tanh(bare / self._soft_cap) * self._soft_cap
        return bare * self._scale

    def _slope(self, logits: torch.Tensor) -> torch.Tensor:
        """Return by how much each logit moves with its bare product of state and weight."""
        if self._soft_cap is None:
            return torch.full_like(logits, self._scale)
        return self._scale * (1 - (logits / (self._scale * self._soft_cap)).square())

    def _slices(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the head's weight in float32 by slices [C, H], each with its first token."""
        step = max(1, _SLICE_ELEMENTS // self._weight_VH.shape[1])
        for start in range(0, self.vocab_size, step):
            yield start, self._weight_VH[start : start + step].float()


@dataclass(frozen=True, slots=True)
class _Rounding:
    """The variances of `Head.opinion` for normed states and the stored ones' share in them, both [..., H].

    `unit` is the variance of one rounding, `roundings` how many a logit goes through.
    """

    normed: torch.Tensor
    share: torch.Tensor
    unit: float
    roundings: int

    def through_norm(self, direction: torch.Tensor) -> torch.Tensor:
        """Return the variance that the norm's roundings give to a product with `direction` [..., H]."""
        each = (direction.square() * (self.share.square() + 3 * self.normed.square())).sum(dim=-1)
        return self.unit * (each + (direction * self.normed).sum(dim=-1).square())

    def of_logit(self, logit: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
        """Return the variance of a logit [...] by itself, `direction` [..., H] being its gradient."""
        walk = 2 * self.normed.shape[-1] * _FLOAT32_ROUNDOFF**2
        spread = (direction * self.normed).square().sum(dim=-1)
        return self.unit * (self.roundings * logit.square() + spread) + walk * (logit.square() + spread)


def final_norm_bytes(folder: Path) -> bytes:
    """Return a safetensors file of the final norm in `folder`: `weight` [H], perhaps `bias` [H], as stored.

    Its metadata holds `final_norm`, the JSON of `FinalNorm`: one key, because safetensors writes several in
    any order, and the same dataset must be the same bytes. Raises EngineRefused.
    """
    norm = read_norm(folder, text_config(folder))
    tensors = {"weight": norm.weight_H} | ({} if norm.bias_H is None else {"bias": norm.bias_H})
    content: bytes = save(tensors, metadata={"final_norm": norm.norm.model_dump_json()})
    return content
