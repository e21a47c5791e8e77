"""DeepSpec's target cache, version 2: `shard-<n>.bin`, `samples.idx` and `manifest.json`.

Un-shifted; layers are numbered from 0, the embeddings are -1. A row's tensors follow each other in a shard:
ids int32, attention mask uint8, loss mask uint8, auxiliary states bfloat16 [T, A * H], and the last layer
after the final norm, bfloat16 [T, H]. The index has a 56-byte record per row.
"""

import itertools
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from service.export.format import Format, RowFile, refuse_draft_vocab
from service.export.saving import Writers, save_json
from service.export.source import Source
from service.reader import Row

VERSION = 2
RECORD = struct.Struct("<QIIQQQQQ")
SHARD_BYTES = 2**30
_STATE_BYTES = 2


class DeepSpec(Format):
    """The files that DeepSpec reads with `data.target_cache_path`."""

    def row_files(self) -> Iterator[RowFile]:
        """Yield shards of whole rows, each filled except the last; a row larger than a shard has its own."""
        number = begin = size = 0
        for row, num_tokens in enumerate(self.source.rows.num_tokens):
            row_bytes = sum(self._sizes(num_tokens))
            if size and size + row_bytes > SHARD_BYTES:
                yield RowFile(_shard(number), range(begin, row))
                number, begin, size = number + 1, row, 0
            size += row_bytes
        yield RowFile(_shard(number), range(begin, len(self.source.rows)))

    def write(self, temporary: Path, rows: Iterable[Row]) -> None:
        """Write a shard, one row at a time."""
        with temporary.open("wb") as file:
            for row in rows:
                tensors = (
                    row.input_ids.int(),
                    torch.ones(row.num_tokens, dtype=torch.uint8),
                    row.loss_mask,
                    row.auxiliary(self.source.layers).bfloat16(),
                    row.last_normed().bfloat16(),
                )
                for tensor in tensors:
                    file.write(tensor.contiguous().view(torch.uint8).numpy().data)

    def beside(self, out: Path) -> Writers:
        """Return the index and the manifest."""
        return {"samples.idx": self._write_index, "manifest.json": self._write_manifest}

    def _write_index(self, temporary: Path) -> None:
        """Write what follows from the lengths alone."""
        with temporary.open("wb") as file:
            for shard_id, shard in enumerate(self.row_files()):
                offset = 0
                for number in shard.numbers:
                    num_tokens = self.source.rows.num_tokens[number]
                    *starts, offset = itertools.accumulate(self._sizes(num_tokens), initial=offset)
                    file.write(RECORD.pack(number, shard_id, num_tokens, *starts))

    def _write_manifest(self, temporary: Path) -> None:
        shards = list(self.row_files())
        manifest = {
            "version": VERSION,
            "num_samples": len(self.source.rows),
            "num_shards": len(shards),
            "target_layer_ids": self.trainer_layers,
            "hidden_dtype": "bfloat16",
            "token_dtype": "int32",
            "mask_dtype": "uint8",
            "index_record_size": RECORD.size,
            "hidden_size": self.source.rows.about.hidden_size,
            "shards": [{"shard_id": number, "file_name": shard.path} for number, shard in enumerate(shards)],
            "target_model_name_or_path": self.model,
        }
        save_json(temporary, manifest)

    def _sizes(self, num_tokens: int) -> tuple[int, ...]:
        states = num_tokens * self.source.rows.about.hidden_size * _STATE_BYTES
        return 4 * num_tokens, num_tokens, num_tokens, states * len(self.source.layers), states


def _shard(number: int) -> str:
    return f"shard-{number:05d}.bin"


def make(source: Source) -> DeepSpec:
    """Return the format. Raises OptionRefused (`draft_vocab`)."""
    refuse_draft_vocab(source, "DeepSpec drafts")
    return DeepSpec(source)
