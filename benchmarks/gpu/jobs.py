"""The part `job`: whole jobs by the command line with every check on; what the checks say of healthy rows."""

import json
import os
import random
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.gpu.figures import Save
from benchmarks.weights import write_target
from benchmarks.workload import Target
from schemas.dataset.manifest import Manifest
from schemas.names import manifest_path
from service.proof import verify_unit
from service.proof.head import Head
from service.proof.logit_check import MOST_SIGMAS, LogitCase, LogitVerdict
from service.proof.verify import verify_dataset

TARGET = Target(2048, 5632, 16, 16, 8, 128, 32768, (2, 8, 13, 16))
"""0.9 billion parameters."""
TINY = Target(128, 256, 8, 4, 2, 32, 512, (2, 4, 5, 8))

NUM_ROWS, NUM_TINY = 2000, 40
MAX_TOKENS, MAX_TINY = 1024, 256
SHORTER = 6
"""Rows have a seventh of the longest one's tokens on average: 0.4 million in all, 7 GB."""
PREFIX_SHARE, NUM_PREFIXES = 0.3, 4
"""Such a share of rows begins with one of a few prefixes, which the prefix cache then serves."""
GREEDY = {"max_tokens": 64, "temperature": 0.0, "capture": "one_pass"}
DRAWN = {"max_tokens": 64, "temperature": 0.8, "capture": "second_prefill"}
SHARED = {"kv_cache_memory_bytes": 6 * 2**30, "gpu_memory_utilization": 0.1}
"""Of an engine beside those of other parts, which must not profile the memory."""
SHOWN = 10
"""Alarms of one kind that are kept in words."""


def measure_jobs(options: Namespace, save: Save) -> None:
    """Run a job of given conversations, then of greedy and of drawn answers; each is saved when it ended."""
    folder = (options.folder / "job").resolve()
    write_job_target(folder / "target", tiny=options.tiny)
    count = NUM_TINY if options.tiny else NUM_ROWS
    kinds: dict[str, tuple[int, dict[str, Any] | None]] = {
        "given": (count, None),
        "greedy": (count // 10, GREEDY),
        "drawn": (count // 10, DRAWN),
    }
    if options.tiny:
        del kinds["drawn"]  # refused on the CPU build, which draws from memory that was never set
    for number, (name, (rows, generate)) in enumerate(kinds.items()):
        if options.only and name not in options.only:
            continue
        run_job(folder, name, number, rows, generate, options, save)


def write_job_target(folder: Path, *, tiny: bool) -> None:
    """Write the jobs' model."""
    write_target(TINY if tiny else TARGET, folder, MAX_TOKENS)


def run_job(
    folder: Path,
    name: str,
    seed: int,
    rows: int,
    generate: dict[str, Any] | None,
    options: Namespace,
    save: Save,
) -> Path:
    """Run a job and verify its dataset with the model's head; save what was found; return the dataset."""
    target = TINY if options.tiny else TARGET
    longest = MAX_TINY if options.tiny else MAX_TOKENS
    given = folder / f"job-{seed}"
    given.mkdir(parents=True)
    samples = healthy_rows(rows, target.vocab_size, longest - (generate or {}).get("max_tokens", 0), seed)
    lines = (json.dumps({"id": str(row), "token_ids": ids}) for row, ids in enumerate(samples))
    given.joinpath("rows.jsonl").write_text("".join(f"{line}\n" for line in lines))
    body = {
        "model": str(folder / "target"),
        "layers": list(target.layer_ids[:-1]),
        "dtype": "bfloat16",
        "source": {"kind": "file", "path": "rows.jsonl"},
        "loss": "all",
        "max_tokens": longest,
        "storage": {"shard_bytes": 2**28},
        "canary": "run",
        "generate": generate,
    }
    given.joinpath("job.json").write_text(json.dumps(body))
    out = given / "dataset"
    command = [sys.executable, "-m", "service.cli", "extract", str(given / "job.json"), "--out", str(out)]
    engine_options = ({"enforce_eager": True} if options.eager else {}) | (SHARED if options.together else {})
    environment = {"QUARRY_ENGINE_OPTIONS": json.dumps(engine_options), **os.environ}
    begun = time.monotonic()
    ended = subprocess.run(command, env=environment)
    found: dict[str, Any] = {
        "rows": rows,
        "tokens": sum(map(len, samples)),
        "seconds": round(time.monotonic() - begun, 1),
        "exit_status": ended.returncode,
    }
    if ended.returncode != 0:
        save(name, found | {"alarms": 1})
        raise RuntimeError(
            f"the job {name!r} ended with status {ended.returncode}: its worker's log says why"
        )
    save(name, found)
    save(name, found | alarms(out, folder / "target"))
    return out


def healthy_rows(count: int, vocab_size: int, longest: int, seed: int) -> list[list[int]]:
    """Return token ids from the middle of the vocabulary, most rows short and some near `longest`."""
    draw = random.Random(seed)
    vocab = range(vocab_size // 8, vocab_size - vocab_size // 8)
    prefixes = [draw.choices(vocab, k=longest // 4) for _ in range(NUM_PREFIXES)]
    rows = []
    for _ in range(count):
        length = max(8, round(longest * draw.random() ** SHORTER))
        ids = draw.choices(vocab, k=length)
        if draw.random() < PREFIX_SHARE:
            ids = [*draw.choice(prefixes), *ids][:longest]
        rows.append(ids)
    return rows


def alarms(dataset: Path, model: Path) -> dict[str, Any]:
    """Return everything that a check said of a dataset of healthy rows, and how near it came to saying it."""
    nearest = 0.0

    def seen(head: Head, cases: Sequence[LogitCase]) -> LogitVerdict:
        nonlocal nearest
        verdict = check_logits(head, cases)
        off = [abs(one.engine - one.stored) / (one.sigma * MOST_SIGMAS) for one in verdict.readings]
        nearest = max([nearest, *off])
        return verdict

    (path,) = (dataset / "manifests").glob("*.json")
    manifest = Manifest.model_validate_json((dataset / manifest_path(path.stem)).read_bytes())
    check_logits = verify_unit.check_logits
    begun = time.monotonic()
    with patch.object(verify_unit, "check_logits", seen):
        report = verify_dataset(dataset, model_folder=model)
    rejects = [f"{one.reason}: {one.detail}" for one in manifest.rejects]
    findings = [f"{one.path}: {one.what}" for one in report.findings]
    return {
        "alarms": len(rejects) + len(findings),
        "rejects": rejects[:SHOWN],
        "findings": findings[:SHOWN],
        "logits_of_what_rounding_explains": round(nearest, 3),
        "verify_s": round(time.monotonic() - begun, 1),
        "totals": manifest.totals.model_dump(mode="json"),
        "checks": manifest.checks.model_dump(mode="json"),
        "engine": manifest.provenance.engine.model_dump(mode="json"),
    }
