"""Tokenizes text once, in parallel, for runs that read token ids from then on.

    python -m k3jax.tokenize --out tokens --source "JsonLines(path='text/*.jsonl')"
    python -m k3jax.tokenize --out tokens --source "Parquet(path='text/*.parquet', column='body')" \
        --tokenizer "TiktokenRanks(path='tiktoken.model')"
    python -m k3jax.tokenize --out tokens --config runs/mine/config.json

A run then reads it with ``--set "data=TokenRecords(path='tokens')"`` and the same tokenizer.
"""

import dataclasses
import os
import pathlib
import sys

from absl import app, flags
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from k3jax import config_data as c
from k3jax import config_io
from k3jax.config import ConfigError
from k3jax.data.documents import DataError
from k3jax.data.make_records import SHARD_BYTES, make_records
from k3jax.exits import Exit
from k3jax.run_folder import BusyError


@dataclasses.dataclass(frozen=True)
class Job:
    """What to tokenize, and how."""

    source: c.TextSource
    tokenizer: c.Tokenizer


def read_job(config: str | None, source: str | None, tokenizer: str | None) -> Job:
    """The source and the tokenizer of a run's configuration, or of the defaults, with what the flags replace.

    Raises ConfigError: not such a setting, or a source that is no text.
    """
    job = Job(c.StdlibCorpus(), c.Bytes())
    if config is not None:
        from k3jax import presets  # models and optimizers are only needed to read a whole run

        run = presets.load(config)
        if not isinstance(run.data, c.TextSource):
            raise ConfigError(f"data of {config} is a {type(run.data).__name__}, but only text can be tokenized")
        job = Job(run.data, run.tokenizer)
    given = {"source": source, "tokenizer": tokenizer}
    return config_io.override(job, [f"{name}={text}" for name, text in given.items() if text is not None])


def tokenize(job: Job, out: pathlib.Path, *, workers: int, shard_bytes: int, quiet: bool = False) -> dict:
    """`make_records` with a progress bar on a terminal. Returns the manifest."""
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=quiet or not sys.stderr.isatty()) as bar:
        task = bar.add_task("reading", total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, description="tokenizing", completed=done, total=total)

        return make_records(job.source, job.tokenizer, out, workers=workers, shard_bytes=shard_bytes, progress=show)


def describe(manifest: dict, out: pathlib.Path) -> str:
    """A line for each split."""
    lines = []
    for name, split in manifest["splits"].items():
        size = sum(entry["size"] for entry in split["shards"])
        lines.append(
            f"{name}: {split['documents']:,} documents, {split['bytes']:,} bytes of text, {split['tokens']:,} tokens "
            f"({split['bytes'] / max(split['tokens'], 1):.2f} bytes a token), {size:,} bytes on disk "
            f"({size / max(split['tokens'], 1):.2f} a token), {len(split['shards'])} shards"
        )
    skipped = f"{manifest['skipped']} documents were not UTF-8 and left out\n" if manifest["skipped"] else ""
    return "\n".join(lines) + f"\n{skipped}{out}"


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"{argv[1]!r} belongs to no flag")
    args = flags.FLAGS
    try:
        job = read_job(args.config, args.source, args.tokenizer)
        out = pathlib.Path(args.out)
        manifest = tokenize(job, out, workers=args.workers, shard_bytes=int(args.shard_mib * 2**20))
    except (ConfigError, DataError, BusyError, OSError) as error:
        print(f"k3jax.tokenize: {error}", file=sys.stderr)
        codes = {ConfigError: Exit.CONFIGURATION, DataError: Exit.DATA, BusyError: Exit.BUSY}
        code = codes.get(type(error), Exit.STORAGE)
        raise SystemExit(int(code)) from error
    print(describe(manifest, out))


if __name__ == "__main__":
    flags.DEFINE_string("out", None, "the folder to make", required=True)
    flags.DEFINE_string("config", None, "a preset, or a run's config.json, whose data and tokenizer are taken")
    flags.DEFINE_string("source", None, "what to read, such as \"TextFolder(path='text')\"")
    flags.DEFINE_string("tokenizer", None, "what to read it with, such as \"TiktokenRanks(path='tiktoken.model')\"")
    flags.DEFINE_integer("workers", os.cpu_count(), "processes that tokenize", lower_bound=1)
    flags.DEFINE_float("shard_mib", SHARD_BYTES / 2**20, "text of a shard in MiB, at least", lower_bound=1e-6)
    app.run(main)
