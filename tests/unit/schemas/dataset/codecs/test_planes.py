import numpy as np
import pytest
from hypothesis import given, strategies as st

from schemas.dataset.codecs.planes import merge_planes, split_planes


@given(st.binary(max_size=400), st.sampled_from([2, 4]))
def test_planes_are_lossless(raw, width):
    data = np.frombuffer(raw[: len(raw) // width * width], np.uint8)
    hi, lo = np.empty(data.size // width, np.uint8), np.empty(data.size // width * (width - 1), np.uint8)
    split_planes(data, width, hi, lo)
    assert merge_planes(hi, lo, width).tobytes() == data.tobytes()


def test_the_high_plane_holds_sign_and_exponent():
    values = np.array([1.0, -2.0], dtype="<f4").view(np.uint8)
    hi, lo = np.empty(2, np.uint8), np.empty(6, np.uint8)
    split_planes(values, 4, hi, lo)
    assert hi.tolist() == [0x3F, 0xC0]


def test_planes_that_do_not_belong_together_are_refused():
    with pytest.raises(ValueError, match="do not fit"):
        merge_planes(np.zeros(3, np.uint8), np.zeros(4, np.uint8), 2)
