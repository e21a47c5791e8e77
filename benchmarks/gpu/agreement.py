"""How far stored states are from transformers' own, layer by layer.

Legend: T tokens, H hidden size.
"""

from collections.abc import Sequence

import torch

from tests.support.engine_bench import relative_T

PLACES = 3
"""Significant places that are kept of an error."""

States = dict[int, torch.Tensor]
"""[T, H] by layer."""


class Agreement:
    """How far stored rows are from transformers' own, layer by layer."""

    def __init__(self, layer_ids: Sequence[int]) -> None:
        """Compare layers `layer_ids` with the same ones of a reference."""
        self._errors: dict[int, list[torch.Tensor]] = {layer: [] for layer in layer_ids}
        self._noise: dict[int, list[torch.Tensor]] = {layer: [] for layer in layer_ids}
        self._nearer_elsewhere = dict.fromkeys(layer_ids, 0)
        self._equal_rows = dict.fromkeys(layer_ids, 0)

    def add(self, stored: States, truth: States, same_dtype: States) -> None:
        """Add a row. `truth` was computed in float32, `same_dtype` in the dtype of the engine."""
        for layer, own_TH in stored.items():
            self._errors[layer].append(relative_T(own_TH, truth[layer]))
            self._noise[layer].append(relative_T(same_dtype[layer], truth[layer]))
            distances = {other: float(relative_T(own_TH, truth[other]).mean()) for other in truth}
            self._nearer_elsewhere[layer] += min(distances, key=distances.__getitem__) != layer
            self._equal_rows[layer] += torch.equal(own_TH, same_dtype[layer])

    def figures(self) -> dict[str, dict[str, float | int]]:
        """Return by layer id: errors are |stored - truth| / |truth| of a token, over H.

        `transformers_in_this_dtype` is what the dtype alone does to transformers' own states.
        """
        return {str(layer): self._figures(layer) for layer in self._errors}

    def _figures(self, layer: int) -> dict[str, float | int]:
        errors_T, noise_T = torch.cat(self._errors[layer]), torch.cat(self._noise[layer])
        return {
            "relative_error_max": _rounded(errors_T.max()),
            "relative_error_median": _rounded(errors_T.median()),
            "transformers_in_this_dtype_max": _rounded(noise_T.max()),
            "transformers_in_this_dtype_median": _rounded(noise_T.median()),
            "rows_nearer_to_another_layer": self._nearer_elsewhere[layer],
            "rows_bit_equal": self._equal_rows[layer],
        }


def _rounded(value: torch.Tensor) -> float:
    return float(f"{float(value):.{PLACES}g}")
