"""speculators 0.9: an Arrow dataset of ids and masks, and `hidden_states/hs_<row>.safetensors` beside it.

Un-shifted. `hidden_states` is [T, A + 1, H]: the auxiliary layers ascending, then the last one before the
final norm, which the trainer applies itself; its `--target-layer-ids` are vLLM's. For MTP the one layer is
written after the final norm instead: vLLM feeds an MTP drafter that, and this trainer applies no norm there.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from schemas.dataset.seal import sealing
from service.errors import OptionRefused
from service.export.format import FileEachRow
from service.export.options import Algorithm
from service.export.saving import save_safetensors, seal_json, seal_torch
from service.export.source import Source
from service.export.vocabulary import draft_vocabulary, token_counts
from service.reader import Row

PRE_NORM_MTP = frozenset({"MiMoForCausalLM", "Step3p5ForCausalLM"})
"""Classes of vLLM whose MTP drafters get the state before the final norm; see docs/serving-parity.md."""
_ARROW_FILE = "data-00000-of-00001.arrow"
_ROWS_A_BATCH = 256
_SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int64())),
        ("loss_mask", pa.list_(pa.int64())),
        ("seq_len", pa.int64()),
    ]
)


@dataclass(frozen=True, slots=True)
class Speculators(FileEachRow):
    """The files that `speculators train --data-path` reads; the Arrow rows have the files' numbers."""

    PATH = "hidden_states/hs_{number}.safetensors"

    @property
    def trainer_layers(self) -> list[int]:
        """VLLM's ids."""
        return list(self.source.layers)

    def write(self, temporary: Path, rows: Iterable[Row]) -> None:
        """Write one row's states."""
        for row in rows:
            save_safetensors(temporary, {"hidden_states": self._states(row), "token_ids": row.input_ids})

    def _states(self, row: Row) -> torch.Tensor:
        """Return [T, A + 1, H]: the auxiliary layers and the last one, which is the highest."""
        if self.source.options.algorithm is Algorithm.MTP:
            return row.last_normed()[:, None]
        layer_ids = (*self.source.layers, row.num_layers)
        return row.auxiliary(layer_ids).view(row.num_tokens, len(layer_ids), -1)

    def finish(self, out: Path) -> None:
        """Write the Arrow dataset, the token counts and the vocabulary map."""
        self._write_arrow(out)
        counts = token_counts(self.source)
        seal_torch(out / "token_freq.pt", counts)
        for name, tensor in draft_vocabulary(self.source, lambda _: counts).items():
            path = out / f"{name}-{self.source.options.draft_vocab}.npy"
            with sealing(path) as temporary, temporary.open("wb") as file:
                np.save(file, tensor.numpy())

    def _write_arrow(self, out: Path) -> None:
        with (
            sealing(out / _ARROW_FILE) as temporary,
            pa.OSFile(str(temporary), "wb") as file,
            pa.ipc.new_stream(file, _SCHEMA) as stream,
        ):
            for begin in range(0, len(self.source.rows), _ROWS_A_BATCH):
                numbers = range(begin, min(begin + _ROWS_A_BATCH, len(self.source.rows)))
                stream.write_batch(self._batch(numbers))
        value = {"_type": "Value", "dtype": "int64"}
        listed = {"_type": "List", "feature": value}
        features = {"input_ids": listed, "loss_mask": listed, "seq_len": value}
        seal_json(out / "dataset_info.json", {"features": features})
        manifests = json.dumps({job: manifest.sha256 for job, manifest in self.source.rows.manifests.items()})
        state = {
            "_data_files": [{"filename": _ARROW_FILE}],
            "_fingerprint": hashlib.sha256(manifests.encode()).hexdigest()[:16],
            "_format_columns": ["input_ids", "loss_mask", "seq_len"],
            "_format_kwargs": {},
            "_format_type": "torch",
            "_output_all_columns": False,
            "_split": None,
        }
        seal_json(out / "state.json", state)

    def _batch(self, numbers: range) -> pa.RecordBatch:
        rows = []
        for row in map(self.source.rows.row, numbers):
            ids, mask = row.input_ids.tolist(), row.loss_mask.tolist()
            rows.append({"input_ids": ids, "loss_mask": mask, "seq_len": row.num_tokens})
        return pa.RecordBatch.from_pylist(rows, schema=_SCHEMA)


def make(source: Source) -> Speculators:
    """Return the format. Raises OptionRefused (`algorithm`) for MTP heads fed the state before the norm."""
    classes = {
        str(one.provenance.engine.options.get("model_class")) for one in source.rows.manifests.values()
    }
    if source.options.algorithm is Algorithm.MTP and (classes := classes & PRE_NORM_MTP):
        raise OptionRefused(
            f"the MTP heads of {', '.join(sorted(classes))} are fed the state before the final norm, and "
            "this trainer applies none that could be left out",
            field="algorithm",
            cure="train them with service.reader.Mtp(num_steps, normed=False)",
        )
    return Speculators(source)
