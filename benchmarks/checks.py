"""What each check of every row costs by itself, on one core: `python -m benchmarks.checks --save`.

The row is an 8B model's: 512 tokens, 4 layers of 4096 in bfloat16, 32 KiB of states a token. `make bench`
measures all of them together, beside an engine.
"""

import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from benchmarks.dataset import HIDDEN_SIZE, LAYER_IDS, model_identity, write_unit
from benchmarks.harness import command_line, keep, markdown
from benchmarks.machine import machine_facts
from connector.repeats import RepeatCheck
from connector.rowcheck import RowChecker
from connector.sentinels import Sentinels
from schemas.dataset.files import DirectReader
from schemas.dataset.shard import Shard
from schemas.identity import FinalNorm
from schemas.names import attempt_dir
from service.proof.head import Head
from service.proof.head_weights import HeadWeights, NormWeights
from service.proof.logit_check import LogitCase, check_logits
from service.proof.row_proof import prove_row
from tests.support.plans import JOB, random_ids, write_plan
from tests.support.sums import token_sums

NUM_ROWS, ROUNDS = 8, 5
NUM_TOKENS, NUM_LAYERS = 512, len(LAYER_IDS)
SLOTS, VOCAB_SIZE, CACHE_TOKENS = 16, 128_256, 2**19


def measure(folder: Path) -> dict[str, float]:
    """Return the microseconds a token that each check takes, the best of a few rounds."""
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    shape = (NUM_LAYERS, NUM_TOKENS, HIDDEN_SIZE)
    rows = [torch.randn(shape, generator=draw).to(torch.bfloat16) for _ in range(NUM_ROWS)]
    ids = [np.asarray(one, np.int32) for one in random_ids([NUM_TOKENS] * NUM_ROWS)]
    cache_BLSH = torch.zeros((NUM_TOKENS // SLOTS, NUM_LAYERS, SLOTS, HIDDEN_SIZE), dtype=torch.bfloat16)
    sentinels, checker = Sentinels(cache_BLSH), RowChecker(torch.bfloat16)
    seen, sums = RepeatCheck(NUM_LAYERS, CACHE_TOKENS), [token_sums(row) for row in rows]
    write_plan(folder, [one.tolist() for one in ids])
    sealed = write_unit(
        folder, model_identity(), ids, zip(rows, sums, strict=True), cache_tokens=CACHE_TOKENS
    )
    file = folder / attempt_dir(JOB, 0, 1) / str(sealed.file)
    head, cases = _head(rows, draw)
    return {
        "sentinels": _us(lambda row: sentinels.place(range(len(cache_BLSH)))),
        "values": _us(lambda row: checker.check(rows[row], LAYER_IDS, checker.look(rows[row]))),
        "copy sums": _us(lambda row: token_sums(rows[row])),
        "states seen before": _us(lambda row: seen.check(sums[row], ids[row], LAYER_IDS)),
        "receipt": _us(lambda row: _read_back(file), count=1),
        "last token": _us(lambda row: check_logits(head, cases[row : row + 1])),
    }


def _us(act: Callable[[int], object], count: int = NUM_ROWS) -> float:
    """Return the CPU microseconds a token of `act` over all rows, done row by row in `count` calls."""
    best = float("inf")
    for _ in range(ROUNDS):
        begun = time.process_time()
        for row in range(count):
            act(row)
        best = min(best, time.process_time() - begun)
    return round(best / (NUM_ROWS * NUM_TOKENS) * 1e6, 3)


def _read_back(file: Path) -> None:
    """Read the sealed file as a unit's proof does: every row's checksums and the whole file's in one pass."""
    with closing(DirectReader(file)) as whole:
        shard = Shard(whole, file.name)
        for row in range(NUM_ROWS):
            prove_row(shard, row, vocab_size=VOCAB_SIZE)
        whole.rest()


def _head(rows: list[torch.Tensor], draw: torch.Generator) -> tuple[Head, list[LogitCase]]:
    """Return a head of an 8B model's size, and the rows with what it says of them."""
    norm = NormWeights(FinalNorm(kind="rmsnorm", eps=1e-5), torch.ones(HIDDEN_SIZE), None)
    weight_VH = 0.02 * torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=draw).to(torch.bfloat16)
    head = Head(norm, HeadWeights(weight_VH, None, 1.0, None), "bfloat16")
    cases = []
    for row, states in enumerate(rows):
        best = head.logprobs(states[-1, -1:])[0].topk(16)
        witness = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        cases.append(LogitCase(str(row), states[-1, -1], witness))
    return head, cases


def main() -> None:
    """Measure, print the table, keep the figures if asked to."""
    options = command_line("benchmarks.checks", __doc__, save="checks").parse_args()
    with tempfile.TemporaryDirectory(prefix="quarry-checks-") as folder:
        facts = machine_facts(Path(folder))
        costs = measure(Path(folder))
    rows = [[name, f"{us:.3f}"] for name, us in costs.items()]
    print(markdown(["us a token", "one core"], [*rows, ["together", f"{sum(costs.values()):.3f}"]]))
    content = {"tokens": NUM_TOKENS, "bytes_per_token": 2 * NUM_LAYERS * HIDDEN_SIZE}
    keep(options.save, content | {"machine": facts, "us_per_token": costs})


if __name__ == "__main__":
    main()
