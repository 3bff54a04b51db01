"""Checkpoints of a run, on Orbax: the whole train state and the configuration that made it."""

import json
import pathlib

import jax
import orbax.checkpoint as ocp

from k3jax import config_io
from k3jax.config import ConfigError
from k3jax.run_config import TrainConfig
from k3jax.step import TrainState, abstract_state

FOLDER = "checkpoints"


class CheckpointError(RuntimeError):
    """A checkpoint that is missing, damaged, or made by another configuration; the message names it."""


class Checkpoints:
    """The checkpoints of one run folder. Saving is asynchronous and atomic: a step appears when it is complete.

    With ``create=False`` the folder must be there already, or CheckpointError is raised: reading leaves no trace.
    """

    def __init__(self, run: pathlib.Path, *, keep: int | None = 2, create: bool = True):
        self.folder = pathlib.Path(run).absolute() / FOLDER
        if not create and not self.folder.is_dir():
            raise CheckpointError(f"{run} is not the folder of a run: there is no folder {self.folder}")
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=create)
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_) -> None:
        self._manager.close()

    def latest(self) -> int | None:
        """The last complete step, or None."""
        return self._manager.latest_step()

    def path(self, step: int | None) -> str:
        """Where a step lies, for messages."""
        return "none yet" if step is None else str(self.folder / str(step))

    def save(self, config: TrainConfig, state: TrainState) -> None:
        """Starts to save ``state``; the arrays may be donated as soon as this returns."""
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(_storable(state)), config=ocp.args.JsonSave(config_io.to_dict(config))
        )
        self._manager.save(step, args=args)

    def wait(self) -> None:
        """Returns when everything saved is on disk."""
        self._manager.wait_until_finished()

    def restore(self, config: TrainConfig, step: int | None = None) -> TrainState:
        """The state at ``step`` (the latest by default), for a run with this configuration.

        Raises:
          CheckpointError: there is none, it cannot be read, or its configuration differs; the message says which.
        """
        step = self._existing(step)
        saved = self.config(step)
        changed = {path: pair for path, pair in config_io.diff(saved, config).items() if path != "sample_prompt"}
        if changed:
            listing = "; ".join(f"{path} was {old!r} and is now {new!r}" for path, (old, new) in changed.items())
            raise CheckpointError(f"{self.path(step)} was made by another configuration: {listing}")
        return self._read(step, config)

    def load(self, step: int | None = None) -> tuple[TrainConfig, TrainState]:
        """The configuration and the state of a checkpoint.

        Raises:
          CheckpointError: as for :meth:`restore`.
        """
        step = self._existing(step)
        config = self.config(step)
        return config, self._read(step, config)

    def config(self, step: int) -> TrainConfig:
        """The configuration stored with a step."""
        try:
            restored = self._manager.restore(step, args=ocp.args.Composite(config=ocp.args.JsonRestore()))
            return config_io.from_dict(TrainConfig, restored["config"])
        except (OSError, ValueError, KeyError, TypeError, json.JSONDecodeError, ConfigError) as error:
            raise CheckpointError(
                f"{self.path(step)}: its configuration cannot be read: {error}{self._others(step)}"
            ) from error

    def _existing(self, step: int | None) -> int:
        steps = sorted(self._manager.all_steps())
        if not steps:
            raise CheckpointError(f"{self.folder} holds no complete checkpoint")
        if step is not None and step not in steps:
            raise CheckpointError(f"{self.folder} has no step {step}; it has {steps}")
        return steps[-1] if step is None else step

    def _others(self, step: int) -> str:
        """Which checkpoints are left when that of ``step`` is no good."""
        others = sorted(set(self._manager.all_steps()) - {step})
        return f"; remove that folder to go on from step {others[-1]}" if others else "; there is no other checkpoint"

    def _read(self, step: int, config: TrainConfig) -> TrainState:
        target = abstract_state(config)
        try:
            args = ocp.args.Composite(state=ocp.args.StandardRestore(_storable(target)))
            restored = self._manager.restore(step, args=args)["state"]
        except Exception as error:
            raise CheckpointError(
                f"{self.path(step)} is damaged or incomplete: {_first_line(error)}{self._others(step)}"
            ) from error
        return jax.tree.unflatten(jax.tree.structure(target), [restored[name] for name in _storable(target)])


def _storable(state: TrainState) -> dict[str, jax.Array | jax.ShapeDtypeStruct]:
    """One flat entry per array, named by its path: readable without this package, and free of container types."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _first_line(error: Exception) -> str:
    """What an error says, without the storage library's dump of its settings."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
