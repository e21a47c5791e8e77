"""`python -m benchmarks.loop`: target, on-policy answers, datasets, drafters, and what vLLM accepts of them.

Every stage is kept in `.cache/loop`; run again, it goes on where it stopped.
"""

import dataclasses
import json
import sys
from pathlib import Path

from benchmarks.harness import RESULTS, command, command_line
from benchmarks.loop.datasets import dumped, exported, generated, make_target, prefilled_as_fp8, spoiled
from benchmarks.loop.drafters import acceptance
from benchmarks.loop.recipe import AUX, EAGLE3, PEAGLE, SHORT, LoopRecipe, split
from benchmarks.loop.stage import Cache, LoopFailed, say
from benchmarks.loop.states import difference
from benchmarks.loop.table import FEWER, FP8, IN_PLACE, LIVE, OURS, PEER, WRONG, judged, report
from benchmarks.machine import machine_facts
from benchmarks.trainers import has_speculators

SLACK = 0.05
"""Tokens a step: how far chance alone moves a mean accepted length here; see the README."""
PEAGLE_SLACK = 0.03
"""The same for P-EAGLE: noise of 1e-6 on every state moved none of five drafters by more than 0.01."""


def main() -> int:
    """Run the loop, print the tables, keep the figures; return 1 if they are not as they should be."""
    parser = command_line("benchmarks.loop", __doc__)
    add, kept = parser.add_argument, RESULTS / "loop.json"
    add("--short", action="store_true", help="a few minutes: only separates right from wrong")
    add("--dir", type=Path, default=Path(".cache/loop"), help="where every stage is kept")
    add("--save", type=Path, nargs="?", const=kept, metavar="FILE", help=f"keep the figures ({kept.name})")
    options = parser.parse_args()
    if not has_speculators():
        say("the speculators trainer is not installed: run 'make .cache/trainers/installed'")
        return 2
    recipe = SHORT if options.short else LoopRecipe()
    cache = Cache(options.dir.resolve())
    try:
        target = make_target(cache, recipe)
        asked, held_out = split(recipe.questions, recipe.held_out)
        data = datasets(cache, recipe, target, asked)
        beside = difference(data[OURS], data[PEER])
        outcomes = acceptance(cache, recipe, EAGLE3, target, data, held_out)
        fewer = {name: data[name] for name in FEWER}
        parallel = acceptance(cache, recipe, PEAGLE, target, fewer, held_out)
    except LoopFailed as error:
        say(str(error))
        return 1
    say(f"\n{report({EAGLE3.title: outcomes, PEAGLE.title: parallel}, beside)}")
    wrong = [*judged(EAGLE3.title, outcomes, SLACK), *judged(PEAGLE.title, parallel, PEAGLE_SLACK)]
    for line in wrong:
        say(f"NOT AS IT SHOULD BE: {line}")
    if options.save:
        fields = dataclasses.asdict(recipe)
        del fields["target"]["chat_template"]  # the demo's
        result = {
            "command": command("benchmarks.loop", options),
            "recipe": fields,
            "layers": AUX,
            "machine": machine_facts(options.dir),
            "acceptance": {name: outcome.as_json() for name, outcome in outcomes.items()},
            "acceptance_peagle": {name: outcome.as_json() for name, outcome in parallel.items()},
            "states_against_the_peers": dataclasses.asdict(beside),
            "not_as_it_should_be": wrong,
        }
        options.save.write_text(json.dumps(result, indent=1) + "\n")
    return bool(wrong)


def datasets(cache: Cache, recipe: LoopRecipe, target: Path, asked: list[str]) -> dict[str, Path]:
    """Return the folders that the trainer reads, by name. Raises LoopFailed."""
    answers = generated(cache, target, asked, recipe.answer_tokens)
    ours = exported(cache, target, answers, recipe.draft_vocab)
    lossy = exported(cache, target, prefilled_as_fp8(cache, target, answers), recipe.draft_vocab)
    wrong = {mistake: spoiled(cache, mistake, answers, ours) for mistake in WRONG}
    right = {OURS: ours, PEER: dumped(cache, target, ours), FP8: lossy}
    return right | {IN_PLACE: answers, LIVE: answers} | wrong


if __name__ == "__main__":
    sys.exit(main())
