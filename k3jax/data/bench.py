"""How fast batches are made from token records, and how long a run takes to start in the middle.

    python -m k3jax.data.bench
    python -m k3jax.data.bench --records tokens --length 65536 --batch 1

Without records the standard library is tokenized as bytes into a temporary folder first. Rates are tokens (padding
left out) per second of wall-clock time, and per second of processor time of all processes of the run, which tells what
a machine of one's own would do when others use this one.
"""

import contextlib
import itertools
import json
import pathlib
import tempfile
import time
from collections.abc import Iterator

import psutil
from absl import app, flags

from k3jax import config_data as c
from k3jax.data.load import load_data
from k3jax.data.make_records import make_records
from k3jax.data.order import Batches
from k3jax.data.records import read_manifest

START = 100_000


@contextlib.contextmanager
def records(folder: str | None) -> Iterator[str]:
    """The folder given, or a temporary one with the standard library as byte tokens."""
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory() as made:
        make_records(c.StdlibCorpus(), c.Bytes(), pathlib.Path(made, "tokens"), workers=2)
        yield str(pathlib.Path(made, "tokens"))


def open_batches(folder: str, length: int, batch: int, packing: c.Packing) -> tuple[Batches, float]:
    """The batches of a folder, and the seconds from nothing to the batch of step START."""
    began = time.perf_counter()
    data = load_data(c.TokenRecords(path=folder), vocab=2**30)
    batches = data.batches(length=length, batch=batch, seed=0, packing=packing)
    batches[START]
    return batches, time.perf_counter() - began


def rate(batches: Batches, count: int, workers: int) -> dict:
    """Tokens per second over `count` batches after the first, by when worker processes have started."""
    made = batches.iterate(START, workers=workers)
    next(made)
    used, began = processor_seconds(), time.perf_counter()
    tokens = sum(int((batch.segments_BT >= 0).sum()) for batch in itertools.islice(made, count))
    wall, used = time.perf_counter() - began, processor_seconds() - used
    made.close()
    return {
        "workers": workers,
        "tokens": tokens,
        "tokens_per_second": round(tokens / wall),
        "tokens_per_processor_second": round(tokens / used),
    }


def processor_seconds() -> float:
    """Of this process and those that it started."""
    here = psutil.Process()
    times = [process.cpu_times() for process in [here, *here.children(recursive=True)]]
    return sum(spent.user + spent.system for spent in times)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"{argv[1]!r} belongs to no flag")
    args = flags.FLAGS
    with records(args.records) as folder:
        split = read_manifest(folder)["splits"]["train"]
        disk = sum(shard["size"] for shard in split["shards"])
        packing = {"stream": c.Stream(), "best_fit": c.BestFit()}[args.packing]
        batches, seconds = open_batches(folder, args.length, args.batch, packing)
        batch = batches[START]
        (report,) = batches.packing_report.values()
        shown = {
            "documents": split["documents"],
            "bytes_of_text_per_token": round(split["bytes"] / split["tokens"], 3),
            "bytes_on_disk_per_token": round(disk / split["tokens"], 3),
            "bytes_in_memory_per_token": sum(field.nbytes for field in batch) / batch.tokens_BT.size,
            "packing": {**report._asdict(), "padding": round(report.padding, 6)},
            "seconds_to_step_100000": round(seconds, 3),
        }
        print(json.dumps(shown, indent=1))
        for workers in args.workers:
            print(json.dumps(rate(batches, args.batches, int(workers))))


if __name__ == "__main__":
    flags.DEFINE_string("records", None, "a folder that k3jax.tokenize made with bytes; default: the standard library")
    flags.DEFINE_integer("length", 8192, "tokens of a row", lower_bound=1)
    flags.DEFINE_integer("batch", 8, "rows of a batch", lower_bound=1)
    flags.DEFINE_enum("packing", "best_fit", ["best_fit", "stream"], "how documents become rows")
    flags.DEFINE_list("workers", ["0", "1", "2"], "numbers of worker processes to try; 0 is a thread")
    flags.DEFINE_integer("batches", 200, "batches to time", lower_bound=1)
    app.run(main)
