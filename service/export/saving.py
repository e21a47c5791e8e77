"""The few ways in which formats write files, each to the same bytes for the same tensors.

Past the page cache: nothing of what is written is read again here, and sealing a file waits for what the
kernel has still to write out.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from schemas.dataset.direct import DirectWriter
from schemas.dataset.seal import sealing

_SAFETENSORS_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
}


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
    with _direct(path) as file:
        torch.save(own, file)  # type: ignore[arg-type]  # it calls write and flush alone


def save_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors as safetensors does: 8 bytes of header length, a JSON header, the tensors' bytes.

    Straight from their memory, in a third of the time of the library's own writer. Wider elements come first,
    so that each tensor is aligned.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header, end = {}, 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with _direct(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            whole = tensor.contiguous()
            file.write(whole.reshape(-1).view(torch.uint8).numpy().data)


def seal_torch(path: Path, content: Mapping[Any, Any] | torch.Tensor) -> None:
    """Do the same to a final name."""
    with sealing(path) as temporary:
        save_torch(temporary, content)


def seal_text(path: Path, text: str) -> None:
    """Write a small text file."""
    with sealing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def seal_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a small JSON document."""
    seal_text(path, json.dumps(content, indent=2, sort_keys=True) + "\n")


class _DirectFile:
    """As much of a file as `torch.save` wants."""

    def __init__(self, writer: DirectWriter) -> None:
        """Write through `writer`."""
        self.write = writer.write

    def flush(self) -> None:
        """Nothing: what is held back is written when the file ends."""


@contextmanager
def _direct(path: Path) -> Iterator[_DirectFile]:
    """Create or empty a file; all that was written to it is in it after the block."""
    writer = DirectWriter(path)
    try:
        yield _DirectFile(writer)
        writer.end()
    finally:
        writer.close()


def _alone(value: Any) -> Any:  # noqa: ANN401 - a tensor, or what stands beside tensors
    if not isinstance(value, torch.Tensor):
        return value
    whole = value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes
    return value if whole else value.clone(memory_format=torch.contiguous_format)
