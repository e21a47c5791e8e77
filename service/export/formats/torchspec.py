"""TorchSpec, offline replay: `dataset.json`, `manifest.jsonl` and `samples/<sha1 of the id>.pt`.

Un-shifted. `hidden_states` are the auxiliary layers, `last_hidden_states` the last layer before the final
norm, which `dataset.json` declares, so that the trainer applies the norm itself. The mask is stored as run
lengths, alternately unsupervised and supervised.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from service.errors import OptionRefused
from service.export.format import RowFile, TorchFileEachRow, refuse_draft_vocab
from service.export.options import Algorithm
from service.export.saving import Writers, save_json
from service.export.source import Source
from service.export.vocabulary import vocabulary_file
from service.reader import Row

VERSION = 1


class TorchSpec(TorchFileEachRow):
    """The files that TorchSpec reads with `inference_engine_type: offline`."""

    DESCRIPTION = "dataset.json"

    def row_files(self) -> Iterator[RowFile]:
        """Yield one file per row, named after the sample's id."""
        for number, sample_id in enumerate(self.source.rows.sample_ids):
            yield RowFile(_path(sample_id), range(number, number + 1))

    def content(self, row: Row) -> dict[str, Any]:
        """Return a row's tensors and its packed mask."""
        return {
            "input_ids": row.input_ids[None],
            "hidden_states": row.auxiliary(self.source.layers)[None],
            "last_hidden_states": row.last()[None],
            "data_id": row.sample_id,
            "packed_loss_mask": packed(row.loss_mask.tolist()),
            "metadata": {},
        }

    def beside(self, out: Path) -> Writers:
        """Return the dataset's description, the list of rows and the vocabulary map."""
        description = {"version": VERSION, "last_hidden_states_prenorm": True}
        return {
            self.DESCRIPTION: partial(save_json, content=description),
            "manifest.jsonl": self._write_list,
            **vocabulary_file("vocab_mapping.pt", self.source),
        }

    def _write_list(self, temporary: Path) -> None:
        lines = [
            json.dumps({"split": "train", "data_id": sample_id, "file": _path(sample_id)})
            for sample_id in self.source.rows.sample_ids
        ]
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")


def packed(mask: list[int]) -> str:
    """Return a mask as run lengths, beginning with zeros: `0 0 1 1 1 0` is `2,3,1`."""
    runs = [(value, len(list(run))) for value, run in itertools.groupby(mask)]
    lead = [0] if runs and runs[0][0] else []
    return ",".join(str(length) for length in [*lead, *(length for _, length in runs)])


def _path(sample_id: str) -> str:
    name = hashlib.sha1(sample_id.encode(), usedforsecurity=False).hexdigest()
    return f"samples/{name}.pt"


def make(source: Source) -> TorchSpec:
    """Return the format. Raises OptionRefused (`draft_vocab`, `job`)."""
    if source.options.algorithm is not Algorithm.EAGLE3:
        refuse_draft_vocab(source, "TorchSpec's DFlash and DSpark draft")
    if len(set(source.rows.sample_ids)) != len(source.rows):
        raise OptionRefused(
            "two rows have the same sample id, and TorchSpec names files by it",
            field="job",
            cure="export one job at a time",
        )
    return TorchSpec(source)
