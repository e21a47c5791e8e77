"""vLLM's start is given up half way, or fails: nothing of it is left, and the cause is named."""

import asyncio
import multiprocessing
from pathlib import Path

import pytest

from service.capture.engine import EngineSpec
from service.capture.link import EngineLink
from service.capture.vllm_engine import VllmEngine
from service.errors import EngineDied
from service.settings import Settings
from tests.support.children import children_of, wait_for_end
from tests.support.tiny_model import random_target

pytestmark = pytest.mark.engine


@pytest.mark.usefixtures("worker_apart")
def test_a_start_that_is_cancelled_leaves_no_process(tmp_path: Path) -> None:
    """1. The core has started a process of its own. 2. The start is cancelled. 3. The engine is stopped."""
    folder = random_target(tmp_path / "target", layers=4, hidden=64)
    settings = Settings(data_dir=tmp_path / "data", engine_options={"enforce_eager": True})
    spec = EngineSpec(folder, "r", "bfloat16", (2, 4), 64, 256, decode=False)

    async def given_up() -> list[int]:
        engine, link = VllmEngine(), EngineLink()
        await link.listen()
        starting = asyncio.create_task(engine.start(spec, settings, link))
        processes: list[int] = []
        while not processes:
            assert not starting.done(), starting
            await asyncio.sleep(0.01)
            for core in multiprocessing.active_children():
                if core.pid is not None and (workers := children_of(core.pid)):
                    processes = [core.pid, *workers]
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await asyncio.wait_for(engine.stop(), 60)
        await link.close()
        assert starting.cancelled()
        assert not engine.alive
        return processes

    for process in asyncio.run(given_up()):
        wait_for_end(process)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    "worker",
    [pytest.param("in the core", marks=pytest.mark.short), pytest.param("apart", marks=pytest.mark.slow)],
)
def test_what_the_core_dies_of_is_named(
    worker: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM says so to its log alone. What has no room in the cache is noticed by the core only."""
    if worker == "apart":
        request.getfixturevalue("worker_apart")
    folder = random_target(tmp_path / "target", layers=4, hidden=64)
    options = {"enforce_eager": True, "num_gpu_blocks_override": 1}
    settings = Settings(data_dir=tmp_path / "data", engine_options=options)
    spec = EngineSpec(folder, "r", "bfloat16", (2, 4), 64, 256, decode=False)

    async def failed() -> None:
        engine, link = VllmEngine(), EngineLink()
        await link.listen()
        with pytest.raises(EngineDied, match=r"did not start for \S+ \w+Error: .*(KV cache|blocks)") as died:
            await engine.start(spec, settings, link)
        assert "root cause" not in str(died.value)
        await engine.stop()
        await link.close()

    asyncio.run(failed())
