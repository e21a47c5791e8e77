"""The few ways in which formats write files, each to the same bytes for the same tensors.

Tensors are written past the page cache, in a third of the time: nothing of a file is read again here, and
sealing it would wait for what the kernel still has to write.
"""

import json
from collections.abc import Mapping
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from schemas.dataset.direct import DirectWriter
from schemas.dataset.seal import seal_bytes, sealing


def save_torch(path: Path, content: Mapping[Any, Any] | torch.Tensor) -> None:
    """Write a dict or a tensor for `torch.load(weights_only=True)`.

    Not by its path, because torch writes the name into the file; no tensor drags the storage of a larger one
    along.
    """
    content_bytes = BytesIO()
    torch.save(_alone(content), content_bytes)
    _write(path, content_bytes.getbuffer())


def save_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors as safetensors, also those that share memory."""
    _write(path, save({name: _alone(tensor) for name, tensor in tensors.items()}))


def seal_torch(path: Path, content: Mapping[Any, Any] | torch.Tensor) -> None:
    """Write with `save_torch` to a final name."""
    with sealing(path) as temporary:
        save_torch(temporary, content)


def seal_text(path: Path, text: str) -> None:
    """Write a small text file."""
    seal_bytes(path, text.encode())


def seal_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a small JSON document."""
    seal_text(path, json.dumps(content, indent=2, sort_keys=True) + "\n")


def _write(path: Path, content: bytes | memoryview) -> None:
    with closing(DirectWriter(path)) as writer:
        writer.write(content)
        writer.end()


def _alone(value: Any) -> Any:  # noqa: ANN401 - tensors, or what is beside them
    """Return a tensor, or a dict of them, sharing its storage with no other; anything else as it is."""
    if isinstance(value, Mapping):
        return {name: _alone(part) for name, part in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    whole = value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes
    return value if whole else value.clone(memory_format=torch.contiguous_format)
