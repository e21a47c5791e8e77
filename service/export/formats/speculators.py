"""speculators 0.9: an Arrow dataset of ids and masks, and `hidden_states/hs_<row>.safetensors`.

Un-shifted. `hidden_states` is [T, A + 1, H]: the auxiliary layers ascending, then the last layer before the
final norm, which the trainer applies itself; its `--target-layer-ids` are vLLM's. For MTP, only the last
layer is written, after the final norm: vLLM feeds that to an MTP drafter, and this trainer applies no norm
there.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from service.export.format import FileEachRow, refuse_draft_vocab, refuse_pre_norm
from service.export.options import Algorithm
from service.export.saving import Writers, save_json, save_safetensors, save_torch
from service.export.source import Source
from service.export.vocabulary import Counts, draft_vocabulary, token_counts
from service.reader import Row

ARROW_FILE = "data-00000-of-00001.arrow"
COUNTS_FILE = "token_freq.pt"
WHOLE_VOCABULARY = frozenset({Algorithm.MTP, Algorithm.DFLASH2})
"""Kinds of drafters for which the trainer ignores a vocabulary map, or refuses it."""
_ROWS_A_BATCH = 256
_SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int64())),
        ("loss_mask", pa.list_(pa.int64())),
        ("seq_len", pa.int64()),
    ]
)


class Speculators(FileEachRow):
    """The files that `speculators train --data-path` reads; Arrow row n belongs to file n."""

    PATH = "hidden_states/hs_{number}.safetensors"

    @property
    def trainer_layers(self) -> list[int]:
        """VLLM's ids."""
        return list(self.source.layers)

    def write(self, temporary: Path, rows: Iterable[Row]) -> None:
        """Write one row's states."""
        for row in rows:
            save_safetensors(temporary, row_tensors(row, self.source.options.algorithm, self.source.layers))

    def beside(self, out: Path) -> Writers:
        """Return the Arrow dataset, the token counts and the vocabulary map."""
        files, counted = _arrow_files(self.source, _SCHEMA, self._batches), cache(token_counts)
        files[COUNTS_FILE] = partial(_count, self.source, counted)
        if (size := self.source.options.draft_vocab) is not None:
            for name in ("d2t", "t2d"):
                files[f"{name}-{size}.npy"] = partial(self._write_map, name, size, counted)
        return files

    def _write_map(self, name: str, size: int, counted: Counts, temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.save(file, draft_vocabulary(self.source, size, counted)[name].numpy())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        table = _index(self.source).select(_SCHEMA.names)
        for begin in range(0, len(table), _ROWS_A_BATCH):
            yield from table.slice(begin, _ROWS_A_BATCH).cast(_SCHEMA).combine_chunks().to_batches()


def index_files(source: Source) -> Writers:
    """Return the Arrow dataset with every column of the index, as it has them, and the token counts.

    The trainer gets the same tensors from it: `datasets` converts any integer to int64.
    """
    table = _index(source)
    arrow = _arrow_files(source, table.schema, lambda: table.to_batches(_ROWS_A_BATCH))
    return {**arrow, COUNTS_FILE: partial(_count, source, token_counts)}


def _count(source: Source, counted: Counts, temporary: Path) -> None:
    save_torch(temporary, counted(source))


def _index(source: Source) -> pa.Table:
    """Return the index of all rows, with their lengths under the trainer's name, `seq_len`."""
    table = source.rows.index
    return table.append_column("seq_len", table["num_tokens"].cast(pa.int64()))


def _arrow_files(
    source: Source, schema: pa.Schema, batches: Callable[[], Iterable[pa.RecordBatch]]
) -> Writers:
    """Return what `datasets.load_from_disk` reads; the trainer is given three of the columns."""

    def write_rows(temporary: Path) -> None:
        with pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
            for batch in batches():
                stream.write_batch(batch)

    info = {"features": {field.name: _feature(field.type) for field in schema}}
    manifests = json.dumps({job: manifest.sha256 for job, manifest in source.rows.manifests.items()})
    state = {
        "_data_files": [{"filename": ARROW_FILE}],
        "_fingerprint": hashlib.sha256(manifests.encode()).hexdigest()[:16],
        "_format_columns": _SCHEMA.names,
        "_format_kwargs": {},
        "_format_type": "torch",
        "_output_all_columns": False,
        "_split": None,
    }
    return {
        ARROW_FILE: write_rows,
        "dataset_info.json": partial(save_json, content=info),
        "state.json": partial(save_json, content=state),
    }


def row_tensors(row: Row, algorithm: Algorithm, layers: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return the content of a row's file: `hidden_states` [T, A + 1, H] and `token_ids`, int64 [T].

    The states are those of the auxiliary layers, then of the last layer, which has the highest id.
    """
    if algorithm is Algorithm.MTP:
        states_TLH = row.last_normed()[:, None]
    else:
        layer_ids = (*layers, row.num_layers)
        states_TLH = row.auxiliary(layer_ids).view(row.num_tokens, len(layer_ids), -1)
    return {"hidden_states": states_TLH, "token_ids": row.input_ids}


def _feature(kind: pa.DataType) -> dict[str, Any]:
    """Return a column's type in the notation of `datasets`."""
    if pa.types.is_list(kind):
        return {"_type": "List", "feature": _feature(kind.value_type)}
    return {"_type": "Value", "dtype": str(kind)}


def make(source: Source) -> Speculators:
    """Return the format.

    Raises OptionRefused: `draft_vocab`, and `algorithm` for MTP heads fed the state before the norm.
    """
    if source.options.algorithm in WHOLE_VOCABULARY:
        refuse_draft_vocab(source, "speculators' MTP and DFlash2 draft")
    if source.options.algorithm is Algorithm.MTP:
        cure = "train them with service.reader.Mtp(num_steps, normed=False)"
        refuse_pre_norm(source, "the MTP heads", cure)
    return Speculators(source)
