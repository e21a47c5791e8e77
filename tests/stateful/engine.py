"""The tests' engine with a model in it, which a rule can let fail, and the canary's reference beside it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from schemas.request import Dtype
from service.capture.engine import Answer, Prompt
from service.errors import EngineRefused
from service.proof.canary import no_reference
from service.proof.reference import Reference
from tests.support.fake_engine import DTYPES
from tests.support.model_engine import LOADING, ModelEngine
from tests.support.whole_model import States, streamed_states

ENGINE = "tests.stateful.engine:PlayedEngine"


@dataclass
class Fault:
    """After so many rows the engine dies, or refuses to go on; once."""

    rows_left: int | None = None
    dies: bool = False
    before_load: Callable[[], None] | None = None
    """Done once, between the look at a model before a start and its load."""


FAULT = Fault()


class PlayedEngine(ModelEngine):
    """Meets the fault that is planned, if there is one."""

    def _load(self) -> None:
        act, FAULT.before_load = FAULT.before_load, None
        if act is not None:
            act()
        super()._load()

    async def run(self, prompt: Prompt) -> Answer:
        if FAULT.rows_left is not None:
            FAULT.rows_left -= 1
            if FAULT.rows_left < 0:
                FAULT.rows_left = None
                if not FAULT.dies:
                    raise EngineRefused("the engine cannot go on")
                self.die()
        return await super().run(prompt)


async def reference_states(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    dtype: Dtype,
    *,
    last_tokens: int,
    **_: object,
) -> Reference:
    """Take the reference's own pass in this process: one of its own takes seconds to start."""

    def states() -> list[States]:
        with LOADING:
            return streamed_states(folder, prompts, DTYPES[dtype], last_tokens)

    try:
        states_of_prompts = await asyncio.to_thread(states)
    except Exception as error:
        raise no_reference(f"the reference failed: {error}") from error
    return Reference(tuple(states_of_prompts), "transformers", 0.0, 0, None)
