"""Documents in memory, for the tests of what is behind the sources."""

import numpy as np
import pytest

from k3jax.data.documents import TokenDocuments
from k3jax.data.text import Texts
from k3jax.data.tokenizers import ByteTokenizer

FILES = [
    ("a", b"alpha"),
    ("b", b"x"),
    ("c", b"a longer document that spans rows"),
    ("d", "é\n".encode()),
    ("e", b"12345678"),
]


@pytest.fixture(scope="session")
def make_documents():
    """Named byte strings as documents; five short ones by default."""

    def make(files=FILES) -> TokenDocuments:
        texts = Texts.join(list(files))
        ends = dict(bos=ByteTokenizer.bos, eos=ByteTokenizer.eos)
        return TokenDocuments("files", texts.data, texts.starts, np.diff(texts.starts), texts.names, **ends)

    return make


@pytest.fixture(scope="session")
def framed():
    """(input, target) of every position of a byte string, written one at a time."""

    def pairs(content: bytes) -> list[tuple[int, int]]:
        return list(zip([ByteTokenizer.bos, *content], [*content, ByteTokenizer.eos]))

    return pairs
