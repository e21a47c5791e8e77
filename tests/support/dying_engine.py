"""An engine on a sick node, or over samples that it cannot run: it dies as `QUARRY_TEST_DIES` says.

`start`: whenever it is started. `step`: at its first request. `step:9`: at its tenth. `token:7`: over every
prompt that begins with token 7. Without the variable it is well.
"""

import os

from service.capture.engine import Answer, EngineSpec, Prompt
from service.capture.link import EngineLink
from service.errors import EngineDied
from service.settings import Settings
from tests.support.fake_engine import FakeEngine

DIES = "QUARRY_TEST_DIES"


class DyingEngine(FakeEngine):
    """The tests' engine, which dies."""

    def __init__(self) -> None:
        super().__init__()
        self._when, _, number = os.environ.get(DIES, "").partition(":")
        self._number = int(number or 0)

    async def start(self, spec: EngineSpec, settings: Settings, link: EngineLink) -> None:
        if self._when == "start":
            raise EngineDied("the device is gone")
        await super().start(spec, settings, link)

    async def run(self, prompt: Prompt) -> Answer:
        met = {"step": self.requests >= self._number, "token": prompt.token_ids[0] == self._number}
        if met.get(self._when, False):
            self.die()
            raise EngineDied("the device is gone")
        return await super().run(prompt)
