"""One recipe's job, through the service in the foreground on the real engine, and what it stored.

Run as `python -m tests.architectures.measure KEY OUT`: an engine that dies takes nothing else with it.

Legend: T tokens, H hidden size.
"""

import asyncio
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from schemas.dataset.manifest import Manifest
from schemas.dataset.shard import open_shard
from schemas.dataset.states import read_states
from schemas.job import JobState
from schemas.names import manifest_path
from schemas.request import Dtype
from service.proof.reference import reference_states
from service.proof.verify import verify_dataset
from service.store import JobRow, jobs
from tests.architectures.failure import refuser
from tests.architectures.limits import (
    CHUNK,
    FLOAT32_TOLERANCE,
    LENGTHS,
    MEDIAN_FACTOR,
    MEDIAN_SLACK,
    SHARED,
    TAILS,
)
from tests.architectures.recipe import MAX_POSITION, Recipe
from tests.architectures.recipes import RECIPES
from tests.architectures.results import LayerNumbers, Row, Verdict
from tests.architectures.target import Unmakeable, digest, make_target
from tests.architectures.versions import installed
from tests.support.jobs import Shop, request
from tests.support.plans import random_ids
from tests.support.roles import Capture

REFERENCE_TIMEOUT_S = 300.0

States = Mapping[int, torch.Tensor]
"""By layer id, [T, H]."""


def prompts() -> list[list[int]]:
    """Lengths around the engine's block and longer than a chunk, then two rows that share a prefix."""
    alone = random_ids(LENGTHS, vocab_size=300, seed=1)
    head, *tails = random_ids((SHARED, *TAILS), vocab_size=300, seed=2)
    # From the middle of the vocabulary: both ends hold ids that some models act upon.
    return [[token + 100 for token in ids] for ids in [*alone, *(head + tail for tail in tails)]]


def run(recipe: Recipe, folder: Path) -> Row:
    """Make the model, run the job, judge what it left."""
    row = Row(
        key=recipe.key,
        architecture=recipe.name,
        recipe=digest(recipe),
        verdict=Verdict.CANNOT_RUN,
        dtype=recipe.dtype,
        versions=installed(),
    )
    try:
        target = make_target(folder / "models" / recipe.model_type, recipe)
    except Unmakeable as error:
        return row.model_copy(update={"by": "transformers", "reason": str(error)})
    layers = tuple(range(recipe.first_layer, recipe.num_layers))
    job, dataset = extract(recipe, target, folder / "proven", prompts(), layers=layers, canary="run")
    if job.problem is None:
        return row.model_copy(update=judge(recipe, target, dataset, job))
    by, verdict = refuser(job.problem)
    about = {"verdict": verdict, "by": by, "reason": job.problem.detail.replace(str(target), target.name)}
    if by == "the canary":
        job, dataset = extract(recipe, target, folder / "unproven", prompts(), layers=layers, canary="skip")
        if job.state is JobState.COMPLETED:
            about = judge(recipe, target, dataset, job) | about
    return row.model_copy(update=about)


def extract(
    recipe: Recipe, target: Path, folder: Path, rows: Sequence[Sequence[int]], **more: object
) -> tuple[JobRow, Path]:
    """Run a job of `rows` to its end; return it and its dataset's folder.

    `more` are fields of the request.
    """
    options = {"enforce_eager": True, "max_num_batched_tokens": CHUNK, "max_num_seqs": 8} | recipe.options
    shop = Shop.open(
        folder,
        target,
        engine="service.capture.vllm_engine:VllmEngine",
        engine_options=options,
        unit_attempts=1,
    )
    body = request(
        target,
        [{"id": str(row), "token_ids": ids} for row, ids in enumerate(rows)],
        max_tokens=MAX_POSITION,
        dtype=recipe.dtype,
        **more,
    )
    job_id = shop.submit(body)
    shop.plan()
    if shop.store.read(jobs.job, job_id).state is JobState.RUNNING:
        asyncio.run(Capture(shop.store, shop.settings, "matrix", only_job=job_id).run())
        shop.publish()
    return shop.store.read(jobs.job, job_id), shop.settings.dataset_dir(job_id)


def judge(recipe: Recipe, target: Path, dataset: Path, job: JobRow) -> dict[str, Any]:
    """Hold every stored row against the reference; return what the row is to say."""
    manifest = Manifest.model_validate_json((dataset / manifest_path(job.id)).read_bytes())
    layer_ids = manifest.provenance.identity.layer_ids
    faults = [str(finding) for finding in verify_dataset(dataset, model_folder=target).findings]
    samples = prompts()
    stored = stored_states(dataset, job.id, layer_ids)
    if {row: ids for row, (ids, _) in stored.items()} != dict(enumerate(samples)):
        return {"verdict": Verdict.WRONG, "reason": "rows are missing, or hold other tokens than were sent"}
    got = [stored[row][1] for row in range(len(samples))]
    exact = reference(target, samples, "float32")
    own = None if recipe.dtype == "float32" else reference(target, samples, recipe.dtype)
    layers = tuple(numbers(layer_id, got, exact, own) for layer_id in layer_ids)
    faults += [f"layer {layer.layer_id} is off" for layer in layers if not fits(layer, recipe.dtype)]
    options = manifest.provenance.engine.options
    return {
        "verdict": Verdict.WRONG if faults else Verdict.PASS,
        "reason": "; ".join(faults) or None,
        "route": options.get("route"),
        "model_class": options.get("model_class"),
        "rows": len(stored),
        "tokens": manifest.totals.tokens,
        "logit_rows": manifest.checks.logit_rows,
        "logit_argmax_agree": manifest.checks.logit_argmax_agree,
        "layers": layers,
    }


def reference(target: Path, samples: Sequence[Sequence[int]], dtype: Dtype) -> Sequence[States]:
    """Return by sample the states of every layer, from a process of its own."""
    answer = reference_states(target, samples, dtype, max_bytes=None, timeout_s=REFERENCE_TIMEOUT_S)
    return asyncio.run(answer).states


def stored_states(
    dataset: Path, job_id: str, layer_ids: Sequence[int]
) -> dict[int, tuple[list[int], States]]:
    """Return by the sample's number its token ids and its states."""
    found: dict[int, tuple[list[int], States]] = {}
    for shard in sorted((dataset / "data" / job_id).glob("*.parquet")):
        with open_shard(shard) as opened:
            for row, light in enumerate(opened.light):
                states = {layer_id: read_states(opened, row, layer_id) for layer_id in layer_ids}
                found[int(str(light.source_id))] = (light.input_ids.tolist(), states)
    return found


def numbers(
    layer_id: int, got: Sequence[States], exact: Sequence[States], own: Sequence[States] | None
) -> LayerNumbers:
    """Measure one layer over all tokens of all rows, in float64."""
    got_TH, want_TH = all_tokens(got, layer_id), all_tokens(exact, layer_id)
    error_T = errors(got_TH, want_TH)
    own_T = None if own is None else errors(all_tokens(own, layer_id), want_TH)
    return LayerNumbers(
        layer_id=layer_id,
        min_cosine=round(float(torch.cosine_similarity(got_TH, want_TH, dim=1).min()), 12),
        median_rel_error=short(error_T.median()),
        max_rel_error=short(error_T.max()),
        own_median_rel_error=None if own_T is None else short(own_T.median()),
        own_max_rel_error=None if own_T is None else short(own_T.max()),
    )


def all_tokens(rows: Sequence[States], layer_id: int) -> torch.Tensor:
    """Return one layer's states of all rows behind one another, [T, H]."""
    return torch.cat([states[layer_id].double() for states in rows])


def errors(got_TH: torch.Tensor, want_TH: torch.Tensor) -> torch.Tensor:
    """Return each token's relative distance [T]."""
    distance_T: torch.Tensor = torch.linalg.vector_norm(got_TH - want_TH, dim=1)
    return distance_T / torch.linalg.vector_norm(want_TH, dim=1)


def short(value: torch.Tensor) -> float:
    """Return three digits of it."""
    return float(f"{float(value):.3g}")


def fits(layer: LayerNumbers, dtype: Dtype) -> bool:
    """Hold float32 to a tolerance, and other dtypes to what transformers itself loses in them."""
    if dtype == "float32" or layer.own_median_rel_error is None:
        return layer.max_rel_error <= FLOAT32_TOLERANCE
    return layer.median_rel_error <= MEDIAN_FACTOR * layer.own_median_rel_error + MEDIAN_SLACK


def main() -> None:
    """Measure the recipe that is named, and write its row."""
    key, out = sys.argv[1:]
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    with tempfile.TemporaryDirectory() as folder:
        row = run(RECIPES[key], Path(folder))
    Path(out).write_text(row.model_dump_json())


if __name__ == "__main__":
    main()
