"""vLLM on a sick node: its engine core ends as `QUARRY_TEST_DIES` says, at its `start` or its first `step`.

vLLM loads this module as our connector, which is in the core's own process.
"""

import os
from typing import Any

import torch

from connector import hidden_states
from service.capture.vllm_engine import VllmEngine
from tests.support.dying_engine import DIES


def die(moment: str) -> None:
    """End this process without a word, if it is to end at this moment."""
    if os.environ.get(DIES) == moment:
        os._exit(1)


class HiddenStatesConnector(hidden_states.HiddenStatesConnector):
    """Found by vLLM by this name."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        die("start")
        super().register_kv_caches(kv_caches)

    def build_connector_meta(self, scheduler_output: Any) -> hidden_states.StepMetadata:
        die("step")
        return super().build_connector_meta(scheduler_output)


class DyingVllm(VllmEngine):
    """vLLM with that connector."""

    connector_module = "tests.support.dying_connector"
