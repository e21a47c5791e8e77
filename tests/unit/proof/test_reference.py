import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest
import torch
import transformers

from service.errors import EngineDied, EngineRefused
from service.proof.canary import POST_NORM, canary_prompts, judge
from service.proof.reference import Reference, reference_states
from tests.support.reference_models import NUM_LAYERS, VOCAB_SIZE, TinyModel, edit_config
from tests.support.whole_model import whole_states

PROMPTS = canary_prompts(VOCAB_SIZE, 20)
TIMEOUT_S = 300.0


def reference(folder: Path, *, max_bytes: int | None = None, timeout_s: float = TIMEOUT_S) -> Reference:
    return asyncio.run(
        reference_states(folder, PROMPTS, "bfloat16", max_bytes=max_bytes, timeout_s=timeout_s)
    )


async def begun(folder: Path, before: set[int]) -> asyncio.Task[Reference]:
    """Return a running call that has started its process, which is not among those `before`."""
    call = asyncio.create_task(
        reference_states(folder, PROMPTS, "bfloat16", max_bytes=None, timeout_s=TIMEOUT_S)
    )
    while processes() <= before:
        await asyncio.sleep(0)
    return call


def processes() -> set[int]:
    """Return the children of this process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return {int(pid) for pid in children.split()}


@pytest.mark.slow
def test_the_process_gives_every_layer_of_every_prompt_and_says_what_that_cost(tmp_path):
    TinyModel(tmp_path, "gpt_neox", "bfloat16")
    found = reference(tmp_path)
    want = whole_states(tmp_path, PROMPTS, torch.bfloat16)
    for one, other in zip(found.states, want, strict=True):
        assert one.keys() == other.keys() == {*range(NUM_LAYERS + 1), POST_NORM}
        for layer_id, states in one.items():
            assert states.dtype is torch.bfloat16
            assert states.shape == other[layer_id].shape
    layer_ids = (0, 2, NUM_LAYERS)
    # The test's own torch may share its work among other threads than the process does.
    layers = judge(want, found.states, layer_ids, NUM_LAYERS, "bfloat16")
    assert min(layer.cosine for layer in layers) > 0.999
    assert found.library == f"transformers {transformers.__version__}"
    assert found.seconds > 0
    assert 50_000_000 < found.peak_bytes < psutil.virtual_memory().total


def test_a_model_of_which_one_layer_does_not_fit_is_refused_with_both_numbers(tmp_path):
    TinyModel(tmp_path, "llama", "bfloat16")
    with pytest.raises(
        EngineRefused, match=r"reference needs \d{8,} bytes of memory, 50000000 are"
    ) as refused:
        reference(tmp_path, max_bytes=50_000_000)
    assert refused.value.field == "canary"
    assert "QUARRY_CANARY_MAX_BYTES" in (refused.value.cure or "")


@pytest.mark.slow
def test_a_model_that_transformers_lacks_is_refused_in_words(tmp_path):
    TinyModel(tmp_path, "llama", "bfloat16")
    edit_config(tmp_path, model_type="of_its_own", architectures=["OwnForCausalLM"])
    with pytest.raises(EngineRefused, match=r"^transformers .* has no class for OwnForCausalLM") as refused:
        reference(tmp_path)
    assert refused.value.field == "canary"
    assert '"skip"' in (refused.value.cure or "")


@pytest.mark.slow
def test_a_model_that_transformers_cannot_run_is_refused_with_what_it_said(tmp_path):
    TinyModel(tmp_path, "llama", "bfloat16")
    edit_config(tmp_path, intermediate_size=97)
    said = r"the reference failed: ValueError: .*mlp.* has shape \[.*96.*\], the model wants \[.*97.*\]"
    with pytest.raises(EngineRefused, match=said) as refused:
        reference(tmp_path)
    assert '"skip"' in (refused.value.cure or "")


def test_the_process_sees_no_gpu(tmp_path, monkeypatch):
    """The engine beside it may just be measuring the GPU's free memory."""
    seen = tmp_path / "seen"
    (tmp_path / "sitecustomize.py").write_text(
        f"import os; open({str(seen)!r}, 'w').write(os.environ['CUDA_VISIBLE_DEVICES']); os._exit(1)"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(EngineRefused, match="the reference"):
        reference(tmp_path)
    assert seen.read_text() == ""


def test_a_process_that_takes_too_long_is_ended(tmp_path):
    TinyModel(tmp_path, "llama", "bfloat16")
    before = processes()
    with pytest.raises(EngineRefused, match=r"took more than 0\.01 s"):
        reference(tmp_path, timeout_s=0.01)
    assert processes() <= before


def test_a_call_that_is_cancelled_ends_its_process(tmp_path):
    TinyModel(tmp_path, "llama", "bfloat16")
    before = processes()

    async def cancel() -> None:
        call = await begun(tmp_path, before)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert call.cancelled()

    asyncio.run(cancel())
    assert processes() <= before


def test_a_process_that_is_killed_is_no_refusal_of_the_model(tmp_path):
    """The kernel kills it where memory is short, which may pass."""
    TinyModel(tmp_path, "llama", "bfloat16")
    before = processes()

    async def kill() -> None:
        call = await begun(tmp_path, before)
        for pid in processes() - before:
            os.kill(pid, signal.SIGKILL)
        await call

    with pytest.raises(EngineDied, match="the kernel ended the canary's reference") as killed:
        asyncio.run(kill())
    assert "memory" in str(killed.value.cure)
