"""The smallest model with both kinds of attention and experts."""

import pytest

from k3jax import config as c


@pytest.fixture(scope="session")
def model(micro_model) -> c.ModelConfig:
    """Two layers: KDA with a dense part, MLA with experts."""
    return c.replace(micro_model, layers=2, full_attention=(2,))
