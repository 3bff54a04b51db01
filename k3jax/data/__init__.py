"""Sources to batches, on the host: NumPy and Grain, and never JAX, so that worker processes leave the devices alone.

In the order in which text becomes a batch: `text` (files to named documents, split), `tokenizers`, `documents` (what
every source becomes), `tasks` (documents that are made up), `records` (token ids on disk), `packing` (documents into
rows), `order` (rows into batches by seed and step), `held_out`, and `load`, which puts them together.
"""

from k3jax.data.documents import DataError, Document, Documents
from k3jax.data.packing import Batch, PackingReport
from k3jax.data.tokenizers import ByteTokenizer

__all__ = ["Batch", "ByteTokenizer", "DataError", "Document", "Documents", "PackingReport"]
