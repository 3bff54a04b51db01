"""Which rows make the batch of a step: a pure function of the seed and the step, on any number of hosts and workers.

Every source is shuffled on its own, again for each pass, and a mixture takes its rows from the sources in turn, evenly
in proportion to their weights. Row r of the run is therefore known without those before it, and so is the batch of
step n: rows n * batch to (n + 1) * batch.
"""

import copy
import hashlib
import sys
from collections.abc import Iterator

import grain
import numpy as np
from absl import flags

from k3jax.data.packing import Batch, PackedRows, PackingReport, local_rows, stack

_WEIGHT_STEPS = 2**30


class Interleave:
    """Row r of a mixture: from which source, and its how-maniest row.

    Among the first r rows, every source has its share of them up to the number of sources. Weights are rounded to
    2^-30 of their sum.
    """

    def __init__(self, weights: list[float]):
        total = sum(weights)
        self._weights = [max(1, round(weight / total * _WEIGHT_STEPS)) for weight in weights]

    def counts(self, rows: int) -> list[int]:
        """How many of the first `rows` rows come from each source."""
        counts, left, others = [], rows, sum(self._weights)
        for weight in self._weights:
            rest = left * (others - weight) // others  # grows by at most one when `left` does
            counts.append(left - rest)
            left, others = rest, others - weight
        return counts

    def __getitem__(self, row: int) -> tuple[int, int]:
        before, after = self.counts(row), self.counts(row + 1)
        source = next(i for i, count in enumerate(after) if count > before[i])
        return source, before[source]


class Batches:
    """Endless batches with random access: `batches[n]` is the batch of step n, which trains step n + 1 of a run.

    Resuming at step n is beginning at index n. Give every process its own rows with :meth:`local`; together they are
    the rows of the global batch, whatever the number of processes. `packing_report` has one entry for each source.
    """

    def __init__(self, rows: dict[str, PackedRows], weights: list[float], *, batch: int, seed: int):
        if batch < 1:
            raise ValueError(f"a batch needs at least one row, got {batch}")
        if not 0 <= seed < 2**32:
            raise ValueError(f"the data seed must lie in 0..2**32-1, got {seed}")
        self._names = list(rows)
        self._lengths = [len(source) for source in rows.values()]
        self._interleave = Interleave(weights)
        self._sources = [
            grain.MapDataset.source(source).shuffle(seed=_source_seed(seed, name, len(rows))).repeat()
            for name, source in rows.items()
        ]
        self._batch = batch
        self._rows = range(batch)
        self.packing_report: dict[str, PackingReport] = {name: source.plan.report for name, source in rows.items()}

    def __len__(self) -> int:
        return sys.maxsize // self._batch

    def __repr__(self) -> str:
        return f"Batches({', '.join(self._names)}; rows {self._rows.start}..{self._rows.stop - 1} of {self._batch})"

    def local(self, index: int, count: int) -> "Batches":
        """The same batches, but only the rows of process `index` of `count`: an equal run of each global batch."""
        part = copy.copy(self)
        part._rows = local_rows(self._rows, index, count)
        return part

    def __getitem__(self, step: int) -> Batch:
        step = int(step)
        if step < 0:
            raise IndexError(f"step {step} lies before the first batch")
        return stack([self._row(step * self._batch + number) for number in self._rows])

    def _row(self, number: int) -> Batch:
        source, index = self._interleave[number]
        return self._sources[source][index]

    def iterate(self, start: int, count: int | None = None, *, workers: int = 0, buffer: int = 8) -> Iterator[Batch]:
        """`count` batches from `start` on, or all, made ahead of time: `buffer` of them by a thread, or that many by
        each of `workers` processes. Order and content are those of indexing.

        Raises DataError while iterating, when data can no longer be read.
        """
        ahead = grain.MapDataset.source(self)[start : len(self) if count is None else start + count]
        if workers:
            if not flags.FLAGS.is_parsed():
                flags.FLAGS.mark_as_parsed()  # Grain asks for its flags, which only programs of absl have parsed
            in_worker = ahead.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
            processes = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=buffer)
            made = iter(in_worker.mp_prefetch(processes))
        else:
            made = iter(ahead.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=buffer)))
        try:
            for batch in made:
                # Copied, because what a worker made lies in shared memory that goes away with the worker.
                yield Batch(*(np.array(field) for field in batch)) if workers else batch
        finally:
            made.close()

    def position(self, step: int) -> dict:
        """Where the run stands before step `step`, in JSON types: rows used, passes over each source, rows of a pass.

        Nothing of it is needed to go on, the step is; a checkpoint that holds it shows whether the data changed.
        """
        sources = {}
        for name, length, used in zip(self._names, self._lengths, self._interleave.counts(step * self._batch)):
            sources[name] = {"rows": used, "epoch": used // length, "row": used % length, "rows_per_epoch": length}
        return {"step": step, "rows": step * self._batch, "sources": sources}


def _source_seed(seed: int, name: str, sources: int) -> int:
    """The seed of one source: the seed itself, or one of its own for each part of a mixture, whose order is then the
    same whatever the other parts are."""
    if sources == 1:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4).digest(), "big")
