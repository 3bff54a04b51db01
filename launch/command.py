"""What every engine starts: the command, its environment, and what its exit code asks for."""

import shlex
from dataclasses import dataclass

from k3jax.config import ConfigError
from launch.spec import SIMULATED, Preflight, RunSpec, Study

PORT = 8476


@dataclass(frozen=True)
class Rendered:
    """text: of the script or manifest; suffix: of its file; submit: the command, with {file}; before: what must have
    been done once; notes: what the file cannot say."""

    text: str
    suffix: str
    submit: str
    before: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def command(spec: RunSpec, *, runs: str, data: str) -> list[str]:
    """The command of one process, without the numbers that tell it from the others."""
    if isinstance(spec.job, Study):
        rung = ["--rung", spec.job.rung] if spec.job.rung else []
        return ["python", "-m", "experiments.run", spec.job.name, *rung, "--root", f"{runs}/{spec.name}"]
    given = ["--set", f"data=TokenRecords(path={data!r})"] if data else []
    only = ["--preflight_only"] if isinstance(spec.job, Preflight) else []
    return [
        "python", "-m", "k3jax.train", "--config", spec.job.config, "--run", f"{runs}/{spec.name}", *only,
        "--expect", f"{spec.machines.kind}:{spec.devices_per_host}", "--hang_after", str(spec.hang_after),
        "--layout", spec.layout, *given,
    ]  # fmt: skip


def environment(spec: RunSpec) -> dict[str, str]:
    """Variables of every process. Naming the platform makes a missing plugin an error: JAX would go on with the CPU."""
    there = spec.machines
    if there.is_tpu or there.is_gpu:
        found = {"JAX_PLATFORMS": "tpu,cpu" if there.is_tpu else "cuda,cpu"}
    else:
        simulated = f"{SIMULATED}={spec.devices_per_host}"
        found = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": simulated}
    for pair in spec.env:
        name, _, value = pair.partition("=")
        found[name] = f"{found[name]} {value}" if name == "XLA_FLAGS" and name in found else value
    return found


def labels(spec: RunSpec) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in spec.labels)


def exports(spec: RunSpec) -> list[str]:
    """The environment as lines of a shell."""
    return [f"export {name}={shlex.quote(value)}" for name, value in environment(spec).items()]


def require_image(spec: RunSpec, engine: str) -> None:
    """Raises ConfigError without an image, and says how to make one."""
    if not spec.image:
        kind = "tpu" if spec.machines.is_tpu else "cuda13"
        raise ConfigError(
            f"{engine} needs RunSpec.image, and it is empty; make one with `docker build -f launch/docker/{kind}."
            "Dockerfile -t REGISTRY/k3jax:TAG .`, push it, and name it"
        )


def require_environment(spec: RunSpec, engine: str) -> None:
    """Raises ConfigError where nothing says what Python the run has."""
    if not spec.image and not spec.setup:
        raise ConfigError(
            f"{engine} needs RunSpec.image or RunSpec.setup, and both are empty; for example "
            'setup = ["source .venv/bin/activate"]'
        )
