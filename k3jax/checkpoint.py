"""Checkpoints of a run, on Orbax: the whole train state, the configuration that made it, and where the data stands.

A checkpoint appears under its step number when it is complete, in one rename. It carries a checksum of each of its
files, so that a file cut or changed afterwards is found before anything is read from it.
"""

import concurrent.futures
import contextlib
import json
import pathlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from absl import logging
from orbax.checkpoint import checkpoint_managers as policies

from k3jax import config_io, runtime
from k3jax.config import ConfigError
from k3jax.run_config import Keep, TrainConfig
from k3jax.step import TrainState, abstract_state

FOLDER = "checkpoints"
DAMAGED = "damaged"
DIGEST = "checksums.json"
BLOCK = 1 << 22
# Orbax notes the time of the commit here after the checksums are taken.
UNCHECKED = {"_CHECKPOINT_METADATA", DIGEST}

FREE_FIELDS = frozenset(
    ("sample_prompt", "sample_tokens", "log_every", "eval_every", "eval_bytes", "checkpoint_every", "keep")
)


class CheckpointError(RuntimeError):
    """A checkpoint that is missing, damaged, or made by another configuration; the message names it."""


class StorageError(CheckpointError):
    """A checkpoint that could not be written; those from before are untouched."""


class Restored(NamedTuple):
    """A state, the step it stands at, where its data stood, and what was passed over to get to it, if anything."""

    state: TrainState
    step: int
    position: dict[str, Any]
    passed_over: tuple[str, ...]


class Checkpoints:
    """The checkpoints of one run folder. Saving is asynchronous and atomic: a step appears when it is complete.

    With ``create=False`` the folder is only read, beside a training process or without one, and must be there already;
    otherwise CheckpointError is raised.
    """

    def __init__(self, run: pathlib.Path, *, keep: Keep | None = None, create: bool = True):
        self.folder = pathlib.Path(run).absolute() / FOLDER
        self._bits: dict[int, float] = {}
        if not create and not self.folder.is_dir():
            raise CheckpointError(f"{run} is not the folder of a run: there is no folder {self.folder}")
        self._saving: int | None = None
        options = ocp.CheckpointManagerOptions(
            create=create,
            cleanup_tmp_directories=create,
            preservation_policy=None if keep is None else _policy(keep, self._bits),
            async_options=ocp.AsyncOptions(post_finalization_callback=self._write_checksums) if create else None,
            enable_async_checkpointing=create,
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options)
        if keep is not None and keep.best:
            self._bits |= self._known_bits()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, *_) -> None:
        try:
            self._manager.close()
        except Exception as error:
            if kind is None:
                raise self._not_written(error) from error

    def steps(self) -> list[int]:
        """The complete steps, oldest first."""
        return sorted(self._manager.all_steps())

    def latest(self) -> int | None:
        """The last complete step, or None."""
        return max(self.steps(), default=None)

    def path(self, step: int | None) -> str:
        """Where a step lies, for messages."""
        return "none yet" if step is None else str(self.folder / str(step))

    def save(
        self, config: TrainConfig, state: TrainState, position: dict[str, Any], *, bits_per_byte: float | None = None
    ) -> None:
        """Starts to save ``state``; the arrays may be donated as soon as this returns.

        Args:
          position: where the data stands, in JSON types.
          bits_per_byte: held-out result of exactly this state, by which the best checkpoints are kept.

        Raises:
          StorageError: this or the save before could not be written.
        """
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(_storable(state)),
            config=ocp.args.JsonSave(config_io.to_dict(config)),
            position=ocp.args.JsonSave(
                {**position, "step": step, "commit": runtime.commit(), "bits_per_byte": bits_per_byte}
            ),
        )
        self.wait()
        self._saving = step
        if bits_per_byte is not None:
            self._bits[step] = bits_per_byte
        try:
            self._manager.save(step, args=args)
        except Exception as error:
            raise self._not_written(error) from error

    def wait(self) -> None:
        """Returns when everything saved is on disk.

        Raises:
          StorageError: it could not be written.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._not_written(error) from error

    def restore(
        self, config: TrainConfig, *, allow: Sequence[str] = (), shardings: TrainState | None = None
    ) -> Restored:
        """The newest good state, for a run with this configuration. Damaged checkpoints after it are set aside, into
        a folder of their own beside it.

        Args:
          allow: dotted paths of configuration fields that may have changed, or of what contains them.
          shardings: where every array goes; by default where one device holds all.

        Raises:
          CheckpointError: there is none, none can be read, or the configuration differs; the message says which.
        """
        self._existing(None)
        problems: dict[int, str] = {}
        for step in reversed(self.steps()):
            problem = self._problem(step)
            if problem is None:
                refuse_changes(self.config(step), config, allow=allow, where=self.path(step))
                if step > config.steps:
                    raise CheckpointError(f"{self.path(step)} is past the end of a run of {config.steps} steps")
                state = self._read(step, config, shardings)
                position = self._json(step, "position")
                self._set_aside(problems)
                return Restored(state, step, position, tuple(problems.values()))
            problems[step] = problem
        raise CheckpointError("no checkpoint of the run is whole:\n" + "\n".join(problems.values()))

    def load(self, step: int | None = None, *, shardings: TrainState | None = None) -> tuple[TrainConfig, TrainState]:
        """The configuration and the state of a checkpoint, by default of the newest.

        Raises:
          CheckpointError: there is none, or it is damaged; the message names the others.
        """
        step = self._existing(step)
        problem = self._problem(step)
        if problem is not None:
            raise CheckpointError(f"{problem}{self._others(step)}")
        config = self.config(step)
        return config, self._read(step, config, shardings)

    def config(self, step: int) -> TrainConfig:
        """The configuration stored with a step."""
        try:
            return config_io.from_dict(TrainConfig, self._json(step, "config"))
        except ConfigError as error:
            raise CheckpointError(f"{self.path(step)}: its configuration cannot be read: {error}") from error

    def position(self, step: int) -> dict[str, Any]:
        """Where the data stood when a step was saved."""
        return self._json(step, "position")

    def _json(self, step: int, item: str) -> dict[str, Any]:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**{item: ocp.args.JsonRestore()}))[item]
        except (OSError, ValueError, KeyError, TypeError) as error:
            message = f"{self.path(step)}: its {item} cannot be read: {_first_line(error)}{self._others(step)}"
            raise CheckpointError(message) from error

    def _known_bits(self) -> dict[int, float]:
        """Held-out bits per byte of the checkpoints there are, where they were evaluated and can be read."""
        found = {}
        for step in self.steps():
            with contextlib.suppress(CheckpointError):
                found[step] = self._json(step, "position").get("bits_per_byte")
        return {step: bits for step, bits in found.items() if isinstance(bits, float)}

    def _existing(self, step: int | None) -> int:
        steps = self.steps()
        if not steps:
            raise CheckpointError(f"{self.folder} holds no complete checkpoint")
        if step is not None and step not in steps:
            raise CheckpointError(f"{self.folder} has no step {step}; it has {steps}")
        return steps[-1] if step is None else step

    def _others(self, step: int) -> str:
        """Which checkpoints are left when that of ``step`` is no good."""
        others = [other for other in self.steps() if other != step]
        return f"; the checkpoints of steps {others} are left" if others else "; there is no other checkpoint"

    def _problem(self, step: int) -> str | None:
        """What is wrong with the files of a step, found on one host and told to all."""
        problem = check_files(self.folder / str(step)) if jax.process_index() == 0 else None
        # Reading an item is a step that all processes take together.
        return runtime.from_first_process(problem) or self._check_step(step)

    def _check_step(self, step: int) -> str | None:
        """What is wrong with what a checkpoint says of itself, or None."""
        try:
            said = self._json(step, "position").get("step")
        except CheckpointError as error:
            return str(error)
        return None if said == step else f"{self.path(step)} is damaged: it holds step {said}"

    def _set_aside(self, problems: dict[int, str]) -> None:
        """Moves damaged checkpoints away, so that their steps can be saved again."""
        for step, problem in problems.items():
            logging.warning("%s", problem)
            if jax.process_index() == 0:
                target = self.folder.parent / DAMAGED
                target.mkdir(exist_ok=True)
                free = next(name for n in range(1000) if not (name := target / f"{step}.{n}").exists())
                (self.folder / str(step)).rename(free)
        if problems:
            runtime.barrier("damaged checkpoints are set aside")
            self._manager.reload()

    def _read(self, step: int, config: TrainConfig, shardings: TrainState | None) -> TrainState:
        target = abstract_state(config)
        if shardings is None:  # else Orbax would bring back the mesh that the run had
            here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            shardings = jax.tree.map(lambda _: here, target)
        target = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), target, shardings)
        try:
            args = ocp.args.Composite(state=ocp.args.StandardRestore(_storable(target)))
            restored = self._manager.restore(step, args=args)["state"]
        except Exception as error:
            raise CheckpointError(
                f"{self.path(step)} cannot be read: {_first_line(error)}{self._others(step)}"
            ) from error
        return jax.tree.unflatten(jax.tree.structure(target), [restored[name] for name in _storable(target)])

    def _write_checksums(self) -> None:
        """Into the folder that is about to be renamed: every file is complete, and nobody sees it yet."""
        if jax.process_index() == 0:
            (folder,) = self.folder.glob(f"{self._saving}.orbax-checkpoint-tmp*")
            (folder / DIGEST).write_text(json.dumps(checksums(folder), indent=1), encoding="utf-8")

    def _not_written(self, error: Exception) -> StorageError:
        """What to say of a save that failed, once the listing shows which checkpoints are there."""
        self._manager.reload()
        return StorageError(
            f"{self.path(self._saving)} could not be written: {_first_line(error)}; "
            f"last good checkpoint: {self.path(self.latest())}"
        )


def refuse_changes(saved: TrainConfig, config: TrainConfig, *, allow: Sequence[str], where: str) -> None:
    """Raises CheckpointError when ``config`` differs from ``saved`` in more than what changes no weight, and ``allow``.

    A path in ``allow`` covers the fields below it; :func:`check_paths` says whether it leads to any.
    """
    changed = config_io.diff(saved, config)
    covered = (*FREE_FIELDS, *allow)
    refused = {
        path: pair
        for path, pair in changed.items()
        if not any(path == allowed or path.startswith(f"{allowed}.") for allowed in covered)
    }
    if refused:
        lines = "".join(f"\n  {path} was {old!r} and is now {new!r}" for path, (old, new) in refused.items())
        flags = " ".join(f"--allow_change={path}" for path in refused)
        raise CheckpointError(f"{where} was made by another configuration:{lines}\nto go on all the same: {flags}")


def check_paths(config: TrainConfig, allow: Sequence[str]) -> None:
    """Raises ConfigError for a path that leads to no field."""
    known = set(_paths(config_io.to_dict(config), ""))
    for path in allow:
        if path not in known:
            raise ConfigError(
                f"--allow_change={path}: the configuration has no such field{config_io.did_you_mean(path, known)}"
            )


def _paths(tree: dict[str, Any], above: str) -> Iterator[str]:
    for name, value in tree.items():
        yield f"{above}{name}"
        if isinstance(value, dict):
            yield from _paths(value, f"{above}{name}.")


def checksums(folder: pathlib.Path) -> dict[str, list[int]]:
    """{relative path: [bytes, CRC-32]} of every file below a checkpoint's folder."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in UNCHECKED]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        sums = pool.map(_checksum, paths)
        return {path.relative_to(folder).as_posix(): found for path, found in zip(paths, sums)}


def check_files(folder: pathlib.Path) -> str | None:
    """What is wrong with the files of a checkpoint, or None."""
    try:
        expected = json.loads((folder / DIGEST).read_text(encoding="utf-8"))
        found = checksums(folder)
    except (OSError, ValueError) as error:
        return f"{folder} is damaged: {DIGEST} cannot be read: {error}"
    if not expected or not isinstance(expected, dict):
        return f"{folder} is damaged: {DIGEST} lists no file"
    if not all(isinstance(entry, list) and [*map(type, entry)] == [int, int] for entry in expected.values()):
        return f"{folder} is damaged: {DIGEST} must give two numbers for each file"
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            return f"{folder} is damaged: {name} is missing"
        if name in expected and expected[name][0] != found[name][0]:
            return f"{folder} is damaged: {name} has {found[name][0]:,} bytes instead of {expected[name][0]:,}"
        if name in expected and expected[name] != found[name]:
            return f"{folder} is damaged: the checksum of {name} is wrong"
    return None


def _checksum(path: pathlib.Path) -> list[int]:
    size = crc = 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return [size, crc]


class _Best:
    """Keeps the steps with the fewest bits per byte, of those that have been evaluated."""

    def __init__(self, count: int, bits: dict[int, float]):
        self._count, self._bits = count, bits

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        steps = [info.step for info in checkpoints if info.step in self._bits]
        best = set(sorted(steps, key=lambda step: self._bits[step])[: self._count])
        return [info.step in best for info in checkpoints]


def _policy(keep: Keep, bits: dict[int, float]) -> policies.PreservationPolicy:
    wanted: list[policies.PreservationPolicy] = [policies.LatestN(keep.last)]
    if keep.every is not None:
        wanted.append(policies.EveryNSteps(keep.every))
    if keep.best:
        wanted.append(_Best(keep.best, bits))
    return policies.AnyPreservationPolicy(wanted)


def _storable(state: TrainState) -> dict[str, jax.Array | jax.ShapeDtypeStruct]:
    """One flat entry per array, named by its path: readable without this package, and free of container types."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _first_line(error: Exception) -> str:
    """What an error says, without the storage library's dump of its settings."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
