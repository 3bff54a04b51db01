"""A run as one JSON file: what to run, on which devices, from which installation, and where it reads and writes.

JSON and not Python: a spec is data that other programs write (`launch.from_plan`) and that is read on a machine which
must not execute it. Fields with a default may be left out; a field that does not exist is refused with those that do.
What is learned, and how, is in the configuration that a spec names, and nowhere in a spec.
"""

from dataclasses import dataclass
from pathlib import Path

from jax.sharding import AbstractMesh

from experiments import run as study_runs
from experiments import study as studies
from k3jax import config_io, layouts, placement, presets, sharding
from k3jax.config import ConfigError, require, require_positive
from k3jax.run_config import TrainConfig
from launch import storage, values
from launch.machines import Machines, machines

RENDERED = dict.fromkeys(
    ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_LOCAL_DEVICE_IDS", "JAX_PLATFORMS"),
    "that is rendered for every process",
)
LABELS = {"app": "that is k3jax, by which its Pods are found"}
SIMULATED = "--xla_force_host_platform_device_count"


@dataclass(frozen=True)
class Train:
    """One training run. config: a preset, or a JSON file by its path from the repository's root."""

    config: str


@dataclass(frozen=True)
class Preflight:
    """The checks before a training run, and no training: of the same configuration, on the same hosts. run: the name of
    that run, after which its storage is called where it has names."""

    config: str
    run: str = ""

    def __post_init__(self):
        values.check_form(self, values.RUN, "run")


@dataclass(frozen=True)
class Study:
    """The runs of a study, one after the other. name: of the study, or its beginning; rung: one of its sizes, or all
    that are run and not only planned."""

    name: str
    rung: str = ""


@dataclass(frozen=True)
class Slurm:
    """What a Slurm cluster is asked for. time: its limit for one start (``1-00:00:00``); options: further lines for
    ``#SBATCH``, such as ``--constraint=h200``."""

    partition: str = ""
    account: str = ""
    time: str = ""
    options: tuple[str, ...] = ()

    def __post_init__(self):
        values.check_form(self, values.WORD, "partition", "account")
        values.check_form(self, values.SLURM_TIME, "time")
        values.check_form(self, values.OPTION, "options")


@dataclass(frozen=True)
class Kubernetes:
    """The cluster of GKE and xpk. service_account: the Kubernetes one whose identity may read and write the buckets.
    accelerator: GKE's name of the GPU where a chip has several (``nvidia-h100-mega-80gb``)."""

    project: str = ""
    location: str = ""
    cluster: str = ""
    namespace: str = "default"
    service_account: str = ""
    accelerator: str = ""

    def __post_init__(self):
        values.check_form(self, values.WORD, "project", "location", "cluster")
        values.check_form(self, values.PART, "namespace")
        values.check_form(self, values.DOMAIN, "service_account")
        values.check_form(self, values.NODE_LABEL, "accelerator")


@dataclass(frozen=True)
class SkyPilot:
    """infra: where SkyPilot may look, as cloud/region/zone; empty is everywhere."""

    infra: str = ""

    def __post_init__(self):
        values.check_form(self, values.WORD, "infra")


@dataclass(frozen=True)
class RunSpec:
    """One run on one set of machines.

    Attributes:
      name: lower-case letters, digits and dashes; the run folder is ``runs/name``.
      job: what runs.
      topology: of one slice or of all GPUs, as in `k3jax.plan` (``v5p:4x4x8``, ``h200:4x8``); ``cpu:2x4`` is two
        processes with four simulated devices each.
      hosts: machines in all, one process on each.
      devices_per_host: devices of a machine as JAX counts them: two on a chip of tpu7x.
      layout: a name of `k3jax.layouts`, or ``axis=size,...``.
      runs: the folder of run folders: a POSIX path, ``gs://bucket/folder``, ``s3://bucket/folder``, or
        ``pvc://claim/folder`` of a Kubernetes volume claim.
      data: a folder that `k3jax.tokenize` wrote, in the same forms; empty is what the configuration says.
      slices: TPU slices of that topology, between which there is only the data-center network.
      image: container image with this repository in /k3jax (`launch/docker`).
      setup: shell lines before the command, on every host: what makes the environment where there is no image.
      env, labels: NAME=value.
      retries: starts after a failure that another start may mend.
      grace_seconds: between the notice of a stop and its execution, to save in.
      hang_after: seconds after which a step, a wait for data or a save counts as hung and is started again; 0 is never.
      spot: machines that may be taken back.
      slurm, kubernetes, skypilot: what only one of them asks for.

    Raises:
      ConfigError: numbers that do not fit together, or names that do not exist.
    """

    name: str
    job: Train | Preflight | Study
    topology: str
    hosts: int
    devices_per_host: int
    layout: str
    runs: str
    data: str = ""
    slices: int = 1
    image: str = ""
    setup: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    retries: int = 10
    grace_seconds: int = 120
    hang_after: int = 1800
    spot: bool = False
    slurm: Slurm = Slurm()
    kubernetes: Kubernetes = Kubernetes()
    skypilot: SkyPilot = SkyPilot()

    def __post_init__(self):
        values.check_lines(self, several=("setup", "env"))
        values.check_lines(self.job)
        values.check_form(self, values.RUN, "name")
        values.check_form(self, values.WORD, "image")
        require_positive(self, "hosts", "devices_per_host", "slices", "grace_seconds")
        for field in ("retries", "hang_after"):
            number = getattr(self, field)
            require(number >= 0, f"RunSpec.{field} = {number}, but it must not be negative")
        self._check_devices()
        self._check_job()
        require(self.runs != "", "RunSpec.runs is empty, but a run needs a folder that outlives its machines")
        storage.parse(self.runs), storage.parse(self.data)
        values.check_pairs(self, "env", values.VARIABLE, RENDERED)
        values.check_pairs(self, "labels", values.LABELED, LABELS)
        for pair in self.env:
            require(
                not (self.machines.kind == "cpu" and pair.startswith("XLA_FLAGS=") and SIMULATED in pair),
                f"RunSpec.env has {pair!r}, but {SIMULATED}={self.devices_per_host} is rendered for {self.topology}",
            )

    def _check_devices(self) -> None:
        there, given = self.machines, self.hosts * self.devices_per_host
        require(there.is_tpu or self.slices == 1, f"RunSpec.slices = {self.slices}, but {self.topology} is no TPU")
        with values.field_for_flag("RunSpec.layout", "layout", self.layout):
            layout = layouts.load(self.layout)
        product = f"hosts x devices_per_host = {self.hosts} x {self.devices_per_host} = {given}"
        slices = f"{self.slices} x " if self.slices > 1 else ""
        require(
            given == there.devices * self.slices,
            f"{product}, but {slices}{self.topology} has {there.devices * self.slices} devices",
        )
        there.check_hosts(self.hosts, self.devices_per_host, self.slices)
        require(
            given == layout.devices,
            f"{product}, but the mesh of layout = {self.layout!r} has {layouts.product(layout)}",
        )
        require(
            layout.data % self.slices == 0,
            f"layout.data = {layout.data}, but it must be a multiple of slices = {self.slices}: between slices only "
            "the data axis exchanges little enough",
        )

    def _check_job(self) -> None:
        if isinstance(self.job, Train | Preflight):
            mesh = AbstractMesh(tuple(layouts.load(self.layout).sizes.values()), sharding.MESH_AXES)
            placement.check_batch(presets.load(self.job.config), mesh)
        else:
            require(self.hosts == 1, f"hosts = {self.hosts}, but a study's runs take one host each")
            require(self.data == "", f"RunSpec.data = {self.data!r}, but a study's configurations name their data")
            study, _ = studies.load(self.job.name)
            study_runs.groups(study, [self.job.rung] if self.job.rung else [], [study.control])

    @property
    def machines(self) -> Machines:
        """What the topology's name stands for."""
        return machines(self.topology)


def load(path: str | Path) -> RunSpec:
    """Reads a spec.

    Raises:
      ConfigError: the file cannot be read, is not JSON, has a field that does not exist, lacks one that has no default,
        or does not fit together.
    """
    return config_io.load_json(RunSpec, path, complete=False)


def save(spec: RunSpec | TrainConfig, path: str | Path) -> None:
    """Writes a spec, or the configuration that one names, with all its fields."""
    try:
        config_io.save_json(spec, path)
    except OSError as error:
        raise ConfigError(f"cannot write {str(path)!r}: {error}") from error
