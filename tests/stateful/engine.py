"""The tests' engine with a model in it, which a rule can let fail."""

from dataclasses import dataclass

from service.capture.engine import Answer, Prompt
from service.errors import EngineRefused
from tests.support.model_engine import ModelEngine

ENGINE = "tests.stateful.engine:PlayedEngine"


@dataclass
class Fault:
    """After so many rows the engine dies, or refuses to go on; once."""

    rows_left: int | None = None
    dies: bool = False


FAULT = Fault()


class PlayedEngine(ModelEngine):
    """Meets the fault that is planned, if there is one."""

    async def run(self, prompt: Prompt) -> Answer:
        if FAULT.rows_left is not None:
            FAULT.rows_left -= 1
            if FAULT.rows_left < 0:
                FAULT.rows_left = None
                if not FAULT.dies:
                    raise EngineRefused("the engine cannot go on")
                self.die()
        return await super().run(prompt)
