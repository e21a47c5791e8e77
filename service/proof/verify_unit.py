"""Verifies one unit of a finished dataset: its shards row by row, and its index against the shards.

Imports torch: import it lazily.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from schemas.dataset.entries import ShardEntry
from schemas.dataset.errors import DatasetError
from schemas.dataset.index import Witness, read_index
from schemas.dataset.manifest import Manifest
from schemas.dataset.shard import Shard, open_shard
from schemas.names import index_path
from service.proof.head import Head
from service.proof.logit_check import LogitCase, check_logits
from service.proof.row_proof import prove_row
from service.proof.tally import JobTally

_SCALARS = ("sample_id", "source_id", "num_tokens", "prompt_tokens")
_LISTS = ("input_ids", "loss_mask")


def verify_unit(
    folder: Path, job: Manifest, unit: int, head: Head | None, tally: JobTally, note: Callable[[str], None]
) -> None:
    """Read all of unit `unit` of `job` below `folder` again, where its files are. Fills `tally`.

    `note` is called with each file before it is decoded, and for each row: on some bytes pyarrow crashes the
    process, or never returns.
    """
    index = index_path(job.provenance.job_id, unit)
    indexed = None
    note(index)
    try:
        indexed = read_index(folder / index)
    except (DatasetError, OSError) as error:
        tally.fault(index, str(error))
    entries = [entry for entry in job.shards if entry.unit == unit]
    for entry in entries:
        of_shard = {row: values for (shard, row), values in (indexed or {}).items() if shard == entry.path}
        note(entry.path)
        try:
            with open_shard(folder / entry.path) as shard:
                _check_entry(shard, entry, job, tally)
                if indexed is not None:
                    _compare_index(shard, entry.path, index, of_shard, tally)
                cases = list(_rows(shard, entry.path, of_shard, head, tally, note))
        except (DatasetError, OSError) as error:
            tally.fault(entry.path, str(error))
            continue
        if head is not None and cases:
            tally.logits(entry.path, check_logits(head, cases))
    known = {entry.path for entry in entries}
    for path, row in indexed or ():
        if path not in known:
            tally.fault(index, f"names row {row} of {path}, no shard of unit {unit}")


def _check_entry(shard: Shard, entry: ShardEntry, job: Manifest, tally: JobTally) -> None:
    """Check that the shard is of this job, and as long as the manifest says."""
    for name in ("job_id", "identity", "layers", "final_norm"):
        if getattr(shard.provenance, name) != getattr(job.provenance, name):
            tally.fault(entry.path, f"its {name} is not the manifest's")
    tokens = sum(light.num_tokens for light in shard.light)
    if (len(shard.light), tokens) != (entry.rows, entry.tokens):
        counts = f"{len(shard.light)} rows of {tokens} tokens"
        tally.fault(entry.path, f"{counts}, the manifest says {entry.rows} of {entry.tokens}")


def _rows(
    shard: Shard,
    path: str,
    indexed: Mapping[int, dict[str, Any]],
    head: Head | None,
    tally: JobTally,
    note: Callable[[str], None],
) -> Iterator[LogitCase]:
    """Check every row; yield those whose logits can be checked."""
    vocab_size = head.vocab_size if head is not None else None
    for row, light in enumerate(shard.light):
        where = f"row {row} ({light.sample_id})"
        note(path)
        tally.row(path, row, light)
        try:
            proof = prove_row(shard, row, vocab_size=vocab_size, watch=tally.layer)
        except (DatasetError, OSError) as error:
            tally.fault(path, f"{where}: {error}")
            continue
        faults, witness = list(proof.faults), None
        if head is not None and proof.last is not None and row in indexed:
            witness = _witness(indexed[row])
            if witness is None:
                faults.append("the index does not hold the engine's log-probabilities of it")
        for fault in faults:
            tally.fault(path, f"{where}: {fault}")
        if witness is not None and proof.last is not None:
            yield LogitCase(where, witness, proof.last)


def _witness(values: Mapping[str, Any]) -> Witness | None:
    """Return the engine's log-probabilities in an index row, or None if they are missing."""
    tokens, logprobs = values["top_tokens"], values["top_logprobs"]
    if not tokens or logprobs is None or len(tokens) != len(logprobs):
        return None
    return tuple(zip(tokens, logprobs, strict=True))


def _compare_index(
    shard: Shard, path: str, index: str, indexed: Mapping[int, dict[str, Any]], tally: JobTally
) -> None:
    """Check that the index has exactly the shard's rows, with the same light columns."""
    rows = len(shard.light)
    absent = sorted(set(range(rows)) - indexed.keys())
    extra = sorted(indexed.keys() - set(range(rows)))
    for numbers, what in ((absent, "lacks"), (extra, "names a missing")):
        if numbers:
            tally.fault(index, f"{what} row {numbers[0]} of {path} ({len(numbers)} such rows)")
    for row, light in enumerate(shard.light):
        if row not in indexed:
            continue
        values = indexed[row]
        pairs = {name: (values[name], getattr(light, name)) for name in _SCALARS}
        pairs["supervised_tokens"] = (values["supervised_tokens"], int(light.loss_mask.sum()))
        wrong = [
            f"{name} is {stated!r}, expected {expected!r}"
            for name, (stated, expected) in pairs.items()
            if stated != expected
        ]
        wrong += [name for name in _LISTS if not np.array_equal(values[name], getattr(light, name))]
        if wrong:
            where = f"row {row} of {path} ({light.sample_id})"
            tally.fault(index, f"{where} has other values: {', '.join(wrong)}")
