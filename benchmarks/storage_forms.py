"""The forms that rows are stored in: ours by the writer and the reader, and speculators' fp8 by its own code.

Legend: T tokens, L captured layers, H hidden size.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file

from benchmarks.loop.train import TRAINERS
from connector.repeats import RepeatCheck
from connector.shards import UnitWriter
from connector.wire import DrainJob, RowRef, hash_ids
from schemas.dataset.files import LocalFile
from schemas.dataset.shard import Shard
from schemas.dataset.states import read_states
from schemas.names import attempt_dir
from schemas.request import Compression
from tests.support.plans import JOB, identity, order, write_plan
from tests.support.sums import token_sums

PEER = "speculators-fp8"


class Form(Protocol):
    """Writes rows into a folder and reads them again."""

    def write(self, folder: Path, ids: Sequence[list[int]], states: Sequence[torch.Tensor]) -> int:
        """Write states [L, T, H] of every row; return the bytes of the files."""

    def read(self, folder: Path, row: int, num_tokens: int) -> torch.Tensor:
        """Return a row's states [L, T, H]."""


class Ours:
    """Our writer, seal included, and our reader."""

    def __init__(self, compression: Compression, layer_ids: tuple[int, ...]) -> None:
        """Take the layers' ids, the last of which is N."""
        self._compression, self._layer_ids = compression, layer_ids
        self._shard: tuple[Path, Shard] | None = None

    def write(self, folder: Path, ids: Sequence[list[int]], states: Sequence[torch.Tensor]) -> int:
        """Write one shard."""
        about = identity(
            layer_ids=self._layer_ids,
            hidden_size=states[0].shape[-1],
            num_layers=self._layer_ids[-1],
            compression=self._compression,
        )
        write_plan(folder, ids)
        told = order(about, len(ids))
        writer = UnitWriter(told, folder, 0, 1, RepeatCheck(len(self._layer_ids), sum(map(len, ids))))
        for row, (one, states_LTH) in enumerate(zip(ids, states, strict=True)):
            job = DrainJob(str(row), RowRef(told.key, row, len(one)), len(one), (), hash_ids(one), ())
            writer.write(job, states_LTH, token_sums(states_LTH))
        return writer.seal().bytes

    def read(self, folder: Path, row: int, num_tokens: int) -> torch.Tensor:
        """Read every layer."""
        if self._shard is None or self._shard[0] != folder:
            (path,) = (folder / attempt_dir(JOB, 0, 1)).glob("*.parquet")
            self._shard = folder, Shard(LocalFile(path), path.name)
        shard = self._shard[1]
        return torch.stack([read_states(shard, row, layer_id, num_tokens) for layer_id in self._layer_ids])


class Peer:
    """What speculators' connector writes with fp8, a file a row, and what its loader makes of it."""

    def __init__(self) -> None:
        """Import its functions from the trainers' folder. Raises ModuleNotFoundError where they are not."""
        if str(TRAINERS) not in sys.path:
            sys.path.append(str(TRAINERS))
        self._fp8: Any = import_module("hs_connectors.fp8_utils")

    def write(self, folder: Path, ids: Sequence[list[int]], states: Sequence[torch.Tensor]) -> int:
        """Write its three tensors; like its connector, without fsync and checks."""
        for row, (one, states_LTH) in enumerate(zip(ids, states, strict=True)):
            codes, scales = self._fp8.quantize_tensor_to_fp8(states_LTH.transpose(0, 1).contiguous())
            tensors = {"hidden_states": codes, self._fp8.SCALES_KEY: scales, "token_ids": torch.tensor(one)}
            save_file(tensors, folder / f"{row}.safetensors")
        return sum(path.stat().st_size for path in folder.glob("*.safetensors"))

    def read(self, folder: Path, row: int, num_tokens: int) -> torch.Tensor:
        """Load and dequantize to bfloat16, its default."""
        tensors = load_file(folder / f"{row}.safetensors")
        scales = tensors[self._fp8.SCALES_KEY]
        states_TLH: torch.Tensor = self._fp8.dequantize_fp8_tensor(tensors["hidden_states"], scales)
        return states_TLH.transpose(0, 1)


def forms(layer_ids: tuple[int, ...]) -> dict[str, Form]:
    """Return every form by its name."""
    return {
        "none": Ours("none", layer_ids),
        "planes": Ours("planes", layer_ids),
        "fp8": Ours("fp8", layer_ids),
        PEER: Peer(),
    }
