"""The drill on vLLM's CPU build: the failures that need a model, planted into its own cache.

One engine runs them all, a job after the other; a second one captures the layer before.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from service.capture.canary import Canary
from service.capture.renderer import Renderers
from service.capture.session import EngineSlot
from service.capture.unit_run import UnitRun
from service.errors import QuarryError, problem_slug
from service.store import units
from tests.drill.harness import LAYERS, Caught, one_reference, victims
from tests.drill.table import PLANTS, Check, Plant, Stage
from tests.support import planted_connector
from tests.support.device import MEMORY
from tests.support.jobs import Shop, request
from tests.support.loop_thread import LoopThread
from tests.support.plans import random_ids
from tests.support.planted_connector import Order
from tests.support.tiny_model import random_target

BLOCK = 128
LENGTHS = (2 * BLOCK + BLOCK // 2, 3 * BLOCK - 1, BLOCK + 1, 1)
NUM_SAMPLES = 48
"""Enough that two long rows are surely not among those whose logits are recomputed, a sample drawn by id."""


@dataclass(frozen=True)
class Session:
    """A started engine, and a service of its own for each plant: the store would remember a canary."""

    loop: LoopThread
    engine: EngineSlot
    folder: Path
    target: Path

    def capture(
        self, name: str, plant: str | None, *, everywhere: bool = False, units_only: bool = False
    ) -> Caught | None:
        shop = open_shop(self.folder, self.target, name)
        lengths = (LENGTHS * NUM_SAMPLES)[:NUM_SAMPLES]
        samples = [
            {"id": f"{name} {row}", "token_ids": ids}
            for row, ids in enumerate(random_ids(lengths, vocab_size=1500))
        ]
        body = request(
            self.target, samples, layers=LAYERS[:-1], canary="run", storage={"shard_bytes": 16_777_216}
        )
        job_id = shop.submit(body, name)
        shop.plan()
        lease = units.lease(shop.store, "drill", 600.0)
        assert lease is not None
        order = Path(self.folder / "plant.json")
        order.unlink(missing_ok=True)
        if plant is not None:
            row, other = (None, None) if everywhere or units_only else victims(shop, job_id)
            # Rows of the job before, given up a moment ago, may still come out of the engine.
            Order(plant, str(self.target), row, other, job_id, units_only).save()

        async def attempt() -> None:
            session = self.engine.session
            if session is None:
                spec = await self.engine.inspect(lease)
                session = await self.engine.start(lease, spec, await self.engine.prepare(spec))
            session.ran_again.clear()  # every job is this engine's first, and owes a second run
            async with Canary(lease, shop.store, shop.settings) as canary:
                if not await canary.has_passed(session):
                    await canary.run(session, await self.engine.inspect(lease))
            renderers = Renderers(shop.store, shop.settings)
            await UnitRun(lease, session, lambda: None, renderers, shop.store).run()

        try:
            self.loop.call(attempt())
        except QuarryError as error:
            return Caught(problem_slug(type(error)), error.detail)
        finally:
            shop.store.close()
        return None


def open_shop(folder: Path, target: Path, name: str) -> Shop:
    """Every shop has a store of its own and the one data folder that the engine's connector writes into."""
    return Shop.open(
        folder,
        target,
        database_url=f"sqlite:///{folder / name}.db",
        engine="tests.drill.vllm_engines:PlantedVllm",
        # What is planted into a block would stay in the prefix cache, for the jobs that come after.
        engine_options={
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "max_num_batched_tokens": 512,
            "max_num_seqs": 16,
            **MEMORY,
        },
    )


@contextmanager
def session(folder: Path, target: Path, engine: str) -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as monkeypatch, one_reference(monkeypatch):
        monkeypatch.setenv(planted_connector.ORDER, str(folder / "plant.json"))
        shop = open_shop(folder, target, "engine")
        settings = shop.settings.model_copy(update={"engine": f"tests.drill.vllm_engines:{engine}"})
        shop.store.close()
        loop = LoopThread()
        slot = EngineSlot(settings)
        try:
            yield Session(loop, slot, folder, target)
        finally:
            loop.call(slot.stop())
            loop.close()


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return random_target(tmp_path_factory.mktemp("models") / "qwen3", max_position=512)


def plants(stage: Stage, *names: str) -> list[Plant]:
    by_name = {plant.name: plant for plant in PLANTS if plant.stage is stage}
    return [by_name[name] for name in names]


IN_ONE_ROW = plants(
    Stage.CACHE,
    *("zero-block", "never-stored", "stale-block", "stale-prefix", "stale-tail", "another-row"),
    *("exchanged-rows", "shifted", "post-norm"),
)
IN_UNITS = plants(Stage.UNITS, "exchanged-layers")
IN_EVERY_ROW = plants(Stage.EVERYWHERE, "exchanged-layers", "post-norm", "shifted", "zero-states")
PROOF_OF = {
    Check.VALUES: ("is all zero in",),
    Check.SENTINELS: ("stored no state for",),
    Check.SEEN: ("holds the states of other tokens",),
    Check.LAST: ("by the stored states",),
    Check.CANARY: ("canary: layer",),
    Check.SECOND: ("computed a second time, layer",),
}


def assert_caught(plant: Plant, caught: Caught | None) -> None:
    assert caught is not None, f"{plant.name} survived"
    assert any(words in caught.said for words in PROOF_OF[plant.check]), caught


@pytest.mark.engine
def test_what_is_planted_into_vllms_cache_is_caught(target, tmp_path):
    """1. A healthy job passes. 2. Each plant is caught by its check. 3. A healthy job passes again."""
    with session(tmp_path, target, "PlantedVllm") as vllm:
        assert vllm.capture("healthy", None) is None
        for plant in IN_ONE_ROW:
            assert_caught(plant, vllm.capture(plant.name, plant.name))
        for plant in IN_UNITS:
            assert_caught(plant, vllm.capture(f"units {plant.name}", plant.name, units_only=True))
        for plant in IN_EVERY_ROW:
            assert_caught(plant, vllm.capture(f"every {plant.name}", plant.name, everywhere=True))
        assert vllm.capture("healthy again", None) is None


@pytest.mark.engine
def test_the_layer_before_is_caught_on_vllm(target, tmp_path):
    with session(tmp_path, target, "LayerBeforeVllm") as vllm:
        (plant,) = plants(Stage.EVERYWHERE, "layer-before")
        caught = vllm.capture("layer before", None)
        assert_caught(plant, caught)
        assert caught is not None
        assert plant.says in caught.said
