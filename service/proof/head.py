"""The target's final norm and output head on CPU: logits of stored states, and their tolerance.

Imports torch: import it lazily. The rest of the model is never read. docs/tolerance.md derives the sigmas.

Legend: N rows, K tokens, H hidden size, V vocabulary, C a slice of the vocabulary.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch

from connector.vector_math import settle_vector_math
from schemas.dataset.norm import NormWeights, norm_bytes
from schemas.identity import FinalNorm
from schemas.request import Dtype
from service.errors import EngineRefused
from service.proof.head_weights import HeadWeights, read_head, read_norm, text_config
from service.proof.tolerance import NormedState, Tolerance

_SLICE_ELEMENTS = 2**24


@dataclass(frozen=True, slots=True)
class Gaps:
    """For N states, the logit of the first of K tokens minus that of each of the K tokens; both are [N, K].

    `sigma` is the standard deviation of the gaps due to rounding alone.
    """

    gap: torch.Tensor
    sigma: torch.Tensor


class Head:
    """Final norm and output head of one model, in the dtype that the engine runs it in."""

    def __init__(self, norm: NormWeights, head: HeadWeights, dtype: Dtype) -> None:
        """Cast the stored weights as the engine does. Raises EngineRefused if their shapes do not match."""
        if norm.weight_H.shape != head.weight_VH.shape[1:]:
            shapes = f"final norm {list(norm.weight_H.shape)}, output head {list(head.weight_VH.shape)}"
            raise EngineRefused(f"shapes that do not fit: {shapes}", field="model")
        self.final_norm_file = norm_bytes(norm)
        """The final norm as a safetensors file, in the checkpoint's dtype."""
        self.dtype: torch.dtype = getattr(torch, dtype)
        bias_H = None if norm.bias_H is None else norm.bias_H.to(self.dtype)
        self.norm = NormWeights(norm.norm, norm.weight_H.to(self.dtype), bias_H)
        bias_V = None if head.bias_V is None else head.bias_V.to(self.dtype)
        self._head = replace(head, weight_VH=head.weight_VH.to(self.dtype), bias_V=bias_V)

    @classmethod
    def load(cls, folder: Path, dtype: Dtype) -> Self:
        """Read final norm and head from the safetensors files in `folder`. Raises EngineRefused."""
        settle_vector_math()
        config = text_config(folder)
        return cls(read_norm(folder, config), read_head(folder, config), dtype)

    @property
    def final_norm(self) -> FinalNorm:
        """The final norm without its weights."""
        return self.norm.norm

    @property
    def vocab_size(self) -> int:
        """V from the config, without the padding that a checkpoint may have."""
        return len(self._head.weight_VH)

    def logprobs(self, rows_NH: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities [N, V] of the next token, float32, from pre-norm states [N, H].

        The norm runs in float32 and its result is rounded to the dtype; the matmul runs in float32.
        """
        normed_NH = self.normed_state(rows_NH).normed
        # In float32 the head may exceed the free memory, so it is cast in slices.
        slices = torch.split(self._head.weight_VH, max(1, _SLICE_ELEMENTS // self._head.weight_VH.shape[1]))
        bare_NV = torch.cat([normed_NH @ weight_CH.float().T for weight_CH in slices], dim=1)
        bias_V = None if self._head.bias_V is None else self._head.bias_V.float()
        return torch.log_softmax(self._head.shaped(bare_NV, bias_V), dim=1)

    def gaps(
        self, rows_NH: torch.Tensor, tokens_NK: torch.Tensor, half_NH: torch.Tensor | None = None
    ) -> Gaps:
        """Return the logit gaps of pre-norm states [N, H] for K tokens each, reading K head rows per state.

        Differences of logits equal those of log-probabilities, so no sum over the vocabulary is needed.
        `half_NH` is how far each captured value may be from the stored one.
        """
        state = self.normed_state(rows_NH[:, None], None if half_NH is None else half_NH[:, None])
        weight_NKH = self._head.weight_VH[tokens_NK].float()
        bias_NK = None if self._head.bias_V is None else self._head.bias_V[tokens_NK].float()
        logits_NK = self._head.shaped((weight_NKH @ state.normed.transpose(-1, -2)).squeeze(-1), bias_NK)
        direction_NKH = self._head.slope(logits_NK)[..., None] * weight_NKH
        logit_roundings = 1 + (3 if self._head.soft_cap else 0) + (1 if self._head.scale != 1.0 else 0)
        tolerance = Tolerance(state, torch.finfo(self.dtype).eps / 2, logit_roundings)
        logit_NK = tolerance.of_logit(logits_NK, direction_NKH)
        product_NK = tolerance.of_product(direction_NKH[:, :1] - direction_NKH)
        variance_NK = product_NK + logit_NK[:, :1] + logit_NK
        return Gaps(logits_NK[:, :1] - logits_NK, variance_NK.sqrt())

    def normed_state(self, rows_NH: torch.Tensor, half_NH: torch.Tensor | None = None) -> NormedState:
        """Run the norm in float32 and round its result to the dtype."""
        norm = self.norm
        centred_NH, inverse_N1 = norm.centred(rows_NH)
        weight_H = norm.weight_H.float()
        gain_NH = inverse_N1 * (1.0 + weight_H if self.final_norm.kind == "gemma_rmsnorm" else weight_H)
        normed_NH = centred_NH * gain_NH
        if norm.bias_H is not None:
            normed_NH = normed_NH + norm.bias_H.float()
        rounded_NH, unit_NH = normed_NH.to(self.dtype).float(), centred_NH * inverse_N1
        return NormedState(rows_NH.float(), rounded_NH, unit_NH, gain_NH, half_NH, norm.centres)
