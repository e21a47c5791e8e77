from pathlib import Path

import pytest
import torch

from service.proof.canary import POST_NORM, canary_prompts
from service.proof.reference_model import Skeleton, build_skeleton
from service.proof.reference_process import ReferencePass
from service.proof.reference_weights import WeightStream
from tests.architectures.recipes import RECIPES
from tests.architectures.target import make_model
from tests.support.reference_models import MODEL_TYPES, NUM_LAYERS, VOCAB_SIZE, TinyModel, edit_config
from tests.support.step3p5 import step3p5_target
from tests.support.whole_model import assert_same_bits, streamed_states, whole_states

PROMPTS = canary_prompts(VOCAB_SIZE, 129)
ONE_PROMPT = PROMPTS[-1:]
UNLIKE = (
    "Qwen3MoeForCausalLM",
    "MixtralForCausalLM",
    "OlmoeForCausalLM",
    "GptOssForCausalLM",
    "Llama4ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3NextForCausalLM",
    "FalconMambaForCausalLM",
    "Zamba2ForCausalLM",
    "GPT2LMHeadModel",
)
"""Fused experts of every layout, a model inside another, no attention, layers that share weights."""


class Watched(WeightStream):
    """Says which parts it read, in which order, and that never two layers were in memory."""

    def __init__(self, skeleton: Skeleton, folder: Path, dtype: torch.dtype) -> None:
        super().__init__(skeleton, folder, dtype)
        self.read: list[str] = []
        self._of_layers = set(skeleton.layers)

    def load(self, part: str) -> None:
        if part not in self._held:
            self.read.append(part)
            assert part not in self._of_layers or not self._held & self._of_layers
        super().load(part)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_state_has_the_bits_that_the_whole_model_gives(tmp_path, model_type, dtype):
    TinyModel(tmp_path, model_type, dtype, shard_size="100KB")
    kind = getattr(torch, dtype)
    got = streamed_states(tmp_path, ONE_PROMPT, kind)
    assert [set(states) for states in got] == [{*range(NUM_LAYERS + 1), POST_NORM}]
    assert_same_bits(got, whole_states(tmp_path, ONE_PROMPT, kind))


@pytest.mark.slow
@pytest.mark.parametrize("name", UNLIKE)
def test_architectures_unlike_llama_give_the_same_bits_too(tmp_path, name):
    model = make_model(RECIPES[name])
    model.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="500KB")
    want = whole_states(tmp_path, ONE_PROMPT, torch.bfloat16)
    assert_same_bits(streamed_states(tmp_path, ONE_PROMPT, torch.bfloat16), want)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", *UNLIKE])
def test_a_prompt_in_a_batch_has_the_states_that_it_has_alone(tmp_path, name):
    """What follows a shorter prompt in its row changes none of its states."""
    make_model(RECIPES[name]).to(torch.float32).save_pretrained(tmp_path)
    alone = whole_states(tmp_path, PROMPTS, torch.float32)
    for prompt, other in zip(streamed_states(tmp_path, PROMPTS, torch.float32), alone, strict=True):
        for layer_id, states in prompt.items():
            error = (states - other[layer_id]).norm(dim=1) / other[layer_id].norm(dim=1)
            # Sums are in another order: 2e-5 in Qwen3-Next on some CPUs. One token more or less is 0.4.
            assert float(error.max()) < 1e-3, (layer_id, float(error.max()))


@pytest.mark.slow
def test_step_3_5_gives_the_bits_of_the_checkpoint_that_step_3_7_reads(tmp_path):
    folder = step3p5_target(tmp_path / "step3p5")
    edit_config(folder, swiglu_limits=[0.0] * 4 + [0.5] * 3)  # none is clamped where the engine runs it
    whole = whole_states(folder, ONE_PROMPT, torch.bfloat16)
    assert_same_bits(streamed_states(folder, ONE_PROMPT, torch.bfloat16), whole)


def test_a_model_that_is_stored_in_another_dtype_gives_the_same_bits(tmp_path):
    TinyModel(tmp_path, "qwen3", "float32")
    want = whole_states(tmp_path, ONE_PROMPT, torch.float16)
    assert_same_bits(streamed_states(tmp_path, ONE_PROMPT, torch.float16), want)


def test_weights_are_read_once_for_all_prompts_one_layer_at_a_time_and_the_head_never(tmp_path):
    TinyModel(tmp_path, "llama", "bfloat16")
    skeleton = build_skeleton(tmp_path, torch.bfloat16)
    weights = Watched(skeleton, tmp_path, torch.bfloat16)
    ReferencePass(skeleton, weights).run(PROMPTS)
    assert weights.read == ["model.embed_tokens", *skeleton.layers, "model.norm"]
    assert all(tensor.is_meta for tensor in skeleton.model.state_dict().values())


def test_a_weight_that_is_used_from_outside_its_layer_is_an_error_and_not_noise(tmp_path):
    TinyModel(tmp_path, "llama", "bfloat16")
    skeleton = build_skeleton(tmp_path, torch.bfloat16)
    reference = ReferencePass(skeleton, WeightStream(skeleton, tmp_path, torch.bfloat16))
    first, second = (skeleton.model.get_submodule(name) for name in skeleton.layers[:2])
    second.register_forward_pre_hook(lambda _, args: args[0] @ first.mlp.gate_proj.weight.T)
    with pytest.raises(ValueError, match="is called with a weight that is not in memory"):
        reference.run(PROMPTS)


def test_layers_that_run_in_another_order_are_an_error(tmp_path):
    TinyModel(tmp_path, "llama", "bfloat16")
    found = build_skeleton(tmp_path, torch.bfloat16)
    wrong = Skeleton(found.model, found.layers[::-1], found.final_norm)
    reference = ReferencePass(wrong, WeightStream(wrong, tmp_path, torch.bfloat16))
    with pytest.raises(ValueError, match="decoder layer 3 runs after 0 others"):
        reference.run(PROMPTS)


def test_streams_of_several_states_a_token_are_refused(tmp_path):
    make_model(RECIPES["Gemma3nForCausalLM"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"the state of layer 0 is \[4, 2, 129, 128\]"):
        streamed_states(tmp_path, PROMPTS, torch.float32)
