"""A spec says what does not fit, and what would."""

import dataclasses
import json
import pathlib

import pytest

from k3jax.config import ConfigError
from launch import machines, spec, storage
from launch.spec import Kubernetes, Preflight, RunSpec, SkyPilot, Slurm, Study, Train

SPECS = pathlib.Path(__file__).parent / "specs"
NANO = RunSpec("nano", Train("nano"), "cpu:2x4", 2, 4, "nano_8", "/runs")
ALONE = {"topology": "cpu:1x1", "hosts": 1, "devices_per_host": 1, "layout": ""}


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
    "an unknown layout": (
        {"layout": "nano_9"}, r"^RunSpec.layout = 'nano_9': 'nano_9' is no layout.*did you mean 'nano_8'",
    ),
    "an unknown chip": ({"topology": "v9:2x4"}, r"^topology = 'v9:2x4': there is no chip 'v9'; chips: v4"),
    "no shape": ({"topology": "cpu:8"}, r"^topology = 'cpu:8', but simulated devices are cpu:HOSTSxDEVICES"),
    "an unknown configuration": ({"job": Train("nana")}, r"no preset or file 'nana'.*did you mean 'nano'"),
    "rows that do not divide": (
        {"job": Train("attnres_194m"), "topology": "cpu:5x1", "hosts": 5, "devices_per_host": 1, "layout": "data=5"},
        r"do not divide over data x fsdp x expert = 5",
    ),
    "slices of no TPU": ({"slices": 2}, r"slices = 2, but cpu:2x4 is no TPU"),
    "a study on several hosts": ({"job": Study("s02")}, r"hosts = 2, but a study's runs take one host"),
    "an unknown study": (ALONE | {"job": Study("e02_ratio")}, r"there is no study 'e02_ratio'.*are: s01_kda_ancestors"),
    "an unknown rung": (ALONE | {"job": Study("s02", "m")}, r"s02_hybrid_ratio: there is no rung 'm' .*are: d64"),
    "a rung that is planned": (ALONE | {"job": Study("s02", "kimi_linear_653m")}, r"is planned, not run here"),
    "data of a study": (ALONE | {"job": Study("s02"), "data": "/data"}, r"data = '/data', but a study's config"),
    "a name for no Pod": ({"name": "Nano_1"}, r"RunSpec.name = 'Nano_1'"),
    "no folder": ({"runs": ""}, r"RunSpec.runs is empty"),
    "an unknown scheme": ({"runs": "http://x/y"}, r"'http://x/y' is no path, gs://"),
    "no bucket": ({"data": "gs:///y"}, r"'gs:///y' is no path, gs://"),
    "a home": ({"runs": "~/runs"}, r"'~/runs': no '~' is expanded; write the folder out, as /home/me/runs"),
    "one slash": ({"runs": "gs:/bucket/y"}, r"'gs:/bucket/y' is no path; a bucket or a claim is gs://bucket/y"),
    "one slash of a claim": ({"data": "pvc:/disk"}, r"'pvc:/disk' is no path; .* is pvc://disk"),
    "upper case": ({"runs": "gs://Bucket/y"}, r"'Bucket' is no name of a bucket, which is 3 to 63 lower-case letters"),
    "a bucket in two words": ({"runs": "gs://my bucket"}, r"'my bucket' is no name of a bucket"),
    "a bucket with a mark": ({"runs": "s3://now!/y"}, r"'now!' is no name of a bucket"),
    "an underscore in S3": ({"runs": "s3://my_runs"}, r"'my_runs' is no name of a bucket"),
    "no name of a claim": ({"runs": "pvc://My_Claim"}, r"'My_Claim' is no name of a volume claim, which is lower-case"),
    "a comma": ({"runs": "gs://bucket/a,ro"}, r"the folder 'a,ro' is mounted as it is written, so it must have no com"),
    "a way up": ({"runs": "pvc://disk/a/../b"}, r"the folder 'a/../b' .* no comma, '.' or '..'"),
    "two lines": ({"runs": "/a\nb"}, r"^RunSpec.runs has '\\n' in '/a\\nb', but it must be one line of printable"),
    "a nul": ({"env": ("A=\0",)}, r"^RunSpec.env has '\\x00' in 'A=\\x00', but it must be printable characters"),
    "half a character": ({"setup": ("echo \ud800",)}, r"^RunSpec.setup has '\\ud800'"),
    "two lines of a job": ({"job": Train("nano\n")}, r"^Train.config has '\\n'"),
    "an image in two words": ({"image": "my image"}, r"RunSpec.image = 'my image', but it must be ASCII characters"),
    "a variable twice": ({"env": ("A=1", "A=2")}, r"RunSpec.env sets A twice"),
    "a variable in Greek": ({"env": ("\u03b1=1",)}, r"of the form NAME=value"),
    "two numbers of devices": (
        {"env": ("XLA_FLAGS=--xla_force_host_platform_device_count=2",)}, r"count=4 is rendered for cpu:2x4",
    ),
    "a label of ours": ({"labels": ("app=x",)}, r"RunSpec.labels sets app, but that is k3jax, by which its Pods are"),
    "a label twice": ({"labels": ("a=1", "a=2")}, r"RunSpec.labels sets a twice"),
    "no variable": ({"env": ("NCCL DEBUG=1",)}, r"'NCCL DEBUG=1', but it must be of the form NAME=value"),
    "a variable of ours": ({"env": ("JAX_PROCESS_ID=0",)}, r"sets JAX_PROCESS_ID"),
    "no label": ({"labels": ("team",)}, r"RunSpec.labels has 'team'"),
    "negative retries": ({"retries": -1}, r"retries = -1"),
}  # fmt: skip


@pytest.mark.parametrize("change, message", WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(NANO, **change)


CLUSTERS = {
    "a time in words": (lambda: Slurm(time="1 day"), r"Slurm.time = '1 day', but it must be M, M:S, H:M:S, D-H, D-H:M"),
    "a time with four parts": (lambda: Slurm(time="1:2:3:4"), r"Slurm.time = '1:2:3:4'"),
    "days with nothing": (lambda: Slurm(time="1-"), r"Slurm.time = '1-'"),
    "two partitions": (lambda: Slurm(partition="gpu short"), r"Slurm.partition = 'gpu short', but it must be ASCII"),
    "an account": (lambda: Slurm(account="my arch"), r"Slurm.account = 'my arch'"),
    "a command among options": (lambda: Slurm(options=("--nice", "-C x\nrm -r /")), r"options = '-C x\\nrm -r /', but"),
    "a whole line": (lambda: Slurm(options=("#SBATCH --nice",)), r"options = '#SBATCH --nice', but it must be an opt"),
    "a namespace": (lambda: Kubernetes(namespace="My_Team"), r"Kubernetes.namespace = 'My_Team', but .* up to 63"),
    "no namespace": (lambda: Kubernetes(namespace=""), r"Kubernetes.namespace = ''"),
    "an account of a Pod": (lambda: Kubernetes(service_account="a b"), r"Kubernetes.service_account = 'a b'"),
    "a cluster": (lambda: Kubernetes(cluster="a b"), r"Kubernetes.cluster = 'a b'"),
    "a name of a GPU": (lambda: Kubernetes(accelerator="a/b"), r"Kubernetes.accelerator = 'a/b'"),
    "a cloud": (lambda: SkyPilot(infra="gcp/us east5"), r"SkyPilot.infra = 'gcp/us east5'"),
    "the run of a preflight": (lambda: Preflight("nano", run="A"), r"Preflight.run = 'A'"),
}  # fmt: skip


@pytest.mark.parametrize("make, message", CLUSTERS.values(), ids=CLUSTERS)
def test_what_no_cluster_takes_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_what_is_allowed():
    for time in ("30", "30:00", "1:30:00", "2-12", "2-12:30", "2-12:30:00", "UNLIMITED", "infinite"):
        assert Slurm(partition="gpu,long", time=time, options=("-C h200", "--mail-user=a@b.org")).time == time
    for text in ("gs://a.b_c-1/x y", "s3://my.runs", "pvc://disk.1/a", "../runs", "/shared/a:b", "gs-runs", "s3"):
        assert storage.parse(text).text == text
    two_lines = {"env": ("A=1\n2", "XLA_FLAGS=--xla_dump_to=x"), "setup": ("if true\nthen\ttrue; fi",)}
    assert dataclasses.replace(NANO, **two_lines).env[0] == "A=1\n2"
    assert dataclasses.replace(NANO, **ALONE, job=Study("s02", "d64")).job.rung == "d64"


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
