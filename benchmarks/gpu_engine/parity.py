"""Captures prompts on the GPU with Quarry's connector and compares every stored row with transformers.

Legend: N decoder layers, L captured layers, T tokens, H hidden size.
"""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow.parquet as pq
import torch

from benchmarks.gpu_engine.agreement import Agreement
from benchmarks.gpu_engine.cases import COMMON, PARITY_SHAPE, TINY_SHAPE, Case, Shape, prompt_units
from benchmarks.gpu_engine.engines import Capture, RunFailed, spec_of
from benchmarks.gpu_engine.models import Reference, write_model
from connector.wire import RowRef
from schemas.names import attempt_dir
from schemas.receipts import UnitSealed
from schemas.request import Dtype, Generate
from service.capture.engine import Prompt
from service.settings import Settings
from tests.support.plans import identity, order, write_plan


@dataclass(frozen=True, slots=True)
class StoredRow:
    """A row as its shard holds it: token ids, states [L, T, H], and what the engine said."""

    token_ids: tuple[int, ...]
    states_LTH: torch.Tensor
    num_prompt_tokens: int
    num_cached_tokens: int
    answer: tuple[int, ...]


async def measure(case: Case, folder: Path, *, tiny: bool) -> dict[str, object]:
    """Run one case below `folder` and return its figures. Raises RunFailed."""
    shape = TINY_SHAPE if tiny else PARITY_SHAPE
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = folder / "target"
    write_model(case.architecture, shape, case.dtype, weights, device)
    settings = Settings(
        data_dir=folder, engine_options=COMMON | dict(case.options), pool_bytes=case.pool_bytes
    )
    units = prompt_units(case, shape.vocab_size)
    longest = max(len(ids) for rows in units for ids in rows) + max(1, case.new_tokens)
    capture = Capture(spec_of(weights, shape, case.dtype, longest), settings, {})
    try:
        await capture.start()
        stored = [
            row for unit, rows in enumerate(units) for row in await run_unit(capture, case, shape, unit, rows)
        ]
        facts = capture.facts()
    finally:
        await capture.stop()
    reference = Reference(weights, "float32", device)
    # What the dtype alone does to transformers' own states.
    same_dtype = Reference(weights, case.dtype, device) if case.dtype != "float32" else None
    agreement = Agreement(shape.layer_ids)
    for row in stored:
        theirs = same_dtype.states(row.token_ids) if same_dtype is not None else None
        agreement.add(row.states_LTH.to(device).float(), reference.states(row.token_ids), theirs)
    answers = [(row.token_ids[: row.num_prompt_tokens], row.answer) for row in stored]
    return {
        "case": asdict(case),
        "shape": asdict(shape),
        "engine": facts,
        "rows": len(stored),
        "tokens": sum(len(row.token_ids) for row in stored),
        "lengths": sorted({len(row.token_ids) for row in stored}),
        "tokens_from_prefix_cache": sum(row.num_cached_tokens for row in stored),
        "layers": agreement.figures(),
        "greedy": greedy_agreement(answers, reference),
    }


async def run_unit(
    capture: Capture, case: Case, shape: Shape, unit: int, rows: Sequence[tuple[int, ...]]
) -> list[StoredRow]:
    """Run one unit and read its sealed shard back."""
    root = capture.settings.work_root
    about = identity(
        layer_ids=shape.layer_ids,
        hidden_size=shape.hidden_size,
        num_layers=shape.num_layers,
        dtype=case.dtype,
    )
    told = order(about, len(rows), unit=unit)
    write_plan(root, rows, unit=unit)
    generate = Generate(max_tokens=case.new_tokens) if case.new_tokens else None
    prompts = [
        Prompt(f"{unit}-{row}", ids, RowRef(told.key, row, len(ids)), generate=generate)
        for row, ids in enumerate(rows)
    ]
    receipt, outputs = await capture.run_unit(told, prompts)
    stored = read_rows(root, receipt, shape, case.dtype)
    found = []
    for row, (ids, output) in enumerate(zip(rows, outputs, strict=True)):
        answer = tuple(output.outputs[0].token_ids)
        token_ids, states_LTH = stored[row]
        # The last token was sampled and never an input.
        if token_ids != ids + answer[:-1]:
            raise RunFailed(f"row {row} of unit {unit} holds other tokens than the engine ran")
        found.append(StoredRow(token_ids, states_LTH, len(ids), output.num_cached_tokens or 0, answer))
    return found


def read_rows(
    root: Path, receipt: UnitSealed, shape: Shape, dtype: Dtype
) -> dict[int, tuple[tuple[int, ...], torch.Tensor]]:
    """Return the token ids and states [L, T, H] of every row in a sealed shard, by plan row."""
    key = receipt.key
    assert receipt.file is not None, "a unit with rows has a file"
    file = pq.ParquetFile(root / attempt_dir(key.job_id, key.unit, key.epoch) / receipt.file)
    rows = {}
    for group, row in enumerate(receipt.rows):
        (record,) = file.read_row_group(group).to_pylist()
        layers = [
            torch.frombuffer(bytearray(record[f"layer_{layer}"]), dtype=getattr(torch, dtype))
            for layer in shape.layer_ids
        ]
        rows[row] = (
            tuple(record["input_ids"]),
            torch.stack(layers).view(len(layers), record["num_tokens"], shape.hidden_size),
        )
    return rows


def greedy_agreement(
    answers: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], reference: Reference
) -> dict[str, int]:
    """Say how many of the engine's answers are transformers' own in float32.

    Of those that are not, say how many depart only after transformers' answer has repeated a token.
    """
    differing = after_repeat = 0
    for prompt, answer in answers:
        expected = reference.greedy(prompt, len(answer))
        if answer != expected:
            differing += 1
            first = next(i for i, (ours, own) in enumerate(zip(answer, expected, strict=True)) if ours != own)
            before = (*prompt[-1:], *expected[:first])
            after_repeat += any(one == two for one, two in itertools.pairwise(before))
    return {"answers": len(answers), "differing": differing, "differing_after_a_repeat": after_repeat}
