"""The parts `exact` and `compiled`: rows captured as by the service, compared with transformers."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from vllm.v1.metrics.reader import get_metrics_snapshot

from benchmarks.gpu.agreement import Agreement, States
from benchmarks.gpu.cases import CASES, EAGER, OPTIONS, PARITY_TARGET, TINY_TARGET, prompt_units
from benchmarks.gpu.figures import Save
from benchmarks.weights import write_target
from schemas.generate import Generate
from schemas.request import Dtype
from service.capture.engine import EngineSpec
from service.capture.vllm_engine import VllmEngine
from service.settings import Settings
from tests.support.engine_bench import by_row, started
from tests.support.whole_model import whole_states


class WrongRow(AssertionError):
    """A stored row of other tokens than the engine ran."""


def measure_parity(name: str, options: Namespace, save: Save) -> None:
    """Run one case; its figures are saved anew after every unit. Raises WrongRow."""
    case, target = CASES[name], TINY_TARGET if options.tiny else PARITY_TARGET
    folder = options.folder / options.parts[0] / name
    units = prompt_units(case, target.vocab_size)
    longest = max(len(ids) for rows in units for ids in rows) + max(1, case.answer_tokens)
    weights = folder / "target"
    write_target(target, weights, longest, case.architecture, case.dtype)
    own = EAGER if options.eager else {}
    settings = Settings(
        data_dir=folder, engine_options=OPTIONS | dict(case.options) | own, pool_bytes=case.pool_bytes
    )
    spec = EngineSpec(
        weights=weights,
        model_sha256="0",
        dtype=case.dtype,
        layer_ids=target.layer_ids,
        hidden_size=target.hidden_size,
        max_model_len=longest + 1,
        decode=case.answer_tokens > 0,
    )
    generate = Generate(max_tokens=case.answer_tokens, capture="one_pass") if case.answer_tokens else None
    agreement = Agreement(target.layer_ids)
    lengths: list[int] = []
    engine, truth = VllmEngine(), partial(reference, weights, dtype="float32")
    with started(engine, spec, settings, truth=truth, tolerance=0.0, vocab_size=target.vocab_size) as bench:
        facts = {
            "case": asdict(case),
            "target": asdict(target),
            "engine": engine.info.model_dump(mode="json"),
        }
        save(name, facts)
        for prompts in units:
            _, rows, answers = bench.capture(prompts, generate=generate)
            ids = by_row(prompts, answers)
            if {row: stored["input_ids"] for row, stored in rows.items()} != ids:
                raise WrongRow("a row holds other tokens than the engine ran, or is not there")
            wanted = [ids[row] for row in rows]
            expected = bench.truth(wanted)
            same_dtype = reference(weights, wanted, case.dtype) if case.dtype != "float32" else expected
            for stored, exact, rounded in zip(rows.values(), expected, same_dtype, strict=True):
                agreement.add({k: bench.states(stored, k) for k in target.layer_ids}, exact, rounded)
            lengths += map(len, wanted)
            hits = sum(one.value for one in get_metrics_snapshot() if one.name == "vllm:prefix_cache_hits")
            counts = {"rows": len(lengths), "tokens": sum(lengths), "tokens_from_prefix_cache": hits}
            save(name, facts | counts | {"layers": agreement.figures()})


def reference(weights: Path, prompts: Sequence[Sequence[int]], dtype: Dtype) -> list[States]:
    """Return every layer's states by transformers on the CPU: computed in `dtype`, given in float32."""
    every = whole_states(weights, prompts, getattr(torch, dtype))
    return [{layer: states.float() for layer, states in layers.items()} for layers in every]
