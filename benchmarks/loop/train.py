"""The speculators trainer, run as its users run it, on the files of one dataset."""

import json
import shutil
from pathlib import Path

from benchmarks.loop.method import Method
from benchmarks.loop.recipe import AUX, LoopRecipe
from benchmarks.loop.stage import LOG, Cache, python, run
from benchmarks.trainers import TRAINERS

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"PYTHONPATH": f"{TRAINERS}:{ROOT}", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
DRAFTER, STATE = "drafter", "training_state.json"


def train(cache: Cache, recipe: LoopRecipe, method: Method, target: Path, data: Path, seed: int) -> Path:
    """Return the folder of a drafter that was trained on `data`. Raises LoopFailed."""
    decides = method.decides | {
        "data": data.parent.name,
        "target": target.name,
        "seed": seed,
        "epochs": recipe.epochs,
        "batch_tokens": recipe.batch_tokens,
        "draft_vocab": recipe.draft_vocab,
        "drafted": recipe.drafted,
        "learning_rate": recipe.learning_rate,
    }

    def make(folder: Path) -> None:
        run(command(recipe, method, target, data, folder / "all", seed), folder / LOG, ENVIRONMENT)
        keep_last(folder / "all", folder / DRAFTER)

    return cache.stage(f"trained-{method.prefix}{data.parent.name.split('-')[0]}-{seed}", decides, make)


def command(
    recipe: LoopRecipe, method: Method, target: Path, data: Path, out: Path, seed: int
) -> list[str | Path]:
    """Return the trainer's command."""
    options: dict[str, object] = {
        "--speculator-type": method.trainers,
        "--verifier-name-or-path": target,
        "--data-path": data,
        "--on-missing": "raise",
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
    told = [str(word) for option in options.items() for word in option]
    layers = ["--target-layer-ids", *map(str, AUX)]
    return python("benchmarks.loop.trainer_on_cpu", "train", *told, *layers)


def keep_last(checkpoints: Path, drafter: Path) -> None:
    """Move the last epoch's model and what is told of its training to `drafter`; the rest is deleted."""
    last = max(
        (path for path in checkpoints.iterdir() if path.name.isdigit()), key=lambda path: int(path.name)
    )
    drafter.mkdir()
    for name in ("config.json", "model.safetensors", STATE, "val_metrics.json"):
        if (last / name).exists():
            (last / name).rename(drafter / name)
    shutil.rmtree(checkpoints)


def steps_of(trained: Path) -> int:
    """Return the optimizer steps that a drafter was trained for."""
    steps: int = json.loads((trained / DRAFTER / STATE).read_text())["global_step"]
    return steps


def untrained(cache: Cache, recipe: LoopRecipe, method: Method, target: Path, data: Path, seed: int) -> Path:
    """Return the folder of the drafter that training begins with. Raises LoopFailed."""
    decides = method.decides | {
        "target": target.name,
        "draft_vocab": recipe.draft_vocab,
        "seed": seed,
        "data": data.parent.name,
    }

    def make(folder: Path) -> None:
        begin = [*command(recipe, method, target, data, folder / DRAFTER, seed), "--dry-run"]
        run(begin, folder / LOG, ENVIRONMENT)

    return cache.stage(f"untrained-{method.prefix}{seed}", decides, make)
