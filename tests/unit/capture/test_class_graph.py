"""Inheritance read from sources, on a package written for it and on the engine's own."""

from itertools import count
from pathlib import Path

import pytest
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.model_executor.models.registry import ModelRegistry

from service.capture.class_graph import defines, inherits

PACKAGE = {
    "__init__.py": "",
    "interfaces.py": "from typing import Protocol\nclass Wanted(Protocol): ...\nclass Other(Protocol): ...\n",
    "plain.py": (
        "import torch.nn as nn\nfrom torch import fx\nfrom .interfaces import Other, Wanted\n"
        "class Has(nn.Module, Wanted): ...\n"
        "class HasNot(nn.Module, fx.Interpreter, Other): ...\n"
        "class Child(Has): ...\n"
    ),
    "far/__init__.py": "from ..plain import Child as Renamed\n",
    "far/away.py": (
        "from . import Renamed\nimport plain_outside as outside\nclass Grandchild(outside.X, Renamed): ...\n"
    ),
    "round.py": "from .about import Again\n",
    "about.py": "from .round import Again\n",
    "unclear.py": (
        "from .plain import Has, HasNot\n"
        "def make(): ...\n"
        "class Computed(make()): ...\n"
        "class OfNowhere(Nowhere): ...\n"
        "class Still(Computed, Has): ...\n"
        "if make():\n    from .plain import Has as Chosen\nelse:\n    from .plain import HasNot as Chosen\n"
        "if make():\n    from .plain import Has as Same\nelse:\n    from .plain import Child as Same\n"
        "class OfChosen(Chosen): ...\n"
        "class OfSame(Same): ...\n"
    ),
}
_names = (f"graphed_{number}" for number in count())


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package that can be found; what is read of it is remembered, so each test has its own."""
    name = next(_names)
    for path, text in PACKAGE.items():
        file = tmp_path / name / path
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.mark.parametrize(
    ("place", "answer"),
    [
        ("plain:Has", True),
        ("plain:HasNot", False),
        ("plain:Child", True),
        ("far:Renamed", True),
        ("far.away:Grandchild", True),
        ("unclear:Computed", None),
        ("unclear:OfNowhere", None),
        ("unclear:Still", True),
        ("unclear:OfChosen", None),
        ("unclear:OfSame", True),
        ("round:Again", None),
        ("plain:Missing", None),
        ("missing:Has", None),
    ],
)
def test_a_class_inherits_what_its_sources_say(package, place, answer):
    module, name = place.split(":")
    assert inherits(f"{package}.{module}", name, "Wanted") is answer


def test_a_module_defines_its_classes_and_its_imports(package):
    assert defines(f"{package}.plain", "Has")
    assert defines(f"{package}.far", "Renamed")
    assert not defines(f"{package}.plain", "Grandchild")
    assert not defines(f"{package}.missing", "Has")


@pytest.mark.parametrize(
    "architecture",
    [
        "LlamaForCausalLM",
        "Qwen3MoeForCausalLM",
        "DeepseekV3ForCausalLM",
        "GptOssForCausalLM",
        "FalconForCausalLM",
    ],
)
def test_the_engines_classes_say_the_same_when_they_are_loaded(architecture):
    known = ModelRegistry.models[architecture]
    read = inherits(known.module_name, known.class_name, "SupportsEagle3")
    assert read is bool(supports_eagle3(known.load_model_cls()))
