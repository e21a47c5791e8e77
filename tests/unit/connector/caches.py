"""Caches of 9 blocks, 3 layers, 4 slots and 8 states a token, in every layout that an engine may give."""

import torch

LAYOUTS = ("layer first", "slot first", "padded blocks", "oddly padded", "inside a larger page")


def cache_BLSH(layout: str) -> torch.Tensor:
    """Return a `[B, L, S, H]` view of random states, every one of them different."""
    torch.manual_seed(0)
    if layout == "slot first":
        return torch.randn(9, 4, 3, 8).permute(0, 2, 1, 3)
    if layout == "padded blocks":
        return torch.randn(9, 128)[:, :96].unflatten(1, (3, 4, 8))
    if layout == "oddly padded":
        # The steps' common measure is smaller than a row.
        return torch.randn(9, 101)[:, 1:97].unflatten(1, (4, 3, 8)).permute(0, 2, 1, 3)
    if layout == "inside a larger page":
        return torch.randn(9, 5, 4, 8)[:, 2:]
    return torch.randn(9, 3, 4, 8)
