"""Reads a finished dataset with `datasets` and with pyarrow, and prints what a row holds."""

from pathlib import Path

import datasets
import pyarrow.parquet as pq
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from schemas.dataset.columns import LAYER_PREFIX
from schemas.dataset.manifest import Manifest
from schemas.job import JobSummary
from schemas.names import manifest_path

SHOWN_TOKENS = 24


def show_dataset(dataset: Path, job: JobSummary, target: Path, console: Console) -> None:
    """Print where the dataset is, what it holds, and its first row."""
    manifest = Manifest.model_validate_json((dataset / manifest_path(job.id)).read_text())
    totals = manifest.totals
    console.print(f"[bold]5. The dataset[/]: {dataset}")
    samples = f"{totals.samples_written} samples written, {totals.samples_rejected} rejected"
    console.print(f"   {samples}; {totals.tokens} tokens; {totals.bytes / 1e6:.1f} MB of shards")
    for config in datasets.get_dataset_config_names(str(dataset)):
        rows = datasets.load_dataset(str(dataset), config, split="train", streaming=True)
        # To the end: pyarrow may abort a process that exits right beside a half-read stream.
        count = sum(1 for _ in rows)
        console.print(f"   datasets, configuration {config!r}: {count} rows of {', '.join(rows.features)}")
    show_row(dataset / manifest.shards[0].path, manifest, target, console)


def show_row(shard: Path, manifest: Manifest, target: Path, console: Console) -> None:
    """Print a shard's first row: ids, first tokens, supervised share, and each layer's shape and norm."""
    identity = manifest.provenance.identity
    file = pq.ParquetFile(shard)
    row = file.read_row_group(0).to_pylist()[0]
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    text = tokenizer.decode(row["input_ids"][:SHOWN_TOKENS], skip_special_tokens=False)
    supervised = sum(row["loss_mask"]) / row["num_tokens"]

    table = Table(title=f"row 0 of {shard.name}, {file.metadata.num_row_groups} rows", title_justify="left")
    table.add_column("column")
    table.add_column("value")
    table.add_row("sample_id", row["sample_id"])
    table.add_row("source_id", str(row["source_id"]))
    table.add_row("num_tokens, prompt_tokens", f"{row['num_tokens']}, {row['prompt_tokens']}")
    table.add_row("input_ids", f"[{row['num_tokens']}] {text!r} ...")
    table.add_row("loss_mask", f"[{row['num_tokens']}] {supervised:.0%} supervised")
    for name in (column for column in file.schema_arrow.names if column.startswith(LAYER_PREFIX)):
        hidden_TH = torch.frombuffer(bytearray(row[name]), dtype=getattr(torch, identity.dtype))
        hidden_TH = hidden_TH.view(-1, row["hidden_size"]).float()
        norm = hidden_TH.norm(dim=1).mean().item()
        table.add_row(name, f"{list(hidden_TH.shape)} {identity.dtype}, mean norm {norm:.2f}")
    table.add_row("checksums", ", ".join(f"{value:016x}" for value in row["checksums"]))
    console.print(table)
