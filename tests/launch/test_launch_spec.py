"""A spec says what does not fit, and what would."""

import dataclasses
import json
import pathlib

import pytest

from k3jax.config import ConfigError
from launch import machines, spec, storage
from launch.spec import RunSpec, Study, Train

SPECS = pathlib.Path(__file__).parent / "specs"
NANO = RunSpec("nano", Train("nano"), "cpu:2x4", 2, 4, "nano_8", "/runs")


@pytest.mark.parametrize("path", sorted(SPECS.glob("*.json")), ids=lambda path: path.stem)
def test_specs_survive_saving(path, tmp_path):
    loaded = spec.load(path)
    spec.save(loaded, tmp_path / "all_fields.json")
    assert spec.load(tmp_path / "all_fields.json") == loaded


WRONG = {
    "hosts x devices is not the topology": ({"hosts": 3}, r"3 x 4 = 12, but cpu:2x4 has 8 devices"),
    "hosts x devices is not the mesh": ({"layout": "fsdp=2,expert=2"}, r"= 8, but the mesh .* fsdp 2 x expert 2 = 4"),
    "no layout": ({"layout": ""}, r"= 8, but the mesh of layout = '' has 1 device"),
    "other hosts, same product": ({"hosts": 4, "devices_per_host": 2}, r"cpu:2x4 is 2 hosts with 4 devices each"),
    "an unknown layout": ({"layout": "nano_9"}, r"'nano_9' is no layout.*did you mean 'nano_8'"),
    "an unknown chip": ({"topology": "v9:2x4"}, r"there is no chip 'v9'; chips: v4"),
    "no shape": ({"topology": "cpu:8"}, r"cpu:HOSTSxDEVICES"),
    "an unknown configuration": ({"job": Train("nana")}, r"no preset or file 'nana'.*did you mean 'nano'"),
    "rows that do not divide": (
        {"job": Train("attnres_194m"), "topology": "cpu:5x1", "hosts": 5, "devices_per_host": 1, "layout": "data=5"},
        r"do not divide over data x fsdp x expert = 5",
    ),
    "slices of no TPU": ({"slices": 2}, r"slices = 2, but cpu:2x4 is no TPU"),
    "a study on several hosts": ({"job": Study("e01")}, r"hosts = 2, but a study's runs take one host"),
    "a name for no Pod": ({"name": "Nano_1"}, r"RunSpec.name = 'Nano_1'"),
    "no folder": ({"runs": ""}, r"RunSpec.runs is empty"),
    "an unknown scheme": ({"runs": "http://x/y"}, r"'http://x/y' is no path, gs://"),
    "no bucket": ({"data": "gs:///y"}, r"'gs:///y' is no path, gs://"),
    "no variable": ({"env": ("NCCL DEBUG=1",)}, r"'NCCL DEBUG=1', but it must be of the form NAME=value"),
    "a variable of ours": ({"env": ("JAX_PROCESS_ID=0",)}, r"sets JAX_PROCESS_ID"),
    "no label": ({"labels": ("team",)}, r"RunSpec.labels has 'team'"),
    "negative retries": ({"retries": -1}, r"retries = -1"),
}  # fmt: skip


@pytest.mark.parametrize("change, message", WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(NANO, **change)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"host": 2}, r"no field 'host'; did you mean 'hosts'\? \(fields: name, job"),
        ({"hosts": "2"}, r"hosts = '2', but it must be an integer"),
        (
            {"job": {"config": "nano"}},
            r'job: the class must be named under "type"; it must be Train or Preflight or Study',
        ),
        ({"slurm": {"queue": "gpu"}}, r"slurm.queue: Slurm has no field 'queue' \(fields: partition"),
        ({"runs": None}, r"runs = None, but it must be a string"),
    ],
)
def test_a_file_is_read_strictly(change, message, tmp_path):
    data = json.loads((SPECS / "nano-here.json").read_text()) | change
    (tmp_path / "spec.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=message):
        spec.load(tmp_path / "spec.json")


def test_a_field_without_default_must_be_there(tmp_path):
    data = json.loads((SPECS / "nano-here.json").read_text())
    del data["runs"]
    (tmp_path / "spec.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="RunSpec lacks runs"):
        spec.load(tmp_path / "spec.json")


@pytest.mark.parametrize(
    "topology, hosts, per_host, slices, message",
    [
        ("v5p:4x4x4", 8, 8, 1, "a host of v5p:4x4x4 has 4"),
        ("tpu7x:2x2x2", 4, 4, 1, "a host of tpu7x:2x2x2 has 8"),
        ("v6e:2x4", 4, 2, 1, "a host of v6e:2x4 has 4 or 8"),
        ("v5e:4x4", 4, 8, 2, None),
        ("v6e:2x4", 1, 8, 1, None),
        ("tpu7x:2x2x2", 2, 8, 1, None),
    ],
)
def test_hosts_of_slices(topology, hosts, per_host, slices, message):
    found = machines.machines(topology)
    if message:
        with pytest.raises(ConfigError, match=message):
            found.check_hosts(hosts, per_host, slices)
    elif topology != "v5e:4x4":
        found.check_hosts(hosts, per_host, slices)
    else:
        with pytest.raises(ConfigError, match="a host of v5e:4x4 has 4"):
            found.check_hosts(hosts, per_host, slices)


@pytest.mark.parametrize(
    "topology, message",
    [
        ("v5e:3x5", "no slice v5e:3x5; v5e has 1x1, 2x2, 2x4"),
        ("v5p:8x4x4", "the smallest first"),
        ("v5p:2x2x8", "there is no slice v5p:2x2x8"),
        ("v5p:16x24x24", "9,216 chips, but a slice of v5p has 8,960 at most"),
        ("h200:2x4", "machines with 8 GPUs, not 4"),
        ("cpu:2x4", "simulated devices are for local and slurm"),
    ],
)
def test_machines_that_no_cloud_has(topology, message):
    with pytest.raises(ConfigError, match=message):
        machines.tpu_or_gpu(machines.machines(topology), "gke")


def test_slices_exchange_over_the_data_axis_only():
    fields = {"topology": "v5e:4x4", "slices": 2, "hosts": 8, "devices_per_host": 4, "layout": "fsdp=4,expert=8"}
    with pytest.raises(ConfigError, match=r"layout.data = 1, but it must be a multiple of slices = 2"):
        dataclasses.replace(NANO, **fields)


def test_credentials_are_looked_for_here(tmp_path, monkeypatch):
    google, amazon = storage.parse("gs://bucket/a"), storage.parse("s3://bucket")
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    with pytest.raises(ConfigError, match=r"'gs://bucket/a': no credentials in .* `gcloud auth"):
        storage.check_credentials(google)
    with pytest.raises(ConfigError, match=r"'s3://bucket': no credentials in .* `aws configure`"):
        storage.check_credentials(amazon)
    (tmp_path / "application_default_credentials.json").touch()
    (tmp_path / "credentials").touch()
    storage.check_credentials(google)
    storage.check_credentials(amazon)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "gone.json"))
    with pytest.raises(ConfigError, match=r"names '.*gone.json', but there is no such file"):
        storage.check_credentials(google)
