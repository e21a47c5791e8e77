"""Every known failure: where it is planted, which check must find it, and when.

The drill asserts each line, and `docs/proof.md` is made of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Stage(StrEnum):
    """Where a failure is planted, in the order that data takes."""

    PLAN = "the plan"
    EVERYWHERE = "the engine, in every row"
    UNITS = "the engine, in every row but those that run by themselves"
    CACHE = "the engine's cache, in one row"
    WORK = "what the engine hands over of one row"
    SLAB = "host memory, between the copy and the file"
    WRITER = "the writer: a wrong file with a receipt that agrees"
    SEALED = "the sealed file, before its unit commits"
    LANDED = "the committed shard, before the dataset is made whole"
    DATASET = "the finished dataset"
    SIGNED = "the finished dataset, with all its hashes made right again"
    HUB = "the push, or in the repository on the Hub"


class Check(StrEnum):
    """What finds a failure; `docs/proof.md` says of each what it looks at, when, and what it costs."""

    PLAN = "plan hash"
    ACCOUNT = "account of rows"
    SENTINELS = "sentinels"
    VALUES = "values"
    SEEN = "states seen before"
    COPY = "copy sums"
    CANARY = "canary"
    SECOND = "second run"
    RECEIPT = "receipt"
    UNIT = "rows against the plan"
    NAME = "sample ids"
    LAST = "last token"
    SILENCE = "missing receipts"
    PUSH = "push"
    VERIFY = "`quarry verify`"


@dataclass(frozen=True, slots=True)
class Plant:
    """`kind` is the problem's class, `reject` for a rejected row, or `finding`; `says` is in its words."""

    stage: Stage
    check: Check
    kind: str
    name: str
    what: str
    says: str


WRONG, RETRIED, FOUND = "states-wrong", "write-failed", "finding"


def _plants(stage: Stage, check: Check, kind: str, *lines: tuple[str, str, str]) -> Iterator[Plant]:
    return (Plant(stage, check, kind, *line) for line in lines)


def _alike(stage: Stage, check: Check, kind: str, says: str, *lines: tuple[str, str]) -> Iterator[Plant]:
    return (Plant(stage, check, kind, *line, says) for line in lines)


PLANTS: tuple[Plant, ...] = (
    *_plants(
        *(Stage.PLAN, Check.PLAN, RETRIED),
        ("bit-of-the-plan", "one bit of the stored plan", "it was stored as"),
    ),
    *_plants(
        *(Stage.PLAN, Check.ACCOUNT, WRONG),
        ("ids-changed-after-reading", "a token id, after the service has read it", "ran other token ids"),
    ),
    *_plants(
        *(Stage.PLAN, Check.UNIT, WRONG),
        ("mask-changed-after-reading", "a flag, after the service has read it", "loss_mask differs at 0"),
    ),
    *_plants(
        *(Stage.PLAN, Check.NAME, WRONG),
        ("mask-changed-before-hashing", "a flag, before the plan was hashed", "are those of sample"),
    ),
    *_plants(
        *(Stage.EVERYWHERE, Check.CANARY, WRONG),
        ("layer-before", "layer k - 1 for auxiliary layer k", "canary: layer 2 looks like layer 1:"),
        ("last-but-one", "layer N - 1 for layer N", "canary: layer 8 looks like layer 7:"),
        ("exchanged-layers", "two auxiliary layers exchanged", "canary: layer 2 looks like layer 4:"),
        (
            "exchanged-in-long-rows",
            "the same in rows of more than 256 tokens, past them",
            "canary: layer 2 looks like layer 4:",
        ),
        ("exchanged-with-last", "layer N and another exchanged", "canary: layer 2 looks like layer 8:"),
        ("post-norm", "layer N after the final norm", "canary: layer 8 looks like layer 8 after the final"),
        ("shifted", "each token has the next one's states", "canary: layer 2 fits no layer"),
        ("permuted-in-one-layer", "the same in one auxiliary layer", "canary: layer 2 fits no layer"),
        ("other-float", "float16 bytes taken for bfloat16", "canary: layer 2 looks like layer 0:"),
        ("stretched-layer", "an auxiliary layer a tenth larger", "canary: layer 2 is 1.1 times as large"),
    ),
    *_plants(
        *(Stage.EVERYWHERE, Check.VALUES, WRONG),
        ("zero-states", "all states are zero", "is all zero in"),
    ),
    *_plants(
        *(Stage.UNITS, Check.SECOND, WRONG),
        (
            "exchanged-layers",
            "two auxiliary layers exchanged",
            "computed a second time, layer 2 has other states for",
        ),
        (
            "stretched-layer",
            "an auxiliary layer a tenth larger",
            "layer 2 is 1.1 times as large as computed a second time",
        ),
        (
            "permuted-in-one-layer",
            "each token has the next one's states in one auxiliary layer",
            "holds the states of other tokens",
        ),
    ),
    *_plants(
        *(Stage.CACHE, Check.VALUES, WRONG),
        ("zero-block", "one block of one layer is zero", "layer 2 is all zero in 16 of 40 tokens"),
        ("zero-states", "all states are zero", "layer 2 is all zero in 40 of 40 tokens"),
        ("zero-token", "one token of one layer is zero", "layer 2 is all zero in 1 of 40 tokens"),
        ("constant-token", "one token is one value", "layer 2 is constant in 1 of 40 tokens"),
        ("constant-layer", "one layer is one value", "layer 8 is constant in 40 of 40 tokens"),
        ("equal-layers", "two layers are the same", "layers 2 and 4 hold the same states"),
    ),
    *_plants(
        *(Stage.CACHE, Check.VALUES, "reject"),
        ("nan", "one value is NaN", "not-finite: layer 2 is not finite in 1 of 40 tokens"),
        ("infinity", "one value is infinite", "not-finite: layer 8 is not finite in 1 of 40 tokens"),
    ),
    *_plants(
        *(Stage.CACHE, Check.SENTINELS, WRONG),
        (
            "never-stored",
            "a block that the engine skipped, with older states",
            "stored no state for 16 of 40",
        ),
        ("truncated", "the last tokens were not captured", "stored no state for 3 of 40"),
    ),
    *_alike(
        *(Stage.CACHE, Check.SEEN, WRONG, "holds the states of other tokens"),
        ("stale-block", "a block of an earlier request"),
        ("stale-block-of-one-layer", "the same in one auxiliary layer"),
        ("stale-prefix", "a first block that the prefix cache should not have hit"),
        ("stale-tail", "the last, partly filled block of an earlier request"),
        ("block-of-another-place", "another row's first block as the second"),
        ("repeated-block", "the row's own first block as the second"),
        ("another-row", "all of another row's states"),
        ("delayed", "one auxiliary layer is late by one token"),
    ),
    *_alike(
        *(Stage.CACHE, Check.LAST, WRONG, "by the stored states"),
        ("exchanged-rows", "two rows hold each other's states"),
        ("shifted", "each token has the next one's states"),
        ("exchanged-with-last", "layer N and another exchanged"),
        ("post-norm", "layer N after the final norm"),
        ("other-float", "float16 bytes taken for bfloat16"),
    ),
    *_plants(
        *(Stage.WORK, Check.ACCOUNT, WRONG),
        ("row-twice", "a row that is handed over twice", "came twice"),
        ("fewer-tokens", "three states fewer than tokens", "37 states for 40 planned token ids"),
        ("other-token-ids", "the engine ran other tokens", "ran other token ids"),
    ),
    *_plants(
        *(Stage.WORK, Check.SILENCE, "engine-stuck"),
        ("row-lost", "a row that is never handed over", "no receipt came within"),
    ),
    *_plants(
        *(Stage.EVERYWHERE, Check.SILENCE, "engine-stuck"),
        ("row-lost", "rows that are never handed over", "no receipt came within"),
    ),
    *_alike(
        *(Stage.SLAB, Check.COPY, WRONG, "no longer what was copied"),
        ("flipped-bit-in-memory", "one bit of a state"),
        ("overwritten-slab", "the next row's copy came too early"),
    ),
    *_plants(
        *(Stage.WRITER, Check.UNIT, WRONG),
        ("ids-of-another-row", "two rows hold each other's token ids", "input_ids differs at"),
        ("mask-of-another-row", "two rows hold each other's loss masks", "loss_mask differs at"),
        ("names-exchanged", "two rows have each other's sample ids", "sample_id is"),
        ("row-missing", "a missing row", "planned rows must have one outcome; row"),
        ("row-repeated", "a row twice", "planned rows must have one outcome; row"),
        ("stale-checksums", "two rows have each other's checksums", "its bytes have xxh3"),
    ),
    *_plants(
        *(Stage.WRITER, Check.LAST, WRONG),
        ("states-exchanged", "two rows hold each other's states", "by the stored states"),
    ),
    *_alike(
        *(Stage.SEALED, Check.RECEIPT, RETRIED, "its receipt says"),
        ("bit-of-a-state", "one bit of a state"),
        ("bit-of-the-ids", "one bit of the token ids"),
        ("bit-of-a-page-header", "one bit of a page's header"),
        ("bit-of-the-footer", "one bit of the footer"),
        ("cut-short", "the end is missing"),
        ("rows-of-another-attempt", "the file of another attempt"),
        ("states-of-another-row", "two rows hold each other's states"),
        ("columns-exchanged", "one row's layers in each other's columns"),
    ),
    *_plants(
        *(Stage.SEALED, Check.RECEIPT, RETRIED),
        ("gone", "the file is missing", "cannot be read back"),
    ),
    *_plants(
        *(Stage.DATASET, Check.VERIFY, FOUND),
        ("bit-of-a-state", "one bit of a state", "has sha256"),
        ("bit-of-the-ids", "one bit of the token ids", "has sha256"),
        ("bit-of-the-footer", "one bit of a shard's footer", "has sha256"),
        ("shard-cut-short", "the end of a shard is missing", "the manifest says"),
        ("shard-gone", "a shard is missing", "is missing"),
        ("shard-nobody-named", "a data file that is no part of it", "no manifest names this file"),
        ("bit-of-the-index", "one bit of the index", "has sha256"),
        ("bit-of-the-final-norm", "one bit of the final norm", "has sha256"),
        ("bit-of-the-counts", "one bit of the token counts", "has sha256"),
        ("manifest-edited", "a number in the manifest", "manifests/"),
    ),
    *_plants(
        *(Stage.SIGNED, Check.VERIFY, FOUND),
        ("states-exchanged", "two rows hold each other's states", "its bytes have xxh3"),
        ("token-changed", "a token id, in shard and index", "are those of sample"),
        ("flag-changed", "a flag of a loss mask, in shard and index", "are those of sample"),
        ("names-exchanged", "two rows have each other's sample ids", "are those of sample"),
        ("row-missing", "a missing row", "the manifest says"),
        ("row-repeated", "a row twice", "is written 2 times"),
    ),
    *_plants(
        *(Stage.LANDED, Check.VERIFY, FOUND),
        ("bit-of-a-committed-shard", "one bit of a state, after its unit was committed", "has sha256"),
    ),
    *_plants(
        *(Stage.HUB, Check.PUSH, "dataset-broken"),
        ("before-the-push", "one bit of a shard, before it is pushed", "no longer has the bytes"),
    ),
    *_plants(
        *(Stage.HUB, Check.VERIFY, FOUND),
        ("bit-on-the-hub", "one bit of a shard in the repository", "has sha256"),
        ("cut-on-the-hub", "the end of a shard in the repository is missing", "the manifest says"),
        ("gone-from-the-hub", "a shard of the repository is missing", "is missing"),
    ),
)

LIMITS = tuple(
    _alike(
        *(Stage.CACHE, Check.CANARY, WRONG, "canary: layer 2"),
        ("exchanged-layers", "two auxiliary layers of one row exchanged"),
        ("permuted-in-one-layer", "one row's states of one auxiliary layer in another order"),
    )
)
"""What is seen in every row but not in a single one: states of the row's own, each of them once."""
