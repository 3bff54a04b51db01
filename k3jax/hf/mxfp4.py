"""MXFP4 matrices: E2M1 codes, two in a byte, and one E8M0 scale for each 32 values along the input axis.

OCP Microscaling Formats specification 1.0. Value ``2 i`` of a row is the low nibble of byte ``i``; a scale byte ``s``
is the factor ``2^(s - 127)``, and 255 is NaN.
"""

import ml_dtypes
import numpy as np

GROUP = 32
BIAS = 127
NAN_SCALE = 255

_NIBBLES = np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=1).astype(np.uint8)
_PAIRS = _NIBBLES.view(ml_dtypes.float4_e2m1fn).astype(np.float32)


def unpack(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The float32 matrix [O, I] of codes [O, I / 2] and scales [O, I / 32], both uint8; exact.

    Raises:
      ValueError: a scale is NaN.
    """
    if (scale == NAN_SCALE).any():
        raise ValueError(f"{(scale == NAN_SCALE).sum()} scales are {NAN_SCALE}, which is NaN")
    rows, groups = scale.shape
    values = _PAIRS[packed].reshape(rows, groups, GROUP)
    np.ldexp(values, scale[..., None].astype(np.int32) - BIAS, out=values)
    return values.reshape(rows, groups * GROUP)


def pack(matrix: np.ndarray, scale: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales, uint8, of a matrix [O, I]; what was unpacked comes back without loss.

    The scale is the smallest power of two under which no value saturates, and values round to nearest, ties to even. A
    matrix that ``scale`` represents exactly keeps that scale.

    Raises:
      ValueError: I is not a multiple of 32, or a value is not finite.
    """
    rows, columns = matrix.shape
    if columns % GROUP:
        raise ValueError(f"an input width of {columns} is not a multiple of {GROUP}")
    if not np.isfinite(matrix).all():
        raise ValueError("a value is not finite")
    groups = matrix.astype(np.float32).reshape(rows, columns // GROUP, GROUP)
    if scale is not None:
        packed = _codes(groups, scale)
        if np.array_equal(unpack(packed, scale).view(np.uint32), groups.reshape(rows, columns).view(np.uint32)):
            return packed, scale
    scale = _scales(groups)
    return _codes(groups, scale), scale


def _scales(groups: np.ndarray) -> np.ndarray:
    """E8M0 bytes: the least exponent e with 6 * 2^e >= the largest magnitude; 1 for a group of zeros."""
    largest = np.abs(groups).max(axis=-1)
    fraction, exponent = np.frexp(largest)
    exponent = exponent - np.where(fraction <= 0.75, 3, 2)
    return np.where(largest > 0, np.clip(exponent + BIAS, 0, NAN_SCALE - 1), BIAS).astype(np.uint8)


def _codes(groups: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Codes of ``groups / 2^(scale - 127)``, two in a byte."""
    scaled = np.ldexp(groups, BIAS - scale[..., None].astype(np.int32))
    codes = scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(groups.shape[0], -1)
    return codes[:, 0::2] | codes[:, 1::2] << 4
