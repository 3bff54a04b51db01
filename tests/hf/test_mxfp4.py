"""Packed matrices, against the format's definition value by value."""

import numpy as np
import pytest

from k3jax.hf import mxfp4

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def by_definition(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Every value on its own, in float64."""
    rows, half = packed.shape
    out = np.empty((rows, 2 * half))
    for o in range(rows):
        for i in range(2 * half):
            byte = int(packed[o, i // 2])
            code = byte & 15 if i % 2 == 0 else byte >> 4
            sign = -1.0 if code & 8 else 1.0
            out[o, i] = sign * MAGNITUDES[code & 7] * 2.0 ** (int(scale[o, i // 32]) - 127)
    return out


@pytest.fixture
def codes():
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (5, 48), np.uint8), rng.integers(90, 140, (5, 3), np.uint8)


def test_unpack_follows_the_definition(codes):
    np.testing.assert_array_equal(mxfp4.unpack(*codes), by_definition(*codes))


def test_low_nibble_comes_first():
    values = mxfp4.unpack(np.full((1, 16), 0xA7, np.uint8), np.full((1, 1), 127, np.uint8))
    np.testing.assert_array_equal(values, np.tile([6.0, -1.0], (1, 16)))


def test_unpacked_values_come_back_bit_for_bit(codes):
    values = mxfp4.unpack(*codes)
    again = mxfp4.unpack(*mxfp4.pack(values))
    np.testing.assert_array_equal(values.view(np.uint32), again.view(np.uint32))


def test_a_scale_that_fits_is_kept_and_one_that_does_not_is_replaced(codes):
    values = mxfp4.unpack(*codes)
    packed, scale = mxfp4.pack(values, codes[1])
    np.testing.assert_array_equal(packed, codes[0])
    np.testing.assert_array_equal(scale, codes[1])
    values[0, 0] = 1.01 * 2.0 ** (int(codes[1][0, 0]) - 127)
    _, other = mxfp4.pack(values, codes[1])
    np.testing.assert_array_equal(other, mxfp4.pack(values)[1])


@pytest.mark.parametrize("magnitude", [1e-36, 1e-6, 0.02, 1.0, 5e3, 1e37])
def test_the_scale_is_the_least_that_does_not_saturate(magnitude):
    matrix = (np.random.default_rng(1).normal(size=(64, 96)) * magnitude).astype(np.float32)
    packed, scale = mxfp4.pack(matrix)
    largest = np.abs(matrix).reshape(64, 3, 32).max(axis=-1).astype(np.float64)
    factor = 2.0 ** (scale.astype(int) - 127)
    assert (largest <= 6 * factor).all()
    assert (largest > 3 * factor).all()
    step = np.repeat(factor, 32, axis=1)
    assert (np.abs(mxfp4.unpack(packed, scale) - matrix) <= step).all()


def test_values_round_to_nearest_and_ties_to_even():
    given = [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 0.26, 2.4, -5, -0.0, -0.2, -0.75]
    wanted = [6, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4, 0.5, 2.0, -4, -0.0, -0.0, -1.0]
    matrix = np.zeros((1, 32), np.float32)
    matrix[0, : len(given)] = given
    values = mxfp4.unpack(*mxfp4.pack(matrix))[0, : len(given)]
    np.testing.assert_array_equal(values.view(np.uint32), np.array(wanted, np.float32).view(np.uint32))


def test_a_group_of_zeros_and_the_smallest_numbers():
    matrix = np.zeros((1, 64), np.float32)
    matrix[0, 32:] = 2.0**-128
    packed, scale = mxfp4.pack(matrix)
    assert scale.tolist() == [[127, 0]]
    np.testing.assert_array_equal(mxfp4.unpack(packed, scale), matrix)


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(ValueError, match="48 is not a multiple of 32"):
        mxfp4.pack(np.zeros((2, 48), np.float32))
    with pytest.raises(ValueError, match="not finite"):
        mxfp4.pack(np.full((1, 32), np.inf, np.float32))
    with pytest.raises(ValueError, match="1 scales are 255"):
        mxfp4.unpack(np.zeros((1, 16), np.uint8), np.full((1, 1), 255, np.uint8))
