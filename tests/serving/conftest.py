"""Targets with their datasets; one engine each, whichever tests take them."""

import pytest

from tests.architectures.recipe import NUM_LAYERS
from tests.serving import targets
from tests.serving.stored import Stored, stored
from tests.support import step3p5


@pytest.fixture(scope="session")
def qwen2(tmp_path_factory) -> Stored:
    """Every layer of a Qwen-2."""
    folder = tmp_path_factory.mktemp("qwen2")
    return stored(folder, targets.qwen2(folder / "models" / "qwen2"), tuple(range(NUM_LAYERS)))


@pytest.fixture(scope="session")
def glm4_moe(tmp_path_factory) -> Stored:
    """The last layers of a GLM-4 mixture, whose checkpoint has a layer for multi-token prediction."""
    folder = tmp_path_factory.mktemp("glm4_moe")
    return stored(folder, targets.glm4_moe(folder / "models" / "glm4_moe"), (NUM_LAYERS - 1,))


@pytest.fixture(scope="session")
def step35(tmp_path_factory) -> Stored:
    """The last layers of a Step-3.5, whose checkpoint has three such layers."""
    folder = tmp_path_factory.mktemp("step35")
    target = targets.step35(folder / "models" / "step35")
    return stored(folder, target, (step3p5.NUM_LAYERS - 1,), **step3p5.ON_CPU)
