"""From a request to the Hub and back.

The states read from the Hub's copy are the model's, for every captured layer.

Real vLLM, real connector, real huggingface_hub against a local server. Lengths sit around the engine's block,
prefill is chunked, prefixes are shared and prefix caching is on. The truth is a transformers forward pass in
a process of its own.

float32 is held to an absolute relative tolerance. bfloat16 has none of its own: transformers in bfloat16 is
itself so far from transformers in float32, and the engine may not be further away than that.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from schemas.job import JobState
from schemas.request import Dtype
from service.proof.reference import reference_states
from service.proof.shard_reader import ShardReader
from service.proof.verify import verify_dataset
from tests.support.fake_hub import FakeHub
from tests.support.hub_client import HubClient
from tests.support.hub_state import Token
from tests.support.jobs import Shop, request
from tests.support.plans import random_ids
from tests.support.tiny_model import random_target

BLOCK = 128
MAX_LEN = 1024
CHUNK = 256
LAYERS = (0, 2, 4, 5, 8)
FLOAT32_TOLERANCE = 2e-5
REPO = "team/states"
SECRET = "hf_parity"


def prompts() -> list[list[int]]:
    """Lengths around one block, several chunks, up to the longest.

    Then rows that share a prefix of two and a half blocks.
    """
    lengths = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * CHUNK + 1, 3 * CHUNK, MAX_LEN - 1]
    alone = random_ids(lengths, vocab_size=1500, seed=1)
    head = random_ids([2 * BLOCK + BLOCK // 2], vocab_size=1500, seed=2)[0]
    tails = random_ids([1, BLOCK // 2, BLOCK], vocab_size=1500, seed=3)
    return [*alone, head, *[head + tail for tail in tails], head[: 2 * BLOCK]]


def extract(tmp_path: Path, hub: FakeHub, target: Path, samples: list[list[int]]) -> str:
    """Run the job on vLLM and return its id."""
    shop = Shop.open(
        tmp_path,
        target,
        engine="service.capture.vllm_engine:VllmEngine",
        engine_options={"enforce_eager": True, "max_num_batched_tokens": CHUNK, "max_num_seqs": 8},
        hub_endpoint=hub.url,
        hub_token=SECRET,
        logit_share=1.0,
    )
    body = request(
        target,
        [{"id": str(row), "token_ids": ids} for row, ids in enumerate(samples)],
        layers=LAYERS[:-1],
        max_tokens=MAX_LEN,
        canary="run",
        hub={"repo_id": REPO},
        storage={"shard_bytes": 4_194_304},
    )
    job = shop.run(body)
    shop.store.close()
    assert job.state is JobState.COMPLETED, job.problem
    assert job.progress.samples_written == len(samples)
    return job.id


def stored_states(folder: Path, job_id: str) -> dict[str, tuple[list[int], dict[int, torch.Tensor]]]:
    """Return by source id the token ids and the states [T, H] of every layer."""
    found: dict[str, tuple[list[int], dict[int, torch.Tensor]]] = {}
    for shard in sorted((folder / "data" / job_id).glob("*.parquet")):
        with ShardReader(shard) as reader:
            for row, light in enumerate(reader.light):
                layers = {k: reader.layer(row, k).float() for k in LAYERS}
                found[str(light.source_id)] = (light.input_ids.tolist(), layers)
    return found


def errors_T(got: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    return (got - truth).norm(dim=1) / truth.norm(dim=1)


def reference(target: Path, samples: list[list[int]], dtype: Dtype) -> list[dict[int, torch.Tensor]]:
    answer = reference_states(target, samples, dtype, max_bytes=None, timeout_s=300)
    return [{k: layers[k].float() for k in LAYERS} for layers in answer]


@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", ["llama", "qwen3", "qwen3_moe"])
def test_the_hubs_copy_holds_the_models_states(tmp_path, arch, dtype, record_property):
    target = random_target(
        tmp_path / "models" / arch, arch=arch, layers=8, hidden=128, dtype=dtype, max_position=MAX_LEN
    )
    samples = prompts()
    with FakeHub(tmp_path / "cas") as hub:
        hub.add_token(SECRET, Token(user="team"))
        job_id = extract(tmp_path, hub, target, samples)
        folder = tmp_path / "copy"
        # The real storage knows the hashes that its own chunks were given; here only they are told, the bytes
        # are not.
        hub.know_xet(tmp_path / "data" / "jobs" / job_id)
        with HubClient("xet", tmp_path / "home", hub.url) as client:
            client.ask("download", repo_id=REPO, token=SECRET, folder=str(folder))
    report = verify_dataset(folder, model_folder=target)
    assert report.ok, report.findings
    stored = stored_states(folder, job_id)
    assert len(stored) == len(samples)
    exact = reference(target, samples, "float32")
    rounded = exact if dtype == "float32" else reference(target, samples, dtype)
    worst: dict[str, Any] = {}
    for row, ids in enumerate(samples):
        got_ids, got = stored[str(row)]
        assert got_ids == ids
        for k in LAYERS:
            error = errors_T(got[k], exact[row][k])
            worst[f"layer {k}"] = max(worst.get(f"layer {k}", 0.0), float(error.max()))
            if dtype == "float32":
                assert float(error.max()) <= FLOAT32_TOLERANCE, (row, k)
            else:
                own = errors_T(rounded[row][k], exact[row][k])
                # A router may flip on single tokens either way, so a mixture of experts is held by its
                # median.
                assert float(error.median()) <= 1.5 * float(own.median()) + 1e-3, (row, k)
    record_property("worst relative error by layer", str(worst))
    print(f"{arch} {dtype}: worst relative error over all tokens: {worst}")
