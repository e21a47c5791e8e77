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

The drill (`tests/drill`) plants every failure below and asserts that the named check stops it at default
settings; if a check is switched off, the drill fails. This page is generated from the drill's own table
(`python -m tests.drill.page`), and a test compares the two.

## The checks

"Every row" is meant literally: but for the second run, no check in this table samples rows.
"""

ABOUT: dict[Check, tuple[str, str]] = {
    Check.PLAN: ("before a unit runs", "the sha256 of the unit's plan is the one in the store"),
    Check.SENTINELS: (
        "every row, capture",
        "a sentinel is written into every slot of a fresh block, and each state overwrites one: a sentinel "
        "that is left shows a state that was never stored",
    ),
    Check.ACCOUNT: (
        "every row, capture",
        "each row arrives once, with one state for each token, for the plan's token ids",
    ),
    Check.VALUES: (
        "every row, capture",
        "every value is finite; no token is all zero or all one value, but for layer 0, since an embedding "
        "may be; no two layers are equal. A row with NaN or infinity runs again on another engine and is "
        "rejected by name if it is so there, since the model may overflow; anything else fails the unit",
    ),
    Check.SEEN: (
        "every row, capture",
        "no two different tokens have a state of the same bytes: one pair within a row is refused, two with "
        "earlier rows. A table holds the latest states, one for each token of the engine's cache, 2^20 at "
        "most. Layer 0 is left out: its states are embeddings",
    ),
    Check.COPY: (
        "every row, capture",
        "the sum of every state, taken while the engine's cache is read, equals the sum of what is written",
    ),
    Check.CANARY: (
        "once for a model, its layers and an engine, before the first unit commits",
        "a few prompts of up to 1,153 tokens run through transformers: in each one's last 129 tokens, every "
        "captured layer is nearest to its own reference, and of the same length",
    ),
    Check.RECEIPT: (
        "every file, before the unit commits",
        "the sealed file is read again and has the xxh3 in its receipt",
    ),
    Check.UNIT: (
        "every row, before the unit commits",
        "ids, mask, lengths and names are the plan's; every layer's bytes match their xxh3; every planned "
        "row has exactly one outcome",
    ),
    Check.NAME: (
        "every row, before the unit commits, and in `quarry verify`",
        "a sample's id is the hash of its source id and of the tokens and mask that were planned",
    ),
    Check.LAST: (
        "every row, before the unit commits, and in `quarry verify --model`",
        "the last state goes through norm and head: the logits of the engine's 16 most likely tokens differ "
        "as the engine's log-probabilities do, within rounding, row by row and over all rows "
        "([the bounds](tolerance.md))",
    ),
    Check.SECOND: (
        "one row of an engine and a way of capture, then at most 0.5% of the tokens, before the unit commits",
        "the row is computed again, without the prefix cache, up to its 4,096th token or 256 MiB of states, "
        "or as far as to see its answer, at first beside a canary's prompts and, if it shared the engine "
        "before, also by itself, later in a batch with others: in each piece of 129 tokens, of prompt or "
        "answer, every layer has the same states, within rounding. Not of a job that skips the canary",
    ),
    Check.SILENCE: (
        "every unit, capture",
        "an engine that has answered every row must hand over every row",
    ),
    Check.PUSH: (
        "every file, at the push and after it",
        "what is sent and what the Hub then holds have the manifest's sha256",
    ),
    Check.VERIFY: (
        "whenever it is run, on a folder or a repository",
        "all files match the manifest's sha256, which is that of the proven bytes; all rows match their own "
        "xxh3 and names, the index and the totals",
    ),
}

LIMITS_HEAD = """
## What an engine holds

An engine carries the digest of what it loaded: of a local model all weights, config and tokenizer; of a model
on the Hub its commit. A local model is digested before the engine starts and again afterwards, and a unit is
opened only on an engine that holds what the unit's identity names. If a model is overwritten while it is
planned, loaded or compared, its job fails by name; an engine that is already running keeps what it loaded.

## What cannot be seen

- In a single row, a mistake that keeps every state in its row exactly once, and layer N's last state in its
  place (see below): no check of a single row can detect it. An engine makes such a mistake in every row,
  because the same code runs for each, and then the canary stops the job; or in every row that shares its
  batches with others, is computed in pieces, answered or found in the prefix cache, and then the second run.
- A mistake that an engine makes only past the canary's longest prompt, which has at least as many tokens as
  the job's rows may have, up to 1,153: a sliding window of 4,096 tokens that it does not keep, for example.
  Or only between the 129 tokens at that prompt's beginning and those at its end, which are compared.
- A mistake in few of every row's tokens. A router may flip between two libraries, and between two batches:
  the canary lets a tenth of a prompt's tokens differ. The second run lets 8 of 129 differ, and more only if
  tokens differed in the canary: of a layer of which 5% did, 35.
- Two rows that exchange their states, if the token that follows is equally likely in both. Of the demo's
  conversations, which all end in the same words, 2 pairs in 1,000 would pass in one direction, and both
  directions are checked.
- A mistake within a model's own rounding noise. Where 16 bits take the reference itself further from float32
  than the canary allows, as a router or a recurrent state may, the canary allows twice that noise, and the
  second run twice the distance of engine and reference: with a median cosine of 0.95, a layer that is half
  as large again beside other rows passes the second run. The manifest's `canary_report` has the distances,
  and `own_median_rel_error` for such a model alone.
- With the canary skipped, a model has only the checks of every row: an auxiliary layer that is off by one
  passes.
- A sample's id covers what was planned: of an answer by the target it holds no token and no flag of the mask,
  and of a row that is rendered again for later turns none at all. They are checked before the commit; in a
  finished dataset with all its hashes made right again, `quarry verify` does not see that they were changed.
- Without layer N (`"final_layer": false`) there is no last token to check against the engine.
- "States seen before" covers the rows of one rank: it does not compare a row with rows that another rank
  drained.
"""


FP8 = """
## States in fp8

A job with `"compression": "fp8"` has every check on this page. The checks at capture (values, sentinels,
states seen before, copy sums) and the canary see the captured values, before they are rounded. The drill also
plants the failures that concern states in such a job (`tests/drill/test_fp8.py`).

- **When a layer is quantized**, every code times its scale is compared with the captured value: it must be
  within 1/17 of the value, or within 2^-10 of its token's scale if that is more, which is half a step of the
  format. A value outside fails the unit and names its layer and token.
- **`checksums`** cover the stored bytes: xxh3_64 of a layer's codes followed by its scales.
- **The last token** is checked on the stored state. Besides the dtype's rounding the check allows for half a
  step of each code ([the bounds](tolerance.md)). Its bounds are wider than for lossless states: it cannot see
  an error that moves the logits by less than quantization may.
- **`quarry verify`** checks for every row that codes and scales are values that quantization produces: each
  token's largest code is 448, no code is NaN, a scale has 20 significant bits.
- **Not required of a lossy dataset:** that no token is constant and no two layers are equal, since rounding
  may do that to correct states. Both are checked on the captured values.
- **Not visible in a finished dataset:** how near its states are to the captured ones. The bound was proven
  when they were written; from then on the checksums protect them.
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
    yield "| check | when | what it compares | cost |"
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
        "first unit, once a model: of a model of 0.9 billion parameters, its reference took 27 s and 1.5 GiB "
        "(measured once, on 2 cores)."
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
