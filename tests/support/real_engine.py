"""What tests on vLLM's CPU build begin with: jobs or single rows, and the model's own states to hold them to.

Imports torch; vLLM only where an engine is started.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from connector.vector_math import settle_vector_math
from schemas.dataset.shard import open_shard
from schemas.dataset.states import read_states
from schemas.request import Dtype
from service.capture.engine import EngineSpec
from service.proof.reference import reference_states
from service.settings import Settings
from tests.support.device import MEMORY, ON_CUDA
from tests.support.engine_bench import Bench, Truth, relative_T, started
from tests.support.jobs import Shop

VLLM = "service.capture.vllm_engine:VllmEngine"
TOLERANCE = 2e-5
"""Largest relative error of a token's state in float32."""


def vllm_shop(
    folder: Path, target: Path, *, engine_options: Mapping[str, Any] | None = None, **settings: Any
) -> Shop:
    """Open a service on vLLM that proves every row by its logits; prompts of 256 tokens are chunked."""
    options = {"enforce_eager": True, "max_num_batched_tokens": 256} | MEMORY | dict(engine_options or {})
    shop = Shop.open(folder, target, engine=VLLM, engine_options=options, **settings)
    shop.patience_s = 500.0
    return shop


def by_id(samples: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Return inline samples whose ids are their places in the list."""
    return [{"id": str(place), "token_ids": list(ids)} for place, ids in enumerate(samples)]


@dataclass(frozen=True, slots=True)
class StoredRow:
    """A row of a dataset; `layers` are [T, H] of float32 by layer id."""

    prompt_tokens: int
    ids: list[int]
    mask: list[int]
    layers: dict[int, torch.Tensor]
    shard: str


def stored_rows(folder: Path, job_id: str, layers: Sequence[int]) -> dict[str, StoredRow]:
    """Return a job's rows of the dataset in `folder` by source id."""
    found: dict[str, StoredRow] = {}
    for shard in sorted((folder / "data" / job_id).glob("*.parquet")):
        with open_shard(shard) as opened:
            for row, light in enumerate(opened.light):
                states = {k: read_states(opened, row, k).float() for k in layers}
                found[str(light.source_id)] = StoredRow(
                    light.prompt_tokens,
                    light.input_ids.tolist(),
                    light.loss_mask.tolist(),
                    states,
                    shard.name,
                )
    return found


def reference(
    target: Path, prompts: Sequence[Sequence[int]], dtype: Dtype = "float32"
) -> list[dict[int, torch.Tensor]]:
    """Return every layer's states by transformers, in a process of its own: [T, H] of float32."""
    answer = asyncio.run(reference_states(target, prompts, dtype, max_bytes=None, timeout_s=300))
    return [{k: states.float() for k, states in layers.items()} for layers in answer.states]


def assert_states(rows: Mapping[str, StoredRow], target: Path) -> None:
    """Every layer of every row is the model's."""
    truth = reference(target, [row.ids for row in rows.values()])
    errors = {
        (name, k): float(relative_T(states, layers[k]).max())
        for (name, row), layers in zip(rows.items(), truth, strict=True)
        for k, states in row.layers.items()
    }
    print(f"worst relative error of a token over {len(rows)} rows: {max(errors.values()):.1e}")
    assert {place: error for place, error in errors.items() if not error <= TOLERANCE} == {}


def truth_of(target: Path, layers: Sequence[int]) -> Truth:
    """Return the model's states by transformers in this process: far quicker than `reference`."""
    from transformers import AutoModelForCausalLM

    settle_vector_math()
    model = AutoModelForCausalLM.from_pretrained(
        target, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    before_norm: dict[str, torch.Tensor] = {}
    model.model.norm.register_forward_pre_hook(lambda _, given: before_norm.update(states=given[0]))

    @torch.inference_mode()
    def states(ids: list[int]) -> dict[int, torch.Tensor]:
        said = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
        every = (*said.hidden_states[:-1], before_norm["states"])
        return {k: every[k][0].clone() for k in layers}

    return lambda prompts: [states(ids) for ids in prompts]


@contextmanager
def vllm_bench(
    folder: Path,
    target: Path,
    *,
    layers: Sequence[int],
    max_len: int,
    decode: bool = True,
    engine_options: Mapping[str, Any],
    **settings: Any,
) -> Iterator[Bench]:
    """Start vLLM on a float32 target; it keeps its own counters, see `meter`, and prints the worst error."""
    from transformers import AutoConfig

    from service.capture.vllm_engine import VllmEngine

    config = AutoConfig.from_pretrained(target)
    options = {"enforce_eager": True, "disable_log_stats": False} | MEMORY | engine_options
    told = Settings(data_dir=folder, engine_options=options, **settings)
    spec = EngineSpec(target, "r", "float32", tuple(layers), config.hidden_size, max_len, decode=decode)
    with started(
        VllmEngine(),
        spec,
        told,
        truth_of(target, layers),
        tolerance=TOLERANCE,
        vocab_size=config.vocab_size,
    ) as bench:
        yield bench
        print(f"worst relative error of a token: {bench.worst:.1e}")


@contextmanager
def early_gather() -> Iterator[None]:
    """Let engines that are started meanwhile copy states as early as a device may, see `early_connector`.

    A GPU itself reads when it may.
    """
    if ON_CUDA:
        yield
        return
    from service.capture.vllm_engine import VllmEngine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VllmEngine, "connector_module", "tests.support.early_connector")
        yield


def meter(name: str) -> float:
    """Return one of vLLM's own metrics in this process, e.g. `num_preemptions`, added up over its labels."""
    from vllm.v1.metrics.reader import get_metrics_snapshot

    return sum(metric.value for metric in get_metrics_snapshot() if metric.name == f"vllm:{name}")


async def free_blocks(bench: Bench) -> None:
    """Wait until every block of the engine's cache is free, and empty its prefix cache.

    The engine empties it only when no request holds a block; one that is lost ends this by a timeout.
    """
    async with asyncio.timeout(200):
        while not await bench.engine._llm.reset_prefix_cache():
            await asyncio.sleep(0.01)
