"""What vLLM's registry is told, and the classes that it finds by it."""

import os
import subprocess
import sys

import pytest
from vllm import ModelRegistry
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.plugins import load_general_plugins

from connector.plugin import CAPTURES, CLASSES, prepare
from connector.plugin.carried import BACKEND_CLASSES, CARRIED, MODELS, Carried
from connector.plugin.classes import backend_class, carried_class

IN_A_PROCESS = """
import sys
from vllm import ModelRegistry
from vllm.plugins import load_general_plugins

load_general_plugins()
assert ModelRegistry.models["MixtralForCausalLM"].module_name == "{module}"
assert "connector.vector_math" not in sys.modules
"""


def test_vllm_finds_the_plugin_by_its_entry_point(monkeypatch):
    monkeypatch.setenv(CAPTURES, "1")
    load_general_plugins()
    assert ModelRegistry.models["MixtralForCausalLM"].module_name == CLASSES


@pytest.mark.slow
def test_another_vllm_of_the_machine_is_left_as_it_is():
    """Installed beside a server, the plug-in is loaded in its processes too."""
    environment = {name: value for name, value in os.environ.items() if name != CAPTURES}
    code = IN_A_PROCESS.format(module=f"{MODELS}.mixtral")
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment).returncode == 0


def test_every_carried_class_is_one_that_the_engine_has():
    prepare()
    ours = {name for name, known in ModelRegistry.models.items() if vars(known).get("module_name") == CLASSES}
    assert set(CARRIED) <= ours


def test_registering_again_changes_nothing():
    prepare()
    before = dict(ModelRegistry.models)
    prepare()
    assert ModelRegistry.models == before


def test_an_architecture_that_this_engine_has_elsewhere_is_left_alone():
    before = ModelRegistry.models["OlmoeForCausalLM"]
    ModelRegistry.register_model("OlmoeForCausalLM", f"{MODELS}.elsewhere:OlmoeForCausalLM")
    try:
        prepare()
        assert ModelRegistry.models["OlmoeForCausalLM"].module_name == f"{MODELS}.elsewhere"
    finally:
        ModelRegistry.models["OlmoeForCausalLM"] = before


def test_an_architecture_of_the_transformers_backend_gets_our_class_of_it():
    prepare()
    known = ModelRegistry.models["PhiForCausalLM"]
    assert (known.module_name, known.class_name) == (CLASSES, "TransformersForCausalLM")


@pytest.mark.parametrize("architecture", ["Step3p5ForCausalLM", "MixtralForCausalLM", "Glm4ForCausalLM"])
def test_a_carried_class_supports_states_under_the_engines_name(architecture):
    made = carried_class(CARRIED[architecture])
    assert supports_eagle3(made)
    assert made.__name__ == CARRIED[architecture].model
    assert made.__bases__[0].__module__.startswith(MODELS)


@pytest.mark.parametrize(
    ("carried", "supported"),
    [
        (Carried("llama", "LlamaForCausalLM", "LlamaModel"), True),
        (Carried("mixtral", "MixtralForCausalLM", "AnotherDecoder"), False),
    ],
    ids=["supported by itself", "unknown decoder"],
)
def test_a_class_that_is_not_to_be_carried_stays_as_it_is(carried, supported):
    made = carried_class(carried)
    assert made.__module__ == f"{MODELS}.{carried.module}"
    assert supports_eagle3(made) is supported


@pytest.mark.parametrize("name", BACKEND_CLASSES[:2])
def test_a_class_of_the_backend_keeps_its_name(name):
    made = backend_class(name)
    assert made.__name__ == name
    assert supports_eagle3(made)


def test_nothing_else_is_found_among_the_classes():
    import connector.plugin.classes

    with pytest.raises(AttributeError):
        connector.plugin.classes.LlamaForCausalLM  # noqa: B018


def test_the_table_costs_no_import_of_the_engine():
    code = "import sys, connector.plugin; sys.exit('vllm' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
