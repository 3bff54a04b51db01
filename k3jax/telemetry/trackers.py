"""Trackers beside the JSON lines, chosen by name: TensorBoard, Weights & Biases, Trackio, MLflow.

All work offline and write into the run's folder, unless their own environment variables (WANDB_MODE, TRACKIO_DIR,
TRACKIO_SPACE_ID, MLFLOW_TRACKING_URI) say otherwise.

    tensorboard   RUN/tensorboard    tensorboard --logdir RUN
    wandb         RUN/wandb          wandb sync RUN/wandb/offline-run-*
    trackio       RUN/trackio        TRACKIO_DIR=RUN/trackio trackio show
    mlflow        RUN/mlflow.db      mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db
"""

import importlib.util
import json
import os
import pathlib
import time
import uuid
from typing import Any, Protocol

from k3jax.config import ConfigError

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}
PROJECT = "k3jax"


class Tracker(Protocol):
    def write(self, step: int, scalars: dict[str, float]) -> None: ...

    def close(self) -> None: ...


def parse(text: str) -> tuple[str, ...]:
    """Names from a flag such as ``tensorboard,wandb``; the empty text is none.

    Raises:
      ConfigError: a name that is none of them, given twice, or whose package is not installed, with the command that
        installs it.
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in PACKAGES:
            raise ConfigError(f"--log={text}: there is no tracker {name!r}; there are {', '.join(PACKAGES)}")
        if names.count(name) > 1:
            raise ConfigError(f"--log={text}: {name} is named twice")
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise ConfigError(
                f"--log={text}: {name} needs a package that is not installed: pip install {PACKAGES[name]} "
                f"(requirements-optional.txt has the version that is tested)"
            )
    return names


def open_tracker(name: str, run: pathlib.Path, state: dict[str, Any], config: dict[str, Any]) -> Tracker:
    """Opens a tracker on the run that ``state`` names, or on a new one, which it then names there."""
    match name:
        case "tensorboard":
            return TensorBoard(run, config)
        case "wandb":
            return Wandb(run, state, config)
        case "trackio":
            return Trackio(run, config)
        case "mlflow":
            return MLflow(run, state, config)
    raise ValueError(f"there is no tracker {name!r}; there are {', '.join(PACKAGES)}")


def scalars(line: dict[str, Any]) -> dict[str, float]:
    """The numbers of a metrics line by name: ``train/grad_norm_by_role/heads``, ``train/balance/dead_share/07`` for the
    eighth MoE layer. Numbers that are not finite are left out, and so are depth weights, of which there are too many.
    """
    found = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                add(f"{name}/{key}", item)
        elif isinstance(value, list):
            for number, item in enumerate(value):
                add(f"{name}/{number:02d}", item)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found[name] = float(value)

    for key, value in line.items():
        if key not in ("step", "kind", "unix", "depth_weights"):
            add(f"{line['kind']}/{key}", value)
    return found


class TensorBoard:
    """Event files through tensorboardX."""

    def __init__(self, run: pathlib.Path, config: dict[str, Any]):
        from tensorboardX import SummaryWriter

        # A name of its own: two processes of a run within one second would write the same file.
        self._writer = SummaryWriter(str(run / "tensorboard"), filename_suffix=f".{uuid.uuid4().hex[:8]}")
        self._writer.add_text("config", f"```\n{json.dumps(config, indent=1)}\n```", 0)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases. Every process of a run has a folder of its own, and all have one run id."""

    def __init__(self, run: pathlib.Path, state: dict[str, Any], config: dict[str, Any]):
        import wandb

        state.setdefault("wandb", uuid.uuid4().hex[:8])
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.resolve().name,
            id=state["wandb"],
            resume="allow",
            dir=str(run),
            mode=os.environ.get("WANDB_MODE", "offline"),
            config=config,
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )

    def write(self, step: int, scalars: dict[str, float]) -> None:
        self._run.log(scalars, step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """Trackio, in a local folder. The library reads the folder's name once in a process, when it is imported."""

    def __init__(self, run: pathlib.Path, config: dict[str, Any]):
        os.environ.setdefault("TRACKIO_DIR", str((run / "trackio").resolve()))
        import trackio

        self._run = trackio.init(
            project=PROJECT, name=run.resolve().name, resume="allow", config=config, embed=False,
            auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip

    def write(self, step: int, scalars: dict[str, float]) -> None:
        self._run.log(scalars, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """MLflow, in an SQLite file."""

    BATCH = 1000  # metrics that one call takes

    def __init__(self, run: pathlib.Path, state: dict[str, Any], config: dict[str, Any]):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        store = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{(run / 'mlflow.db').resolve()}")
        self._client = MlflowClient(tracking_uri=store)
        if "mlflow" not in state:
            experiment = self._client.get_experiment_by_name(PROJECT)
            number = experiment.experiment_id if experiment else self._client.create_experiment(PROJECT)
            state["mlflow"] = self._client.create_run(number, run_name=run.resolve().name).info.run_id
            for name, value in config.items():
                self._client.log_param(state["mlflow"], name, json.dumps(value)[:500])
        self._id = state["mlflow"]
        self._client.update_run(self._id, status="RUNNING")

    def write(self, step: int, scalars: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in scalars.items()]
        for start in range(0, len(metrics), self.BATCH):
            self._client.log_batch(self._id, metrics=metrics[start : start + self.BATCH], synchronous=True)

    def close(self) -> None:
        self._client.set_terminated(self._id)
