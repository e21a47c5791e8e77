"""Quarry's part: the target answers on-policy, its states are captured, and the dataset is exported."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.loop.recipe import AUX, LAST
from benchmarks.loop.stage import LOG, Cache, run
from schemas.request import Dtype
from service.reader import QuarryDataset

QUARRY = Path(sys.executable).with_name("quarry")
DATASET, EXPORT = "dataset", "export"
MAX_TOKENS = 1000

LAYERS = tuple(sorted({*AUX, *(k - 1 for k in AUX), LAST - 1}))
"""Captured: what the drafter takes, and the layer below each of them for the datasets that are wrong."""

ENVIRONMENT = {
    "QUARRY_ENGINE_OPTIONS": json.dumps({"enforce_eager": True, "max_num_seqs": 64}),
    "QUARRY_CPU_KV_CACHE_GIB": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def generated(
    cache: Cache,
    name: str,
    target: Path,
    prompts: Sequence[list[dict[str, Any]]],
    answer_tokens: int,
    dtype: Dtype = "float32",
    *,
    proven: bool = True,
) -> Path:
    """Return a dataset of the target's greedy answers with the states of the decode steps themselves.

    `prompts` are conversations up to a question. One that is not `proven` runs no canary and no `quarry
    verify`: both take longer than a small job. Raises LoopFailed.
    """
    samples = [{"id": str(number), "messages": turns} for number, turns in enumerate(prompts)]
    answer = {"max_tokens": answer_tokens, "capture": "one_pass"}
    return extracted(
        cache, f"{name}_generated_{dtype}", target, samples, dtype, proven=proven, generate=answer
    )


def prefilled(
    cache: Cache,
    name: str,
    target: Path,
    dataset: Path,
    dtype: Dtype = "float32",
    *,
    proven: bool = False,
    **more: object,
) -> Path:
    """Return a dataset of the same token ids and masks, each row prefilled at once. Raises LoopFailed.

    `more` are other fields of the job, `proven` as with `generated`.
    """
    samples = list(_token_samples(dataset))
    return extracted(cache, f"{name}_prefilled_{dtype}", target, samples, dtype, proven=proven, **more)


def _token_samples(dataset: Path) -> list[dict[str, Any]]:
    rows = QuarryDataset(dataset)
    return [
        {"id": row.source_id, "token_ids": row.input_ids.tolist(), "loss_mask": row.loss_mask.tolist()}
        for row in map(rows.row, range(len(rows)))
    ]


def extracted(
    cache: Cache,
    name: str,
    target: Path,
    samples: list[dict[str, Any]],
    dtype: Dtype,
    *,
    proven: bool,
    **more: object,
) -> Path:
    """Run one job with `quarry extract`; return the dataset's folder. Raises LoopFailed."""
    job = {
        "model": str(target),
        "dtype": dtype,
        "layers": LAYERS,
        "source": {"kind": "inline", "samples": samples},
        "max_tokens": MAX_TOKENS,
        "on_too_long": "reject",
        "canary": "run" if proven else "skip",
        **more,
    }

    def make(folder: Path) -> None:
        (folder / "job.json").write_text(json.dumps(job))
        out, log = folder / DATASET, folder / LOG
        run([QUARRY, "extract", folder / "job.json", "--out", out, "--strict"], log, ENVIRONMENT)
        if proven:
            run([QUARRY, "verify", out, "--model", target], log, ENVIRONMENT)

    return cache.stage(name, job | {"model": target.name}, make) / DATASET


def exported(cache: Cache, dataset: Path, layers: Sequence[int], draft_vocab: int) -> Path:
    """Return what `quarry export --to speculators` writes. Raises LoopFailed."""
    name = f"{dataset.parent.name.split('-')[0]}_layers_{'_'.join(map(str, layers))}"
    decides = {"dataset": dataset.parent.name, "layers": list(layers), "draft_vocab": draft_vocab}

    def make(folder: Path) -> None:
        chosen = ["--layers", ",".join(map(str, layers)), "--draft-vocab", str(draft_vocab)]
        command: list[str | Path] = [
            QUARRY,
            "export",
            dataset,
            "--to",
            "speculators",
            "--out",
            folder / EXPORT,
            *chosen,
        ]
        run(command, folder / LOG, ENVIRONMENT)

    return cache.stage(name, decides, make) / EXPORT
