"""Google Kubernetes Engine: a JobSet, one Job for each TPU slice or one for all GPU nodes, one Pod a host."""

import shlex
from typing import Any

from k3jax.config import ConfigError, require
from k3jax.exits import FINAL
from launch import storage
from launch.command import PORT, Rendered, command, environment, labels, require_image
from launch.machines import Gpu, Tpu, tpu_or_gpu
from launch.manifest import dump
from launch.spec import RunSpec

CONTAINER = "k3jax"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def render(spec: RunSpec) -> Rendered:
    """A manifest for ``kubectl``.

    Raises:
      ConfigError: a topology that GKE does not have, no image, or storage that would be lost or is nobody's.
    """
    names = tpu_or_gpu(spec.machines, "gke")
    require_image(spec, "gke")
    require(
        spec.slices == 1 or spec.hosts > spec.slices,
        f"{spec.slices} slices of {spec.topology} with one host each: GKE joins slices of several hosts only",
    )
    where = spec.kubernetes
    credentials = ""
    if where.cluster:
        flags = [f"--location={where.location}"] if where.location else []
        flags += [f"--project={where.project}"] if where.project else []
        credentials = shlex.join(["gcloud", "container", "clusters", "get-credentials", where.cluster, *flags])
    return Rendered(
        dump(_job_set(spec, names)),
        ".yaml",
        "kubectl apply -f {file}",
        before=(credentials,) if credentials else (),
    )


def _job_set(spec: RunSpec, names: Tpu | Gpu) -> dict[str, Any]:
    # Which Job lies on which node pool matters only where there are several.
    pools = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"} if spec.slices > 1 else {}
    metadata = {"name": spec.name, "namespace": spec.kubernetes.namespace, "labels": {"app": "k3jax", **labels(spec)}}
    rules = [{"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata | ({"annotations": pools} if pools else {}),
        "spec": {
            "failurePolicy": {"maxRestarts": spec.retries, "rules": rules},
            "replicatedJobs": [{"name": _job_name(spec), "replicas": spec.slices, "template": _job(spec, names)}],
        },
    }


def _job_name(spec: RunSpec) -> str:
    return "slice" if spec.machines.is_tpu else "nodes"


def _job(spec: RunSpec, names: Tpu | Gpu) -> dict[str, Any]:
    """One Pod that fails is one Job that fails is a JobSet that starts anew, unless starting anew would not help."""
    hosts = spec.hosts // spec.slices
    final = {"containerName": CONTAINER, "operator": "In", "values": [int(code) for code in FINAL]}
    return {
        "spec": {
            "completionMode": "Indexed",
            "parallelism": hosts,
            "completions": hosts,
            "backoffLimit": 0,
            "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": final}]},
            "template": _pod(spec, names),
        }
    }


def _pod(spec: RunSpec, names: Tpu | Gpu) -> dict[str, Any]:
    mounts, volumes, paths = _volumes(spec)
    selector, resource = _nodes(spec, names)
    tolerations = [{"key": resource, "operator": "Exists", "effect": "NoSchedule"}]
    if spec.spot:
        selector["cloud.google.com/gke-spot"] = "true"
        spot = {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        tolerations.append(spot)
    fuse = {"annotations": {"gke-gcsfuse/volumes": "true"}} if any("csi" in volume for volume in volumes) else {}
    account = spec.kubernetes.service_account
    count = spec.devices_per_host // spec.machines.cores
    script = "\n".join([*spec.setup, f"exec {shlex.join(command(spec, **paths))}"])
    container = {
        "name": CONTAINER,
        "image": spec.image,
        "command": ["bash", "-ec", script],
        "env": [{"name": name, "value": value} for name, value in environment(spec).items()] + _numbers(spec),
        "resources": {"requests": {resource: count}, "limits": {resource: count}},
        "volumeMounts": mounts,
    }
    if spec.machines.is_tpu:
        container["securityContext"] = {"privileged": True}
    return {
        "metadata": {"labels": {"app": "k3jax", **labels(spec)}} | fuse,
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": spec.grace_seconds,
            "nodeSelector": selector,
            "tolerations": tolerations,
            **({"serviceAccountName": account} if account else {}),
            "containers": [container],
            "volumes": volumes,
        },
    }


def _nodes(spec: RunSpec, names: Tpu | Gpu) -> tuple[dict[str, str], str]:
    """The labels of fitting nodes, and what a container asks them for."""
    if isinstance(names, Gpu):
        return {"cloud.google.com/gke-accelerator": spec.kubernetes.accelerator or names.gke}, "nvidia.com/gpu"
    topology = {"cloud.google.com/gke-tpu-topology": spec.machines.size}
    return {"cloud.google.com/gke-tpu-accelerator": names.gke, **topology}, "google.com/tpu"


def _numbers(spec: RunSpec) -> list[dict[str, Any]]:
    """What tells the processes on GPUs from each other; GKE gives TPU hosts theirs."""
    if spec.machines.is_tpu or spec.hosts == 1:
        return []
    first = f"{spec.name}-{_job_name(spec)}-0-0.{spec.name}"
    return [
        {"name": "JAX_COORDINATOR_ADDRESS", "value": f"{first}:{PORT}"},
        {"name": "JAX_NUM_PROCESSES", "value": str(spec.hosts)},
        {"name": "JAX_PROCESS_ID", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}},
    ]


def _volumes(spec: RunSpec) -> tuple[list[dict], list[dict], dict[str, str]]:
    """Mounts, volumes, and the folders in the container."""
    mounts, volumes, paths = [], [], {"runs": "", "data": ""}
    for name, text, path in (("runs", spec.runs, storage.RUNS), ("data", spec.data, storage.DATA)):
        if not (place := storage.parse(text)):
            continue
        storage.refuse_path(place, "gke")
        volumes.append({"name": name, **_volume(spec, place, read_only=name == "data")})
        inside = {"subPath": place.folder} if place.kind == "pvc" and place.folder else {}
        mounts.append({"name": name, "mountPath": path, **inside, **({"readOnly": True} if name == "data" else {})})
        paths[name] = path
    if spec.machines.is_gpu:
        volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})
    return mounts, volumes, paths


def _volume(spec: RunSpec, place: storage.Place, *, read_only: bool) -> dict[str, Any]:
    if place.kind == "pvc":
        return {"persistentVolumeClaim": {"claimName": place.owner, "readOnly": read_only}}
    if place.kind == "s3":
        raise ConfigError(f"gke cannot mount {place.text!r}; give gs://bucket/folder or pvc://claim/folder")
    if not spec.kubernetes.service_account:
        raise ConfigError(
            f"storage {place.text!r} needs kubernetes.service_account, a Kubernetes service account whose identity may "
            "use the bucket: see docs/launch_gke.md"
        )
    attributes = {"bucketName": place.owner, "mountOptions": storage.fuse_options(place)}
    return {"csi": {"driver": "gcsfuse.csi.storage.gke.io", "readOnly": read_only, "volumeAttributes": attributes}}
