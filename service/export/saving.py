"""The few ways in which formats write files, each to the same bytes for the same tensors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from schemas.dataset.seal import sealing


def save_torch(path: Path, content: Mapping[Any, Any] | torch.Tensor) -> None:
    """Write a dict or a tensor for `torch.load(weights_only=True)`.

    Through a file object, because torch writes a path's name into the file; no tensor drags the storage of a
    larger one along.
    """
    own = (
        _alone(content)
        if isinstance(content, torch.Tensor)
        else {name: _alone(value) for name, value in content.items()}
    )
    with path.open("wb") as file:
        torch.save(own, file)


def save_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors as safetensors, also those that share memory."""
    save_file({name: _alone(tensor) for name, tensor in tensors.items()}, path)


def seal_torch(path: Path, content: Mapping[Any, Any] | torch.Tensor) -> None:
    """Write with `save_torch` to a final name."""
    with sealing(path) as temporary:
        save_torch(temporary, content)


def seal_text(path: Path, text: str) -> None:
    """Write a small text file."""
    with sealing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def seal_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a small JSON document."""
    seal_text(path, json.dumps(content, indent=2, sort_keys=True) + "\n")


def _alone(value: Any) -> Any:  # noqa: ANN401 - a tensor, or what stands beside tensors
    """Return a tensor in a storage of its own; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    whole = value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes
    return value if whole else value.clone(memory_format=torch.contiguous_format)
