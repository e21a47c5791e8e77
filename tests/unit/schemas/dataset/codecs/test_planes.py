"""The planes are those of a plain copy with strides."""

import numpy as np
import pytest

from schemas.dataset.codecs.planes import _CHUNK_ELEMENTS, merge_planes, split_planes


def plain(raw, width):
    """Return the planes as they were first made, by two copies."""
    elements = raw.reshape(-1, width)
    return elements[:, width - 1].tobytes(), elements[:, : width - 1].tobytes()


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("num_elements", [1, 7, _CHUNK_ELEMENTS, 3 * _CHUNK_ELEMENTS + 7])
def test_planes_that_replace_their_layer_are_those_of_a_copy(width, num_elements):
    raw = np.random.default_rng(0).integers(0, 256, num_elements * width, np.uint8)
    before = raw.copy()
    high, low = split_planes(raw, width)
    assert (high.tobytes(), low.tobytes()) == plain(before, width)
    assert np.array_equal(merge_planes(high, low, width), before)
    assert np.shares_memory(low, raw)
