"""Counts false alarms: healthy samples through vLLM with every check on, each row's logits included.

`python -m benchmarks.healthy --save` runs 1,000 samples on each of five architectures in two dtypes and keeps
the figures. An alarm is anything that a check said: a failed unit, a rejected row, a finding of `quarry
verify`.
"""

import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import RESULTS, command_line, keep, markdown, positive, say
from benchmarks.machine import machine_facts
from schemas.dataset.manifest import Manifest
from schemas.names import manifest_path
from schemas.request import Dtype
from service.capture.loop import Capture
from service.proof import checks
from service.proof.head import Head
from service.proof.logit_check import MOST_SIGMAS, LogitCase, LogitVerdict
from service.proof.verify import verify_dataset
from service.store import commits, jobs
from tests.architectures.recipe import MAX_POSITION, NUM_LAYERS, Recipe
from tests.architectures.recipes import RECIPES
from tests.architectures.target import make_target
from tests.support.jobs import Shop, request

ARCHITECTURES = (
    "LlamaForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "GptOssForCausalLM",
    "GraniteForCausalLM",
)
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
NAME = "healthy"
LAYERS = (2, 4, 5)
SHORT, LONG, LONG_SHARE = (8, 65), (200, 500), 0.2
PREFIX_TOKENS, PREFIX_SHARE = 130, 0.5
"""Half of the long samples begin with one of a few prefixes, which the prefix cache then serves."""


@dataclass
class Margins:
    """How near healthy rows came to an alarm: each as a part of what its check lets pass."""

    logit_rows: int = 0
    logit_argmax_agree: int = 0
    last_token: float = 0.0


@dataclass
class Outcome:
    """One model's samples."""

    architecture: str
    dtype: str
    samples: int
    tokens: int = 0
    seconds: float = 0.0
    alarms: list[str] = field(default_factory=list)
    margins: Margins = field(default_factory=Margins)
    canary: dict[str, Any] = field(default_factory=dict)


def samples(count: int, seed: int) -> list[list[int]]:
    """Return token ids from the middle of the vocabulary: both ends hold ids that some models act upon."""
    draw = np.random.default_rng(seed)
    prefixes = [draw.integers(100, 400, PREFIX_TOKENS).tolist() for _ in range(4)]
    rows = []
    for _ in range(count):
        long = draw.random() < LONG_SHARE
        ids = draw.integers(100, 400, draw.integers(*(LONG if long else SHORT))).tolist()
        if long and draw.random() < PREFIX_SHARE:
            ids[:PREFIX_TOKENS] = prefixes[draw.integers(len(prefixes))]
        rows.append(ids)
    return rows


@contextmanager
def measured(margins: Margins) -> Iterator[None]:
    """Note what the checks of every unit saw, and pass it on."""
    check_logits = checks.check_logits

    def logits(head: Head, cases: Sequence[LogitCase]) -> LogitVerdict:
        verdict = check_logits(head, cases)
        margins.logit_rows += verdict.rows
        margins.logit_argmax_agree += verdict.argmax_agree
        off = [abs(one.engine - one.stored) / (one.sigma * MOST_SIGMAS) for one in verdict.readings]
        margins.last_token = max(margins.last_token, *off)
        return verdict

    checks.check_logits = logits
    try:
        yield
    finally:
        checks.check_logits = check_logits


def run(recipe: Recipe, count: int, folder: Path) -> Outcome:
    """Run one model's samples as a job of its own, then verify its dataset."""
    outcome = Outcome(recipe.key, recipe.dtype, count)
    target = make_target(folder / "models" / recipe.model_type, recipe)
    rows = samples(count, seed=len(recipe.key))
    outcome.tokens = sum(len(ids) for ids in rows)
    options = {"enforce_eager": True, "max_num_batched_tokens": 1024} | recipe.options
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
        layers=LAYERS,
        max_tokens=MAX_POSITION,
        canary="run",
        storage={"shard_bytes": 33_554_432},
    )
    begun = time.monotonic()
    job_id = shop.submit(body)
    shop.plan()
    with measured(outcome.margins):
        asyncio.run(Capture(shop.store, shop.settings, "healthy", only_job=job_id).run())
    shop.publish()
    outcome.seconds = round(time.monotonic() - begun, 1)
    outcome.alarms = list(alarms(shop, job_id, target))
    outcome.canary = canary_of(shop, job_id)
    shop.store.close()
    return outcome


def alarms(shop: Shop, job_id: str, target: Path) -> Iterator[str]:
    """Yield everything that a check said."""
    job = shop.store.read(jobs.job, job_id)
    if job.problem is not None:
        yield f"{job.problem.type}: {job.problem.detail}"
        return
    for reject in shop.store.read(commits.rejects, job_id):
        yield f"rejected: {reject.reason}: {reject.detail}"
    report = verify_dataset(shop.settings.dataset_dir(job_id), model_folder=target)
    for finding in report.findings:
        yield f"verify: {finding.path}: {finding.what}"


def canary_of(shop: Shop, job_id: str) -> dict[str, Any]:
    """Return what the manifest says of the canary; nothing of a job that has none."""
    path = shop.settings.dataset_dir(job_id) / manifest_path(job_id)
    if not path.is_file():
        return {}
    checks_done = Manifest.model_validate_json(path.read_bytes()).checks.model_dump(mode="json")
    return {name: value for name, value in checks_done.items() if "canary" in name}


def keep_model(outcome: Outcome, facts: dict[str, Any]) -> None:
    """Put one model's figures into the results, in place of older ones of the same model."""
    file = RESULTS / f"{NAME}.json"
    models = json.loads(file.read_text())["models"] if file.is_file() else []
    kept = {(one["architecture"], one["dtype"]): one for one in [*models, asdict(outcome)]}
    in_order = [kept[key] for key in sorted(kept)]
    keep(NAME, {"layers": [*LAYERS, NUM_LAYERS], "machine": facts, "models": in_order})


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a line for each model."""
    rows = [
        [
            f"{one.architecture} {one.dtype}",
            str(one.samples),
            f"{one.seconds:.0f}",
            str(len(one.alarms)),
            f"{one.margins.last_token:.0%}",
        ]
        for one in outcomes
    ]
    return markdown(["model", "samples", "seconds", "alarms", "of what rounding explains"], rows)


def main() -> int:
    """Run the models that are asked for; exit 1 if there was any alarm."""
    parser = command_line("benchmarks.healthy", __doc__, save=NAME)
    parser.add_argument("--samples", type=positive, default=1000, help="for each model and dtype")
    parser.add_argument("--only", nargs="+", default=ARCHITECTURES, metavar="ARCHITECTURE")
    options = parser.parse_args()
    outcomes = []
    for name, dtype in itertools.product(options.only, DTYPES):
        with tempfile.TemporaryDirectory(prefix="quarry-healthy-") as folder:
            facts = machine_facts(Path(folder))
            outcome = run(replace(RECIPES[name], dtype=dtype), options.samples, Path(folder))
        if options.save:
            keep_model(outcome, facts)
        say("\n  ".join([f"{name} {dtype}: {len(outcome.alarms)} alarms", *outcome.alarms[:5]]))
        outcomes.append(outcome)
    print(table(outcomes))
    return 1 if any(one.alarms for one in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
