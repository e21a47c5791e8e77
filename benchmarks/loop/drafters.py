"""The drafters of every dataset: trained as the trainer's users train them, and served by vLLM."""

import json
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.loop.live import CHECKPOINTS, train_live
from benchmarks.loop.recipe import AUX, LoopRecipe, Method
from benchmarks.loop.serve import Acceptance, Asked, served
from benchmarks.loop.stage import LOG, TRAINER_ENVIRONMENT, Cache, python, run
from benchmarks.loop.table import IN_PLACE, LIVE, UNTRAINED, Outcome
from schemas.names import MANIFEST_FOLDER
from service.reader import QuarryDataset

DRAFTER, STATE = "drafter", "training_state.json"
SIDE_BY_SIDE = 2
"""Drafters trained and served at a time, each on one core."""


def acceptance(
    cache: Cache,
    recipe: LoopRecipe,
    method: Method,
    target: Path,
    data: Mapping[str, Path],
    held_out: Sequence[Asked],
) -> dict[str, Outcome]:
    """Train and serve the drafters of every dataset, and one that was not trained. Raises LoopFailed."""

    def drafter(name: str, folder: Path, seed: int) -> tuple[int, Acceptance]:
        trained = train(cache, recipe, method, target, name, folder, seed)
        steps = json.loads((trained / DRAFTER / STATE).read_text())["global_step"]
        return steps, served(cache, recipe, method, target, trained / DRAFTER, held_out)

    raw = untrained(cache, recipe, method, target, next(iter(data.values())), recipe.seeds[0])
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        first = pool.submit(served, cache, recipe, method, target, raw / DRAFTER, held_out)
        running = {
            (seed, name): pool.submit(drafter, name, folder, seed)
            for seed in recipe.seeds
            for name, folder in data.items()
        }
        outcomes = {
            name: outcome({seed: running[seed, name].result() for seed in recipe.seeds}) for name in data
        }
        outcomes[UNTRAINED] = Outcome((0,), {recipe.seeds[0]: first.result()})
    return outcomes


def outcome(by_seed: Mapping[int, tuple[int, Acceptance]]) -> Outcome:
    """Return what all drafters of a dataset came to: steps and acceptance, seed by seed."""
    steps = tuple(steps for steps, _ in by_seed.values())
    return Outcome(steps, {seed: acceptance for seed, (_, acceptance) in by_seed.items()})


def train(
    cache: Cache, recipe: LoopRecipe, method: Method, target: Path, name: str, data: Path, seed: int
) -> Path:
    """Return the folder of a drafter that was trained on the data of that name. Raises LoopFailed."""
    decides = _decides(recipe, method, target, data, seed) | {
        "epochs": recipe.epochs,
        "batch_tokens": recipe.batch_tokens,
        "drafted": recipe.drafted,
        "learning_rate": recipe.learning_rate,
        **({"steps": recipe.steps} if recipe.steps else {}),
    }

    def make(folder: Path) -> None:
        words = command(recipe, method, target, data, folder / "all", seed)
        if name == LIVE:
            words += ["--epochs", "1", "--checkpoint-freq", str(1 / CHECKPOINTS)]
            words += ["--max-steps", str(max_steps(recipe, data))]
            train_live(folder, words, target, data, recipe, seed)
        else:
            if recipe.steps:  # which end within an epoch
                words += ["--max-steps", str(recipe.steps), "--checkpoint-freq", "1"]
            run(words, folder / LOG, TRAINER_ENVIRONMENT)
        keep_last(folder / "all", folder / DRAFTER)

    what = name if name in (IN_PLACE, LIVE) else data.parent.name.split("-")[0]
    return cache.stage(f"trained-{method.prefix}{what}-{seed}", decides | {"how": what}, make)


def max_steps(recipe: LoopRecipe, dataset: Path) -> int:
    """Return how many batches all epochs of a dataset are, where each ends at a row that does not fit."""
    rows = QuarryDataset(dataset)
    filled = recipe.batch_tokens - sum(rows.num_tokens) / len(rows) / 2
    return round(recipe.epochs * sum(rows.num_tokens) / filled)


def untrained(cache: Cache, recipe: LoopRecipe, method: Method, target: Path, data: Path, seed: int) -> Path:
    """Return the folder of the drafter that training begins with. Raises LoopFailed."""

    def make(folder: Path) -> None:
        begin = [*command(recipe, method, target, data, folder / DRAFTER, seed), "--dry-run"]
        run(begin, folder / LOG, TRAINER_ENVIRONMENT)

    decides = _decides(recipe, method, target, data, seed)
    return cache.stage(f"untrained-{method.prefix}{seed}", decides, make)


def _decides(recipe: LoopRecipe, method: Method, target: Path, data: Path, seed: int) -> dict[str, object]:
    return {
        "method": method.trainers,
        "data": data.parent.name,
        "target": target.name,
        "seed": seed,
        "draft_vocab": recipe.draft_vocab,
    }


def command(
    recipe: LoopRecipe, method: Method, target: Path, data: Path, out: Path, seed: int
) -> list[str | Path]:
    """Return the trainer's command."""
    options: dict[str, object] = {
        "--speculator-type": method.trainers,
        "--verifier-name-or-path": target,
        "--draft-vocab-size": recipe.draft_vocab,
        method.depth: recipe.drafted,
        "--total-seq-len": recipe.batch_tokens,
        "--epochs": recipe.epochs,
        "--lr": recipe.learning_rate,
        "--seed": seed,
        "--save-path": out,
        "--checkpoint-freq": recipe.epochs,
        "--log-freq": 10,
        "--num-workers": 0,
        # What a CPU has instead of flex attention, the fused loss, and bfloat16.
        "--draft-attn-impl": "sdpa",
        "--loss-implementation": "eager",
        "--hidden-states-dtype": "float32",
    }
    words = [str(word) for option in options.items() for word in option]
    layers = ["--target-layer-ids", *map(str, AUX)]
    is_dataset = (data / MANIFEST_FOLDER).is_dir()  # which is read in place
    begin = ("quarry", "train", "speculators", data) if is_dataset else ("train", "--data-path", data)
    missing = ["--on-missing", "raise"]
    return python("benchmarks.loop.trainer_on_cpu", *begin, *words, *layers, *missing)


def keep_last(checkpoints: Path, drafter: Path) -> None:
    """Move the last epoch's model and the record of its training to `drafter`; the rest is deleted."""
    epochs = [path for path in checkpoints.iterdir() if path.name.isdigit()]
    last = max(epochs, key=lambda path: int(path.name))
    drafter.mkdir()
    for name in ("config.json", "model.safetensors", STATE, "val_metrics.json"):
        if (last / name).exists():
            (last / name).rename(drafter / name)
    shutil.rmtree(checkpoints)
