"""Makes `docs/proof.md` of the drill's table and of what was measured: `python -m tests.drill.page`."""

import json
from collections.abc import Iterator
from pathlib import Path

from tests.drill.table import LIMITS, PLANTS, Check, Plant, Stage

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "proof.md"
RESULTS = ROOT / "benchmarks" / "results"

HEAD = """\
# What is proven, by what, and when

Every failure below is planted by the drill (`tests/drill`), which asserts that the named check stops it at
default settings; with a check switched off the drill fails. This page is made of the drill's own table
(`python -m tests.drill.page`), and a test compares the two.

## The checks

"Every row" means every one: nothing in this table is sampled.
"""

ABOUT: dict[Check, tuple[str, str]] = {
    Check.PLAN: ("before a unit runs", "the sha256 of the unit's plan is the one in the store"),
    Check.SENTINELS: (
        "every row, capture",
        "a sentinel is written into every slot of a fresh block, and a state overwrites it: one that is left "
        "shows a state that was never stored",
    ),
    Check.ACCOUNT: (
        "every row, capture",
        "each row comes once, with as many states as tokens, for the plan's token ids",
    ),
    Check.VALUES: (
        "every row, capture",
        "every value is finite; no token is all zero or all one value; no two layers are equal. A row with "
        "NaN or infinity is rejected by name, since the model may overflow; anything else fails the unit",
    ),
    Check.SEEN: (
        "every row, capture",
        "the same bytes are never the states of two tokens, among as many as the engine's cache holds. Layer "
        "0 is left out: its states are embeddings",
    ),
    Check.COPY: (
        "every row, capture",
        "the sum of every state, taken where the engine's cache is read, is the sum of what is written",
    ),
    Check.CANARY: (
        "once for a model, its layers and an engine, before the first unit commits",
        "a few prompts through transformers: every captured layer is nearest to its own reference",
    ),
    Check.RECEIPT: (
        "every file, before the unit commits",
        "the sealed file, read again, has the xxh3 that its receipt names",
    ),
    Check.UNIT: (
        "every row, before the unit commits",
        "ids, mask, lengths and names are the plan's; every layer's bytes have their xxh3; every planned row "
        "has one end",
    ),
    Check.NAME: (
        "every row, before the unit commits, and in `quarry verify`",
        "a sample's id is the hash of its source id, tokens and mask",
    ),
    Check.LAST: (
        "every row, before the unit commits, and in `quarry verify --model`",
        "through norm and head, the last state's logits of the 16 tokens that the engine held most likely "
        "differ as the engine's log-probabilities do, within what rounding explains, row by row and all rows "
        "together ([the bounds](tolerance.md))",
    ),
    Check.SILENCE: (
        "every unit, capture",
        "an engine that has answered every row has to hand over every row",
    ),
    Check.PUSH: (
        "every file, at the push and after it",
        "what was sent and what the Hub holds have the manifest's sha256",
    ),
    Check.VERIFY: (
        "whenever it is run, on a folder or a repository",
        "all files against the manifest's sha256, which is that of the bytes that were proven; all rows "
        "against their own xxh3 and names, index, totals",
    ),
}

LIMITS_HEAD = """
## What an engine holds

An engine carries the digest of what it loaded: all weights, config and tokenizer of a local model, the
commit of one on the Hub. A local model is read before the engine starts and again after, and no unit is
opened on an engine that does not hold what the unit's identity names. A model that is overwritten while it
is planned, loaded or compared fails its job by name; an engine that runs goes on with what it holds.

## What cannot be seen

- In a single row, a mistake that keeps every state within its row, each of them once, and layer N's last
  state in its place (below): no check that looks at one row can tell. An engine makes such a mistake in every
  row, because the same code runs for each, and then the canary stops the job.
- Two rows that exchange their states, if what follows each of them is as likely: of the demo's conversations,
  which all end in the same words, 2 pairs in 1,000 would pass in one direction, and both have to.
- A model whose canary was skipped has only the checks of every row: an auxiliary layer that is off by one
  passes.
- Without layer N (`"final_layer": false`) there is no last token to hold against the engine.
- States of a row that another rank drained are not among those seen before: each rank knows its own rows.
"""


FP8 = """
## States in fp8

A job with `"compression": "fp8"` has every check of this page. Those at the capture (values, sentinels,
states seen before, copy sums) and the canary look at what was captured, before it is rounded. The plants that
concern states are run against such a job, too (`tests/drill/test_fp8.py`).

- **When a layer is quantized**, every code times its scale is held against what was captured: within 1/17 of
  the value, or 2^-10 of its token's scale where that is more, which is half a step of the format. A value
  that is farther off fails the unit by the name of its layer and token.
- **`checksums`** are over what is stored: xxh3_64 of a layer's codes followed by its scales.
- **The last token** is checked on the stored state. Beside the dtype's rounding the check allows for half a
  step of each code ([the bounds](tolerance.md)). Its bounds are wider than without loss: what moves the
  logits by less than storing itself may do is not seen.
- **`quarry verify`** checks of every row that codes and scales are such as rounding makes: each token's
  largest code is 448, no code is NaN, a scale has 20 bits.
- **Not held against a lossy dataset:** that no token is constant and no two layers are equal, since rounding
  may do that to right states. Both are asked of what was captured.
- **Not seen in a finished dataset:** whether its states are as near to the model's as the capture was. The
  bound was proven when they were written, and what is left of it is the checksums.
"""


RECORDED = {
    Check.SENTINELS: ("Sentinels.place",),
    Check.VALUES: ("RowChecker.look", "RowChecker.check"),
    Check.SEEN: ("RepeatCheck.check",),
    Check.COPY: ("connector.gather.add_up",),
    Check.RECEIPT: ("service.capture.unit_run.check_unit",),
    Check.LAST: (
        "Sampler.compute_logprobs",
        "Sampler.gather_logprobs",
        "LogprobsProcessor.update_from_output",
        "Head.gaps",
    ),
}
"""What `benchmarks.job` records of each check."""


def page() -> str:
    """Return the whole page."""
    return (
        "\n".join([HEAD, *_checks(), *_plants(), LIMITS_HEAD, *_limits(), FP8.rstrip(), *_healthy()]) + "\n"
    )


def _checks() -> Iterator[str]:
    kept = json.loads((RESULTS / "job.json").read_text())
    job = kept["jobs"]["default-units"]
    yield "| check | when | what it holds against what | cost |"
    yield "| --- | --- | --- | --- |"
    for check, (when, what) in ABOUT.items():
        cost = "in the row above" if check is Check.UNIT else "-"
        if check in RECORDED:
            cost = f"{sum(job['checks'][name] for name in RECORDED[check]):.3%}"
        yield f"| {check} | {when} | {what} | {cost} |"
    yield ""
    yield (
        f"Cost is the share of the {job['cores']} cores' seconds in a job of {kept['samples']} samples on "
        "the benchmark's compute-bound target (8 KiB of states a token), at default settings; "
        f"{sum(job['checks'].values()):.1%} together (`python -m benchmarks.job`, which `make bench` runs; "
        "figures and machine: `benchmarks/results/job.json`). They run on the writers' threads and in the "
        "service, beside the engine. By "
        f"the clock, with the model compiled, capturing with them took {_by_the_clock()} of the time "
        "without, the median of five interleaved rounds and their range (measured once, "
        "`benchmarks/results/cpu-checks.json`; no command repeats it today). The canary runs beside the "
        "first unit, once a model."
    )


def _by_the_clock() -> str:
    kept = json.loads((RESULTS / "cpu-checks.json").read_text())
    ratio = kept["engines"]["checks"]["quarry"]["seconds_ratio"]
    return f"{ratio['median']:.2f} ({ratio['low']:.2f}..{ratio['high']:.2f})"


def _plants() -> Iterator[str]:
    yield "\n## The failures"
    for stage in Stage:
        yield f"\n**Planted in {stage}**\n"
        yield "| failure | caught by | as |"
        yield "| --- | --- | --- |"
        for plant in PLANTS:
            if plant.stage is stage:
                yield f"| {plant.what} | {plant.check} | {_outcome(plant)} |"


def _outcome(plant: Plant) -> str:
    if plant.kind == "reject":
        return "the row is rejected, with its reason"
    return "a finding" if plant.kind == "finding" else f"`{plant.kind}`"


def _limits() -> Iterator[str]:
    yield "| in one row | in every row |"
    yield "| --- | --- |"
    for plant in LIMITS:
        yield f"| {plant.what}: not seen | {plant.check} |"


def _healthy() -> Iterator[str]:
    yield "\n## False alarms\n"
    results = RESULTS / "healthy.json"
    if not results.is_file():
        yield "Not counted on vLLM yet: `make healthy` has not been run to its end."
        return
    models = json.loads(results.read_text())["models"]
    alarms = sum(len(one["alarms"]) for one in models)
    samples = sum(one["samples"] for one in models)
    yield (
        f"{samples:,} healthy samples on vLLM, every row's logits checked: {alarms} alarms "
        "(`make healthy`). The last column says how near the worst row came to one: the "
        "part of what rounding may explain."
    )
    yield "\n| architecture | dtype | samples | tokens | alarms | last token |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for one in models:
        margins = one["margins"]
        counts = f"{one['samples']:,} | {one['tokens']:,} | {len(one['alarms'])}"
        yield f"| {one['architecture']} | {one['dtype']} | {counts} | {margins['last_token']:.0%} |"


if __name__ == "__main__":
    PAGE.write_text(page())
