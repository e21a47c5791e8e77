from dataclasses import dataclass, field

import pytest
import torch

from connector.layout import CacheGroup, find_cache_group, view_BLSH
from connector.versions import LayoutError, parse_version

GROUP = CacheGroup(1, "draft.cache_only_layers.8", 4)


@dataclass
class Spec:
    block_size: int
    kv_cache_specs: dict = field(default_factory=dict)


@dataclass
class Group:
    layer_names: list
    kv_cache_spec: Spec


def test_the_group_is_found_by_name_with_its_own_block_size():
    groups = [Group(["model.layers.0.attn"], Spec(128)), Group([GROUP.layer_name], Spec(4))]
    assert find_cache_group(groups) == GROUP


def test_in_a_uniform_group_the_layers_own_spec_gives_the_block_size():
    groups = [Group(["model.layers.0.attn", GROUP.layer_name], Spec(0, {GROUP.layer_name: Spec(32)}))]
    assert find_cache_group(groups) == CacheGroup(0, GROUP.layer_name, 32)


@pytest.mark.parametrize(
    "names", [["model.layers.0.attn"], ["a.cache_only_layers.8", "b.cache_only_layers.8"]]
)
def test_none_or_several_cache_only_layers_are_refused(names):
    with pytest.raises(LayoutError, match="expected one cache-only layer"):
        find_cache_group([Group([name], Spec(4)) for name in names])


def cache(order: str, physical: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (what the engine hands over, the same states as a plain [B, L, S, H] tensor)."""
    truth = torch.arange(5 * 3 * 4 * 8, dtype=torch.float32).reshape(5, 3, 4, 8)
    stored = truth if physical == "BLSH" else truth.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
    return (stored if order == "BLSH" else stored.permute(0, 2, 1, 3)), truth


@pytest.mark.parametrize("physical", ["BLSH", "BSLH"])
@pytest.mark.parametrize(
    ("version", "order"), [("0.26.0", "BSLH"), ("0.28.0", "BSLH"), ("0.29.0", "BLSH"), ("0.33.0", "BLSH")]
)
def test_every_supported_version_and_physical_layout_gives_the_same_view(version, order, physical):
    given, truth = cache(order, physical)
    view = view_BLSH(given, GROUP, 3, 8, torch.float32, version)
    assert torch.equal(view, truth)
    assert view.data_ptr() == given.data_ptr()


@pytest.mark.parametrize(
    "shape",
    [(5, 4, 3, 8), (5, 3, 4, 16), (5, 3, 8, 8), (5, 2, 4, 8), (5, 3, 32)],
    ids=["axes", "hidden", "block", "layers", "dims"],
)
def test_a_cache_of_another_shape_is_refused_with_both_shapes(shape):
    with pytest.raises(LayoutError, match="has shape"):
        view_BLSH(torch.zeros(shape), GROUP, 3, 8, torch.float32, "0.32.0")


def test_blocks_that_the_engine_splits_for_its_kernels_are_refused_with_the_size_that_works():
    """FlashMLA takes blocks of 64 tokens: of an operator's 128, each cache of the group has twice as many."""
    with pytest.raises(LayoutError, match="start the engine with the 'block_size' 2,"):
        view_BLSH(torch.zeros(10, 3, 2, 8), GROUP, 3, 8, torch.float32, "0.32.0")
    with pytest.raises(LayoutError) as caught:
        view_BLSH(torch.zeros(10, 3, 3, 8), GROUP, 3, 8, torch.float32, "0.32.0")
    assert "block_size" not in str(caught.value)


def test_another_dtype_is_refused():
    with pytest.raises(LayoutError, match="holds"):
        view_BLSH(torch.zeros(5, 3, 4, 8, dtype=torch.float16), GROUP, 3, 8, torch.bfloat16, "0.32.0")


@pytest.mark.parametrize("version", ["0.25.9", "0.34.0", "1.0.0", "dev"])
def test_an_unknown_version_is_refused_with_its_number(version):
    with pytest.raises(LayoutError, match=version):
        parse_version(version)
