"""The ways in which formats write files; the same tensors give the same bytes.

Tensors are written past the page cache, in a third of the time: no file is read again here, and sealing would
have to wait for the kernel's write-back.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from schemas.dataset.direct import DirectWriter
from schemas.dataset.seal import sealing

Writers = dict[str, Callable[[Path], None]]
"""Files by their paths below a folder: each is written by a call, to a temporary name."""


def seal_missing(out: Path, files: Writers) -> None:
    """Write those of the files that are not in the folder `out` yet, in their order."""
    for name, write in files.items():
        if not (out / name).exists():
            with sealing(out / name) as temporary:
                write(temporary)


def save_torch(path: Path, content: Mapping[Any, Any] | torch.Tensor) -> None:
    """Write a dict or a tensor for `torch.load(weights_only=True)`.

    It is not saved by path, because torch writes the name into the file; tensors are saved without the rest
    of a larger storage.
    """
    content_bytes = BytesIO()
    torch.save(_alone(content), content_bytes)
    with content_bytes.getbuffer() as view:  # one that an error keeps crashes Python 3.12.1's collector
        _write(path, view)


def save_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors as safetensors, even if they share memory."""
    _write(path, save({name: _alone(tensor) for name, tensor in tensors.items()}))


def save_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a small JSON document."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def seal_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write with `save_json` to a final name."""
    with sealing(path) as temporary:
        save_json(temporary, content)


def _write(path: Path, content: bytes | memoryview) -> None:
    with closing(DirectWriter(path)) as writer:
        writer.write(content)
        writer.end()


def _alone(value: Any) -> Any:  # noqa: ANN401 - tensors or other values
    """Return tensors, also inside dicts, with storage of their own; return other values unchanged."""
    if isinstance(value, Mapping):
        return {name: _alone(part) for name, part in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    whole = value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes
    return value if whole else value.clone(memory_format=torch.contiguous_format)
