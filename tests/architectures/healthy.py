"""Counts false alarms: healthy samples through vLLM with every check on, each row's logits included.

`python -m tests.architectures.healthy --save` runs 1,000 samples on each of five architectures in two dtypes
and keeps the figures. An alarm is anything that a check said: a failed job, a rejected row, a finding of
`quarry verify`.
"""

import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from benchmarks.harness import command_line, keep, markdown, positive, say
from benchmarks.machine import machine_facts
from schemas.dataset.manifest import Manifest
from schemas.names import manifest_path
from schemas.request import Dtype
from service.proof import checks
from service.proof.head import Head
from service.proof.logit_check import MOST_SIGMAS, LogitCase, LogitVerdict
from service.proof.verify import verify_dataset
from service.store import JobRow
from tests.architectures.measure import extract
from tests.architectures.recipe import NUM_LAYERS, Recipe
from tests.architectures.recipes import RECIPES
from tests.architectures.target import make_target

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
    """How near healthy rows came to an alarm: as a part of what the check lets pass."""

    last_token: float = 0.0


@dataclass
class Outcome:
    """One model's samples."""

    architecture: str
    dtype: str
    samples: int
    tokens: int
    seconds: float
    alarms: list[str]
    margins: Margins = field(default_factory=Margins)


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
def measured() -> Iterator[Margins]:
    """Note what the checks of every unit saw, and pass it on."""
    margins, check_logits = Margins(), checks.check_logits

    def logits(head: Head, cases: Sequence[LogitCase]) -> LogitVerdict:
        verdict = check_logits(head, cases)
        off = [abs(one.engine - one.stored) / (one.sigma * MOST_SIGMAS) for one in verdict.readings]
        margins.last_token = max(margins.last_token, *off)
        return verdict

    checks.check_logits = logits
    try:
        yield margins
    finally:
        checks.check_logits = check_logits


def run(recipe: Recipe, count: int, folder: Path) -> Outcome:
    """Run one model's samples as a job of its own, then verify its dataset."""
    target = make_target(folder / "models" / recipe.model_type, recipe)
    rows = samples(count, seed=len(recipe.key))
    storage = {"shard_bytes": 33_554_432}
    begun = time.monotonic()
    with measured() as margins:
        job, dataset = extract(recipe, target, folder, rows, layers=LAYERS, canary="run", storage=storage)
    seconds = round(time.monotonic() - begun, 1)
    tokens = sum(len(ids) for ids in rows)
    found = list(alarms(job, dataset, target))
    return Outcome(recipe.key, recipe.dtype, count, tokens, seconds, found, margins)


def alarms(job: JobRow, dataset: Path, target: Path) -> Iterator[str]:
    """Yield everything that a check said."""
    if job.problem is not None:
        yield f"{job.problem.type}: {job.problem.detail}"
        return
    manifest = Manifest.model_validate_json((dataset / manifest_path(job.id)).read_bytes())
    for reject in manifest.rejects:
        yield f"rejected: {reject.reason}: {reject.detail}"
    for finding in verify_dataset(dataset, model_folder=target).findings:
        yield f"verify: {finding.path}: {finding.what}"


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
    parser = command_line("tests.architectures.healthy", __doc__, save=NAME)
    parser.add_argument("--samples", type=positive, default=1000, help="for each model and dtype")
    parser.add_argument("--only", nargs="+", default=ARCHITECTURES, metavar="ARCHITECTURE")
    options = parser.parse_args()
    outcomes: list[Outcome] = []
    for name, dtype in itertools.product(options.only, DTYPES):
        recipe = RECIPES[name]
        speed = {"max_num_batched_tokens": 1024, "max_num_seqs": 256}
        recipe = replace(recipe, dtype=dtype, options=speed | recipe.options)
        with tempfile.TemporaryDirectory(prefix="quarry-healthy-") as folder:
            facts = machine_facts(Path(folder))
            outcomes.append(run(recipe, options.samples, Path(folder)))
        found = outcomes[-1].alarms
        say("\n  ".join([f"{name} {dtype}: {len(found)} alarms", *found[:5]]))
        models = [asdict(one) for one in outcomes]
        keep(options.save, {"layers": [*LAYERS, NUM_LAYERS], "machine": facts, "models": models})
    print(table(outcomes))
    return 1 if any(one.alarms for one in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
