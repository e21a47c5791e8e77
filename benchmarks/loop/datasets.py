"""The loop's target and every dataset that drafters are trained on: ours, the peer's, and wrong ones.

The wrong ones have the mistakes that trouble the field; trainers load them all. The target is the demo's,
with a final norm as uneven as a large model's. The norm's weights of a small model are near one, so that a
norm too many would change next to nothing. Each weight is multiplied by a factor and the head's column of
that channel divided by it, so that the target computes what it did.

Legend: T tokens, A auxiliary layers, H hidden size.
"""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.loop.recipe import AUX, LAST, LAYERS, LoopRecipe, question
from benchmarks.loop.stage import (
    LOG,
    QUARRY_ENVIRONMENT,
    TRAINER_ENVIRONMENT,
    VLLM_ENVIRONMENT,
    Cache,
    failed,
    python,
    run,
)
from examples.tiny_target import cached_target
from service.reader import QuarryDataset
from tests.support.ports import free_port

QUARRY = Path(sys.executable).with_name("quarry")
DATASET, EXPORT, DATA, DUMP = "dataset", "export", "data", "dump"
STATES = "hidden_states"
"""The folder of an export, and the tensor [T, A + 1, H] in each of its files."""
MAX_TOKENS = 1000

WEIGHTS = "model.safetensors"
NORM, HEAD = "model.norm.weight", "lm_head.weight"
NORM_SPREAD = 1.0
"""Standard deviation of the factors' logarithm."""

START_TIMEOUT_S, STOP_TIMEOUT_S = 300.0, 60.0
POLL_S = 0.5


def make_target(cache: Cache, recipe: LoopRecipe) -> Path:
    """Return the target's folder."""
    plain = cached_target(recipe.target)

    def make(folder: Path) -> None:
        shutil.copytree(plain, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(WEIGHTS))
        tensors = unevenly_normed(load_file(plain / WEIGHTS), recipe.target.seed)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return cache.stage("target", {"made": plain.name, "spread": NORM_SPREAD}, make)


def unevenly_normed(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Return the weights of a model that computes the same, with another final norm and head."""
    draw = torch.Generator().manual_seed(seed)
    factors_H = torch.exp(NORM_SPREAD * torch.randn(len(tensors[NORM]), generator=draw))
    return tensors | {NORM: tensors[NORM] * factors_H, HEAD: tensors[HEAD] / factors_H}


def generated(cache: Cache, target: Path, questions: Sequence[str], answer_tokens: int) -> Path:
    """Return a dataset of the target's greedy answers with the states of the decode steps themselves.

    Raises LoopFailed.
    """
    samples = [{"id": str(number), "messages": question(text)} for number, text in enumerate(questions)]
    answer = {"max_tokens": answer_tokens, "capture": "one_pass"}
    return extracted(cache, "answers_generated", target, samples, generate=answer)


def prefilled_as_fp8(cache: Cache, target: Path, dataset: Path) -> Path:
    """Return a dataset of the same token ids and masks, prefilled and stored lossily. Raises LoopFailed."""
    rows = QuarryDataset(dataset)
    samples = [
        {"id": row.source_id, "token_ids": row.input_ids.tolist(), "loss_mask": row.loss_mask.tolist()}
        for row in map(rows.row, range(len(rows)))
    ]
    return extracted(cache, "answers_fp8", target, samples, storage={"compression": "fp8"})


def extracted(cache: Cache, name: str, target: Path, samples: list[dict[str, Any]], **more: object) -> Path:
    """Run one job with `quarry extract`, then `quarry verify`; return the dataset's folder.

    `more` are other fields of the job. Raises LoopFailed.
    """
    job = {
        "model": str(target),
        "dtype": "float32",
        "layers": LAYERS,
        "source": {"kind": "inline", "samples": samples},
        "max_tokens": MAX_TOKENS,
        "on_too_long": "reject",
        **more,
    }

    def make(folder: Path) -> None:
        (folder / "job.json").write_text(json.dumps(job))
        out, log = folder / DATASET, folder / LOG
        run([QUARRY, "extract", folder / "job.json", "--out", out, "--strict"], log, QUARRY_ENVIRONMENT)
        run([QUARRY, "verify", out, "--model", target], log, QUARRY_ENVIRONMENT)

    return cache.stage(name, job | {"model": target.name}, make) / DATASET


def exported(cache: Cache, target: Path, dataset: Path, draft_vocab: int) -> Path:
    """Return what `quarry export --to speculators` writes of the drafter's layers. Raises LoopFailed."""
    layers = ",".join(map(str, AUX))
    decides = {"dataset": dataset.parent.name, "layers": list(AUX), "draft_vocab": draft_vocab}

    def make(folder: Path) -> None:
        chosen = ["--layers", layers, "--draft-vocab", str(draft_vocab), "--target", str(target)]
        out = ["--to", "speculators", "--out", str(folder / EXPORT)]
        run([QUARRY, "export", dataset, *out, *chosen], folder / LOG, QUARRY_ENVIRONMENT)

    name = f"{dataset.parent.name.split('-')[0]}_layers_{layers.replace(',', '_')}"
    return cache.stage(name, decides, make) / EXPORT


Mistake = Callable[[QuarryDataset, torch.Tensor, int], torch.Tensor]
"""From a dataset, the right states [T, A + 1, H] and the row's number to the wrong ones."""


def layer_below(rows: QuarryDataset, right: torch.Tensor, number: int) -> torch.Tensor:
    """Every layer, the last one too, is the one below the one that was meant: ids counted from 0."""
    row = rows.row(number)
    return torch.stack([row.layer(k - 1) for k in (*AUX, LAST)], dim=1)


def extra_norm(rows: QuarryDataset, right: torch.Tensor, number: int) -> torch.Tensor:
    """The last layer is stored after the final norm, and the trainer applies the norm again."""
    return torch.cat([right[:, :-1], rows.row(number).last_normed()[:, None]], dim=1)


def other_row(rows: QuarryDataset, right: torch.Tensor, number: int) -> torch.Tensor:
    """The states are of the next request of the batch, as long as it lasts, then over again."""
    other = rows.row((number + 1) % len(rows))
    states = torch.stack([other.layer(k) for k in (*AUX, LAST)], dim=1)
    return states[torch.arange(len(right)) % len(states)]


MISTAKES: dict[str, Mistake] = {
    "layer_below": layer_below,
    "extra_norm": extra_norm,
    "other_row": other_row,
}


def spoiled(cache: Cache, mistake: str, dataset: Path, export: Path) -> Path:
    """Return `export`, which is of `dataset`, with one mistake in the states of every row."""

    def make(folder: Path) -> None:
        shutil.copytree(export, folder / DATA, ignore=shutil.ignore_patterns(STATES))
        (folder / DATA / STATES).mkdir()
        rows = QuarryDataset(dataset)
        for number in range(len(rows)):
            name = f"hs_{number}.safetensors"
            tensors = load_file(export / STATES / name)
            tensors["hidden_states"] = MISTAKES[mistake](rows, tensors["hidden_states"], number).contiguous()
            save_file(tensors, folder / DATA / STATES / name)

    return cache.stage(mistake, {"export": export.parent.name}, make) / DATA


COUNT = """
import sys
from datasets import load_from_disk
from speculators.train.vocab_mapping import save_token_frequency_distribution
save_token_frequency_distribution(load_from_disk(sys.argv[1]), sys.argv[1] + "/token_freq.pt")
"""
"""What `speculators prepare-data` does last."""


def dumped(cache: Cache, target: Path, export: Path) -> Path:
    """Return the rows of `export` with states that speculators' client got from vLLM. Raises LoopFailed.

    Token ids and masks are the export's, so that only the states are compared; token counts and vocabulary
    maps are the peer's own again.
    """

    def make(folder: Path) -> None:
        data = folder / DUMP
        left_out = shutil.ignore_patterns(STATES, "*.npy", "token_freq.pt", "export.json", "TRAIN.md")
        shutil.copytree(export, data, ignore=left_out)
        with server(target, folder) as endpoint:
            options = ["--validate-outputs", "--fail-on-error", "--concurrency", "8"]
            place = ["--endpoint", f"{endpoint}/v1", "--preprocessed-data", str(data)]
            dump = python("speculators", "generate-offline-data", *place, *options)
            run(dump, folder / LOG, TRAINER_ENVIRONMENT)
        run([sys.executable, "-W", "ignore", "-c", COUNT, data], folder / LOG, TRAINER_ENVIRONMENT)

    decides = {"target": target.name, "rows": export.parent.name, "aux": AUX}
    return cache.stage("speculators", decides, make) / DUMP


@contextmanager
def server(target: Path, folder: Path) -> Iterator[str]:
    """Yield the address of vLLM's server, set up as speculators' guide says, and stop it.

    vLLM's connector needs CUDA, which `benchmarks.example_on_cpu` answers for. Raises LoopFailed.
    """
    port = free_port()
    connector = {
        "kv_connector": "ExampleOnCpu",
        "kv_connector_module_path": "benchmarks.example_on_cpu",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "shared")},
    }
    proposer = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [*AUX, LAST]}},
    }
    place_and_shape = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    capture = ["--speculative-config", json.dumps(proposer), "--kv-transfer-config", json.dumps(connector)]
    options = [*place_and_shape, "--max-model-len", "1024", "--enforce-eager", *capture]
    command = python("vllm.entrypoints.openai.api_server", "--model", target, *options)
    log, address = folder / "server.log", f"http://127.0.0.1:{port}"
    environment = os.environ | VLLM_ENVIRONMENT
    with (
        log.open("wb") as sink,
        subprocess.Popen(list(map(str, command)), env=environment, stdout=sink, stderr=sink) as child,
    ):
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not _is_up(address):
                if child.poll() is not None or time.monotonic() > deadline:
                    raise failed("vLLM's server", child.poll(), log)
                time.sleep(POLL_S)
            yield address
        finally:
            child.terminate()
            try:
                child.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()


def _is_up(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5):
            return True
    except OSError:
        return False
