"""What tests of kernels share: how two results are compared, which sizes to try, and inputs that have broken kernels.

Sizes and inputs follow public bug reports of delta-rule kernels on several accelerators.
"""

import numpy as np

# One token, one less, equal and one more than a block of 16 and a chunk of 64, and lengths that divide by nothing.
ODD_LENGTHS = (1, 15, 16, 63, 64, 65, 127, 1000)

GATES = ("spread", "bound", "weak", "none")
KEYS = ("random", "cosine 0.9", "identical", "alternating")
BETAS = ("random", "zero", "half", "one")


def relative_error(actual, expected, size: float = 0.0) -> float:
    """Norm of the difference over the norm of the expected array, in float64; infinite if anything is not finite.

    size: divides in place of a norm that is smaller, for sums whose terms cancel.
    """
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    if actual.shape != expected.shape:
        raise ValueError(f"shapes differ: {actual.shape} and {expected.shape}")
    if not np.all(np.isfinite(actual)):
        return float("inf")
    return float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), size, 1e-30))


def assert_close(actual: dict, expected: dict, tolerance: float | dict, sizes: dict | None = None):
    """Every array of a result within its relative error; the message lists them all.

    tolerance: one number, or a number by name with the rest under "default". sizes: `relative_error`'s, by name.
    """
    assert actual.keys() == expected.keys(), f"{sorted(actual)} and {sorted(expected)}"
    limit = tolerance if isinstance(tolerance, dict) else {"default": tolerance}
    errors = {name: relative_error(actual[name], expected[name], (sizes or {}).get(name, 0.0)) for name in actual}
    late = [name for name, error in errors.items() if error > limit.get(name, limit["default"])]
    report = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    assert not late, f"{late} beyond {tolerance}: {report}"


def raw_gate(kind: str, shape, rng) -> np.ndarray:
    """Argument z of the bounded gate -5 * sigmoid(z) for log-decays of a kind.

    spread: uniform in (-5, 0); bound: -4.99; weak: -1e-3; none: exactly 0 in float32.
    """
    match kind:
        case "spread":
            return _logit(rng.uniform(1e-6, 1 - 1e-6, shape))
        case "bound":
            return np.full(shape, _logit(4.99 / 5))
        case "weak":
            return np.full(shape, _logit(1e-3 / 5))
        case "none":
            return np.full(shape, -200.0)
    raise ValueError(f"unknown gates {kind!r}; known: {GATES}")


def raw_keys(kind: str, shape, rng) -> np.ndarray:
    """Keys [B, T, H, K], not normalized, whose directions are of a kind."""
    common, own = rng.standard_normal((shape[0], 1, *shape[2:])), rng.standard_normal(shape)
    match kind:
        case "random":
            return own
        case "cosine 0.9":
            return 3 * common + own
        case "identical":
            return np.broadcast_to(common, shape).copy()
        case "alternating":
            return common * np.where(np.arange(shape[1]) % 2, -1.0, 1.0)[:, None, None]
    raise ValueError(f"unknown keys {kind!r}; known: {KEYS}")


def raw_beta(kind: str, shape, rng) -> np.ndarray:
    """Logits whose sigmoid is spread, exactly 0, 0.5 or exactly 1."""
    match kind:
        case "random":
            return rng.standard_normal(shape)
        case "zero" | "half" | "one":
            return np.full(shape, {"zero": -200.0, "half": 0.0, "one": 200.0}[kind])
    raise ValueError(f"unknown betas {kind!r}; known: {BETAS}")


def packed_segment_ids(lengths, *, padding_before=0, padding_after=0) -> np.ndarray:
    """Segment ids [T] of documents of these lengths, zero allowed, between padding."""
    ids = np.repeat(np.arange(len(lengths)), lengths)
    return np.pad(ids, (padding_before, padding_after), constant_values=-1).astype(np.int32)


def _logit(p):
    return np.log(p / (1 - p))
