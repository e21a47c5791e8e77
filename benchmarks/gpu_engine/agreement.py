"""How far stored states are from transformers' own, layer by layer.

Legend: N decoder layers, L captured layers, T tokens, H hidden size.
"""

from collections.abc import Sequence

import torch

PLACES = 3
"""Significant places that are kept of an error."""


class Agreement:
    """Collects rows; `figures` sums them up by captured layer."""

    def __init__(self, layer_ids: Sequence[int]) -> None:
        """Compare layers `layer_ids` with the same entries of a reference."""
        self._layer_ids = layer_ids
        self._errors: dict[int, list[torch.Tensor]] = {layer: [] for layer in layer_ids}
        self._dtype_errors: dict[int, list[torch.Tensor]] = {layer: [] for layer in layer_ids}
        self._cosines: dict[int, list[torch.Tensor]] = {layer: [] for layer in layer_ids}
        self._nearer_elsewhere: dict[int, int] = dict.fromkeys(layer_ids, 0)
        self._equal_rows: dict[int, int] = dict.fromkeys(layer_ids, 0)

    def add(
        self, states_LTH: torch.Tensor, reference_NTH: torch.Tensor, same_dtype_NTH: torch.Tensor | None
    ) -> None:
        """Add a row in float32. Both references hold layers 0..N.

        `reference_NTH` was computed in float32, `same_dtype_NTH` in the dtype of the row, if that is another.
        """
        for own_TH, layer in zip(states_LTH, self._layer_ids, strict=True):
            expected_TH = reference_NTH[layer]
            self._errors[layer].append(relative(own_TH, expected_TH))
            self._cosines[layer].append(torch.cosine_similarity(own_TH, expected_TH, dim=-1).cpu())
            distances = [float((own_TH - other_TH).norm() / other_TH.norm()) for other_TH in reference_NTH]
            self._nearer_elsewhere[layer] += min(range(len(distances)), key=distances.__getitem__) != layer
            if same_dtype_NTH is not None:
                self._dtype_errors[layer].append(relative(same_dtype_NTH[layer], expected_TH))
            closest_TH = expected_TH if same_dtype_NTH is None else same_dtype_NTH[layer]
            self._equal_rows[layer] += bool(torch.equal(own_TH, closest_TH))

    def figures(self) -> dict[str, dict[str, float | int]]:
        """Return by layer id: errors are |stored - reference| / |reference| of a token, over H."""
        return {str(layer): self._figures(layer) for layer in self._layer_ids}

    def _figures(self, layer: int) -> dict[str, float | int]:
        errors = torch.cat(self._errors[layer])
        found: dict[str, float | int] = {
            "relative_error_max": rounded(errors.max()),
            "relative_error_median": rounded(errors.median()),
            "cosine_min": float(torch.cat(self._cosines[layer]).min()),
            "rows_nearer_to_another_layer": self._nearer_elsewhere[layer],
            "rows_bit_equal": self._equal_rows[layer],
        }
        if self._dtype_errors[layer]:
            noise = torch.cat(self._dtype_errors[layer])
            found["transformers_in_this_dtype_max"] = rounded(noise.max())
            found["transformers_in_this_dtype_median"] = rounded(noise.median())
        return found


def relative(own_TH: torch.Tensor, expected_TH: torch.Tensor) -> torch.Tensor:
    """Return for each token the distance to `expected_TH`, as a share of its length: [T]."""
    distance_T: torch.Tensor = (own_TH - expected_TH).norm(dim=-1) / expected_TH.norm(dim=-1)
    return distance_T.cpu()


def rounded(value: torch.Tensor) -> float:
    """Return a figure without places that mean nothing."""
    return float(f"{float(value):.{PLACES}g}")
