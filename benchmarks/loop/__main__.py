"""`python -m benchmarks.loop`: target, on-policy answers, datasets, drafters, and what vLLM accepts of them.

Every stage is kept in `.cache/loop`; run again, it goes on where it stopped.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.loop.drafters import acceptance
from benchmarks.loop.extract import exported, generated, prefilled
from benchmarks.loop.method import EAGLE3, PEAGLE
from benchmarks.loop.peer import dumped
from benchmarks.loop.questions import long_prompts, question, split
from benchmarks.loop.recipe import AUX, SHORT, LoopRecipe
from benchmarks.loop.stage import Cache, LoopFailed, say
from benchmarks.loop.states import Difference, FileDifference, differences, of_exports
from benchmarks.loop.table import FEWER, FP8, OURS, PEER, WRONG, Outcome, judged, report
from benchmarks.loop.target import make_target
from benchmarks.loop.wrong import spoiled
from benchmarks.machine import machine_facts
from benchmarks.trainers import has_speculators
from examples.tiny_target import cached_target
from schemas.request import Dtype

RESULTS = Path(__file__).parents[1] / "results" / "loop.json"
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
SLACK = 0.05
"""Tokens a step: how far chance alone moves a mean accepted length here; see the README."""
PEAGLE_SLACK = 0.03
"""The same for P-EAGLE: noise of 1e-6 on every state moved none of five drafters by more than 0.01."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the loop, print the tables, keep the figures; return 1 if they are not as they should be."""
    told = parser().parse_args(arguments)
    recipe = (SHORT if told.short else LoopRecipe()).changed(
        questions=told.conversations,
        epochs=told.epochs,
        seeds=tuple(range(told.seeds)) if told.seeds else None,
        target_steps=told.target_steps,
    )
    if not has_speculators():
        say("the speculators trainer is not there: run 'make .cache/trainers/installed'")
        return 2
    try:
        cache = Cache(told.dir.resolve())
        target = make_target(cache, recipe)
        apart = decode_against_prefill(cache, recipe)
        asked, held_out = split(recipe.questions, recipe.held_out)
        data = datasets(cache, recipe, target, asked)
        beside = of_exports(data[OURS], data[PEER])
        outcomes = acceptance(cache, recipe, EAGLE3, target, data, held_out)
        fewer = {name: data[name] for name in FEWER}
        parallel = acceptance(cache, recipe, PEAGLE, target, fewer, held_out)
    except LoopFailed as error:
        say(str(error))
        return 1
    for part in report({EAGLE3.title: outcomes, PEAGLE.title: parallel}, beside, apart):
        say(f"\n{part}")
    wrong = [*judged(EAGLE3.title, outcomes, SLACK), *judged(PEAGLE.title, parallel, PEAGLE_SLACK)]
    for line in wrong:
        say(f"NOT AS IT SHOULD BE: {line}")
    if told.save:
        told.save.write_text(
            json.dumps(results(recipe, outcomes, parallel, beside, apart, wrong, told.dir), indent=1) + "\n"
        )
    return bool(wrong)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.loop", description=__doc__)
    add = made.add_argument
    add("--short", action="store_true", help="a few minutes: tells right from wrong, no more")
    add("--conversations", type=int, metavar="N", help="questions that the target answers for the training")
    add("--epochs", type=int, metavar="N", help="passes of the trainer over the dataset")
    add("--seeds", type=int, metavar="N", help="drafters of every dataset")
    add("--target-steps", type=int, metavar="N", help="training of the target")
    add("--dir", type=Path, default=Path(".cache/loop"), help="where every stage is kept")
    add(
        "--save",
        type=Path,
        nargs="?",
        const=RESULTS,
        metavar="FILE",
        help=f"keep the figures ({RESULTS.name})",
    )
    return made


def decode_against_prefill(cache: Cache, recipe: LoopRecipe) -> dict[str, dict[int, Difference]]:
    """Return by dtype and layer how far apart the states of long rows are. Raises LoopFailed."""
    target = cached_target(recipe.wide)
    prompts = long_prompts(recipe.long_prompts)
    found: dict[str, dict[int, Difference]] = {}
    for dtype in DTYPES:
        decoded = generated(cache, "long", target, prompts, recipe.answer_tokens, dtype, proven=False)
        found[dtype] = differences(decoded, prefilled(cache, "long", target, decoded, dtype))
    return found


def datasets(cache: Cache, recipe: LoopRecipe, target: Path, asked: list[str]) -> dict[str, Path]:
    """Return the folders that the trainer reads, by name. Raises LoopFailed."""
    decoded = generated(cache, "answers", target, [question(text) for text in asked], recipe.answer_tokens)
    ours = exported(cache, decoded, AUX, recipe.draft_vocab)
    wrong = {mistake: spoiled(cache, mistake, decoded, ours) for mistake in WRONG}
    lossy = prefilled(cache, "answers_fp8", target, decoded, proven=True, storage={"compression": "fp8"})
    stored = exported(cache, lossy, AUX, recipe.draft_vocab)
    return {OURS: ours, PEER: dumped(cache, target, ours), FP8: stored} | wrong


def results(
    recipe: LoopRecipe,
    outcomes: dict[str, Outcome],
    parallel: dict[str, Outcome],
    beside: FileDifference,
    apart: dict[str, dict[int, Difference]],
    wrong: list[str],
    folder: Path,
) -> dict[str, Any]:
    """Return everything that is kept."""
    return {
        "recipe": without_templates(dataclasses.asdict(recipe)),
        "layers": AUX,
        "machine": machine_facts(folder),
        "acceptance": {name: outcome.told() for name, outcome in outcomes.items()},
        "acceptance_peagle": {name: outcome.told() for name, outcome in parallel.items()},
        "states_against_the_peers": dataclasses.asdict(beside),
        "not_as_it_should_be": wrong,
        "decode_against_prefill": {
            dtype: {k: dataclasses.asdict(one) for k, one in by_layer.items()}
            for dtype, by_layer in apart.items()
        },
    }


def without_templates(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe without its targets' chat templates, which are the demo's."""
    targets = {name: recipe[name] for name in ("target", "wide")}
    for target in targets.values():
        del target["chat_template"]
    return recipe | targets


if __name__ == "__main__":
    sys.exit(main())
