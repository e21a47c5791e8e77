"""An engine without a model.

The real connector halves over a paged cache in memory, states a pure function of the tokens.

It fills the same seam as vLLM (`service.capture.engine.Engine`), uses the same link, pool, writers and
shards, and runs in milliseconds, so that hundreds of tests can drive whole jobs. What it does not have is
attention: the state of layer k at position t depends on the token, t and k alone, so a test knows every value
without running anything.

Legend: B blocks, L captured layers, S slots a block, H hidden size, T tokens.
"""

import asyncio
import itertools
import os
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from connector.scheduler import SchedulerHalf
from connector.wire import DrainConfig, StepWork
from connector.worker import WorkerHalf
from schemas.identity import EngineInfo
from service.capture.engine import WITNESS_TOKENS, Answer, Ended, EngineSpec, Prompt, PromptRefused
from service.capture.link import EngineLink
from service.errors import EngineDied
from service.proof.head import Head
from service.settings import Settings

NUM_BLOCKS = 512
SLOTS = 16
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
REFUSED_TOKEN = 13
"""A prompt that begins with this token twice is refused, as an engine may refuse what it cannot run."""


class Status(Enum):
    """The names of vLLM's request states that the scheduler half reads."""

    FINISHED_LENGTH_CAPPED = 1
    FINISHED_ABORTED = 2


@dataclass
class FakeRequest:
    """What the scheduler half reads of a request."""

    request_id: str
    status: Status
    kv_transfer_params: dict[str, Any] | None
    num_computed_tokens: int
    all_token_ids: list[int] = field(default_factory=list)


def states_TH(token_ids: list[int], layer_id: int, hidden_size: int, dtype: str) -> torch.Tensor:
    """Return the fake model's states of one layer: [T, H] of `dtype`."""
    ids = torch.tensor(token_ids, dtype=torch.float32)[:, None]
    positions = torch.arange(len(token_ids), dtype=torch.float32)[:, None]
    columns = torch.arange(hidden_size, dtype=torch.float32)[None, :]
    # A frequency of its own for each column, so that no two tokens and no two positions share a state.
    waves = ids * (0.37 + columns * 0.0137) + positions * (0.11 + columns * 0.0071)
    return torch.sin(waves + columns * 0.73 + layer_id * 1.9).to(DTYPES[dtype])


class FakeEngine:
    """One step a request, blocks from a free list, freed when the worker half says so."""

    info: EngineInfo
    worker_half = WorkerHalf

    def __init__(self) -> None:
        self._worker: WorkerHalf | None = None
        self._names = itertools.count()
        self._waiting_sent: dict[str, list[int]] = {}
        # As in vLLM, no request is given block 0.
        self._free: list[int] = list(range(1, NUM_BLOCKS))
        self._blocks_freed = asyncio.Condition()
        self._dead = False
        self._stepper: asyncio.Task[None] | None = None
        self.requests = 0
        self.computing = 0
        self.step_delay_s = float(os.environ.get("QUARRY_FAKE_STEP_S", "0"))

    @property
    def alive(self) -> bool:
        return self._worker is not None and not self._dead

    async def start(self, spec: EngineSpec, settings: Settings, link: EngineLink) -> None:
        self._spec = spec
        await asyncio.to_thread(self._load)
        self._cache = torch.zeros(
            (NUM_BLOCKS, len(spec.layer_ids), SLOTS, spec.hidden_size), dtype=DTYPES[spec.dtype]
        )
        self._scheduler = SchedulerHalf(SLOTS, 0)
        config = DrainConfig(
            settings.work_root, link.path, settings.pool_bytes, settings.writers(), 0, 1, "0.32.0"
        )
        self._worker = await asyncio.to_thread(
            self.worker_half, config, self._cache, spec.max_model_len, self._on_lost
        )
        await link.hello(30.0)
        self.info = EngineInfo(name="fake", version="1", device="cpu", options={"block_size": SLOTS})
        self._stepper = asyncio.create_task(self._step_on())

    async def run(self, prompt: Prompt) -> Answer:
        if prompt.token_ids[:2] == (REFUSED_TOKEN, REFUSED_TOKEN):
            raise PromptRefused("the engine does not take this prompt")
        if self._dead or self._worker is None:
            raise EngineDied("the fake engine is dead")
        self.requests += 1
        sampled = self._sample(prompt)
        computed = list(prompt.token_ids) + sampled[:-1]
        blocks = await self._allocate(-(-len(computed) // SLOTS))
        self._worker.begin(StepWork(fresh=blocks))
        params = prompt.ref.params() if prompt.ref is not None else None
        request = FakeRequest(
            f"{prompt.request_id}-{next(self._names):08x}",
            Status.FINISHED_LENGTH_CAPPED,
            params,
            len(computed),
            computed + sampled[-1:],
        )
        self.computing += 1
        try:
            await asyncio.sleep(self.step_delay_s)
        except asyncio.CancelledError:
            request.status = Status.FINISHED_ABORTED
            self._scheduler.request_finished(request, (blocks,))
            self._free += blocks
            raise
        finally:
            self.computing -= 1
        self._compute(computed, blocks)
        if self._scheduler.request_finished(request, (blocks,)):
            self._waiting_sent[request.request_id] = blocks
        else:
            await self._release(blocks)
        likely = self._likely(computed) if prompt.witness else ()
        return Answer(tuple(sampled), likely, self._ended(prompt, sampled))

    async def stop(self) -> None:
        if self._stepper is not None:
            self._stepper.cancel()
            await asyncio.gather(self._stepper, return_exceptions=True)
        if self._worker is not None:
            worker, self._worker = self._worker, None
            await asyncio.to_thread(worker.stop)

    def die(self) -> None:
        """Vanish as a killed engine does: the socket ends, requests fail."""
        self._dead = True
        if self._worker is not None:
            self._worker._link.close()

    def _load(self) -> None:
        """Read what is needed of the weights, once: what becomes of the folder later changes nothing."""
        self._head = Head.load(self._spec.weights, self._spec.dtype)

    def _sample(self, prompt: Prompt) -> list[int]:
        count = prompt.generate.max_tokens if prompt.generate is not None else 1
        return [(sum(prompt.token_ids) + index) % 50 + 1 for index in range(count)]

    def _ended(self, prompt: Prompt, sampled: list[int]) -> Ended:
        return "length"

    def _states(self, token_ids: list[int]) -> torch.Tensor:
        """Return the states of every captured layer: [L, T, H]."""
        spec = self._spec
        return torch.stack([states_TH(token_ids, k, spec.hidden_size, spec.dtype) for k in spec.layer_ids])

    def _compute(self, token_ids: list[int], blocks: list[int]) -> None:
        states_LTH = self._states(token_ids)
        for number, block in enumerate(blocks):
            part = states_LTH[:, number * SLOTS : (number + 1) * SLOTS]
            self._cache[block, :, : part.shape[1]] = part

    def _likely(self, token_ids: list[int]) -> tuple[tuple[int, float], ...]:
        """Answer what the head says of the fake states: the logit check must hold on a healthy fake, too."""
        last = self._states(token_ids)[-1, -1:]
        logprobs = self._head.logprobs(last)[0]
        best = logprobs.topk(WITNESS_TOKENS)
        return tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))

    async def _allocate(self, count: int) -> list[int]:
        async with self._blocks_freed:
            await self._blocks_freed.wait_for(lambda: len(self._free) >= count)
            taken, self._free = self._free[:count], self._free[count:]
            return taken

    async def _release(self, blocks: list[int]) -> None:
        async with self._blocks_freed:
            self._free += blocks
            self._blocks_freed.notify_all()

    async def _step_on(self) -> None:
        """Step as an engine does: carry the finished requests over, free what was copied."""
        while self._worker is not None:
            work: StepWork = self._scheduler.take_work()
            for req_id in self._worker.step(work):
                await self._release(self._waiting_sent.pop(req_id))
            await asyncio.sleep(0.001)

    def _on_lost(self) -> None:
        self._dead = True
