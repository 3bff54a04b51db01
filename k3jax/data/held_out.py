"""Held-out text as batches, and what general compressors make of the same text."""

import copy
import gzip
import lzma

import numpy as np

from k3jax.config_data import Packing, Stream
from k3jax.data.documents import Documents
from k3jax.data.packing import Batch, PackedRows, local_rows, padding, stack


class HeldOutBatches:
    """Held-out documents as batches of one shape: every position once, and padding at the end.

    `bytes` is the number of bytes predicted, so that bits per byte = (sum of weighted nats) / ln 2 / bytes; it is 0 for
    tasks, which are no text. Predicting EOS is charged as well: the sum is the length of a complete code for these
    documents. With `max_bytes`, only the first batches that reach that many bytes are kept, of a task those that reach
    that many positions, and `bytes` still counts what they predict. Best fit makes the rows of long documents first, so
    these come in a fixed random order.
    """

    def __init__(
        self, documents: Documents, *, length: int, batch: int, packing: Packing, max_bytes: int | None = None
    ):
        if batch < 1:
            raise ValueError(f"a batch needs at least one row, got {batch}")
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes must be at least 1, got {max_bytes}")
        self._source = PackedRows(documents, length, packing)
        order = np.arange(len(self._source))
        if not isinstance(packing, Stream):
            order = np.random.default_rng(0).permutation(order)
        sizes = self._source.plan.row_bytes()[order]
        reached = np.cumsum(sizes if sizes.any() else np.full(len(order), length))
        if max_bytes is not None and reached[-1] >= max_bytes:
            last = int(np.searchsorted(reached, max_bytes))
            order = order[: (last // batch + 1) * batch]
        self._order = order
        self.bytes = int(sizes[: len(order)].sum())
        self._batch, self._rows = batch, range(batch)

    def __len__(self) -> int:
        return -(-len(self._order) // self._batch)

    def local(self, index: int, count: int) -> "HeldOutBatches":
        """The same batches, but only the rows of process `index` of `count`; `bytes` stays that of all rows."""
        part = copy.copy(self)
        part._rows = local_rows(self._rows, index, count)
        return part

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(f"held-out batch {index} of {len(self)}")
        numbers = [index * self._batch + number for number in self._rows]
        blank = padding(self._source.length)
        return stack([self._source[self._order[n]] if n < len(self._order) else blank for n in numbers])


def compression_baselines(texts: list[bytes]) -> dict[str, dict[str, float]]:
    """Bits per byte of `gzip -9` and `xz -9e` on the same text: {"gzip": {"whole": .., "per_file": ..}, "xz": ..}.

    `whole` compresses all documents as one stream; `per_file` compresses each alone and divides all their bits by all
    their bytes.
    """
    compressors = {
        "gzip": lambda data: gzip.compress(data, compresslevel=9, mtime=0),
        "xz": _xz,
    }
    whole = b"".join(texts)
    scale = 8.0 / len(whole)
    return {
        name: {
            "whole": scale * len(compress(whole)),
            "per_file": scale * sum(len(compress(text)) for text in texts),
        }
        for name, compress in compressors.items()
    }


def _xz(data: bytes) -> bytes:
    """As `xz -9e`, with a dictionary no larger than the text: the same size, without clearing 64 MiB for each file."""
    settings = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": max(4096, len(data))}
    return lzma.compress(data, format=lzma.FORMAT_XZ, filters=[settings])
