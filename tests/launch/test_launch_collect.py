"""Run folders come back, a second time only what has changed, and what cannot be had is said and never waited for."""

import dataclasses
import errno
import io
import json
import pathlib
import time

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from k3jax.config import ConfigError
from launch import collect as collecting
from launch.collect import CollectError, collect
from launch.spec import RunSpec, Train


def spec(runs: str) -> RunSpec:
    return RunSpec("nano", Train("nano"), "cpu:1x8", 1, 8, "nano_8", runs)


@pytest.fixture
def run(tmp_path) -> pathlib.Path:
    """A run folder with a checkpoint in it."""
    folder = tmp_path / "there" / "nano"
    (folder / "checkpoints" / "6").mkdir(parents=True)
    (folder / "heartbeats").mkdir()
    (folder / "checkpoints" / "6" / "array").write_text("large")
    (folder / "heartbeats" / "0.json").write_text("{}")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    return folder


def content(folder: pathlib.Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != collecting.LIST]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def test_folders_come_back_without_checkpoints(run, tmp_path):
    here, files, fetched = collect(spec(str(run.parent)), tmp_path / "here")
    assert (here, files, fetched) == (tmp_path / "here" / "nano", 2, 2)
    assert content(here) == {"heartbeats/0.json": "{}", "metrics.jsonl": '{"step": 1}\n'}
    assert collect(spec(str(run.parent)), tmp_path / "here", checkpoints=True)[1:] == (3, 1)
    assert content(here) == content(run)


def test_a_second_time_what_has_changed(run, tmp_path):
    here, _, _ = collect(spec(str(run.parent)), tmp_path)
    with open(run / "metrics.jsonl", "a") as lines:
        lines.write('{"step": 2}\n')
    (here / "heartbeats" / "0.json").unlink()
    assert collect(spec(str(run.parent)), tmp_path)[1:] == (2, 2)
    assert collect(spec(str(run.parent)), tmp_path)[1:] == (2, 0)
    assert content(here)["metrics.jsonl"].count("\n") == 2


def test_goes_on_after_a_break(run, tmp_path, monkeypatch):
    """What came before it is not fetched again, and half a file is none."""
    (run / "other.json").write_text("{}")
    opened, left = LocalFileSystem.open, [1]

    class Cut(io.BytesIO):
        def read(self, size=-1):
            if block := super().read(size):
                return block
            raise OSError("connection reset")

    monkeypatch.setattr(collecting, "AT_ONCE", 1)
    monkeypatch.setattr(LocalFileSystem, "open", lambda *given: opened(*given) if left and left.pop() else Cut(b"ha"))
    with pytest.raises(CollectError, match=r"storage '.*there': connection reset"):
        collect(spec(str(run.parent)), tmp_path / "here")
    monkeypatch.undo()
    with open(tmp_path / "here" / "nano" / collecting.LIST, "a") as known:
        known.write('{"metr')  # and its writer was killed
    assert collect(spec(str(run.parent)), tmp_path / "here")[1:] == (3, 2)
    assert "ha" not in content(tmp_path / "here" / "nano").values()


def test_a_bucket(run, tmp_path, monkeypatch):
    """A file system in memory stands for Cloud Storage: paths without the protocol, and digests instead of times."""

    class Bucket(MemoryFileSystem):
        protocol, store, pseudo_dirs = "gs", {}, [""]

        @classmethod
        def _strip_protocol(cls, path):
            return super()._strip_protocol(path.removeprefix("gs:/"))

        def ls(self, path, detail=True, **_):
            found = super().ls(path, detail=True)
            return [one | {"etag": f"e{one['size']}"} for one in found] if detail else [one["name"] for one in found]

    monkeypatch.setattr(collecting.fsspec, "filesystem", lambda kind, **_: Bucket())
    monkeypatch.setattr(collecting.storage, "check_credentials", lambda place: None)
    for name, text in content(run).items():
        Bucket().pipe_file(f"/bucket/runs/nano/{name}", text.encode())
    here, files, fetched = collect(spec("gs://bucket/runs"), tmp_path / "here")
    assert (files, fetched) == (2, 2) and content(here)["metrics.jsonl"] == '{"step": 1}\n'
    assert collect(spec("gs://bucket/runs"), tmp_path / "here")[2] == 0
    assert '"e12"' in (here / collecting.LIST).read_text()


def test_what_is_not_there(tmp_path):
    with pytest.raises(CollectError, match=r"there is nothing at /.*/nano: has the run begun, and is '/.*' its"):
        collect(spec(str(tmp_path)), tmp_path / "here")


def test_storage_without_credentials_or_client(tmp_path, monkeypatch):
    """At once, and before anything is asked."""
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    with pytest.raises(ConfigError, match=r"storage 'gs://bucket': no credentials in"):
        collect(spec("gs://bucket"), tmp_path)
    (tmp_path / "application_default_credentials.json").write_text("{}")
    monkeypatch.setattr(fsspec, "filesystem", lambda *_, **__: (_ for _ in ()).throw(ImportError("no gcsfs")))
    with pytest.raises(ConfigError, match=r"'gs://bucket' needs a package that is not installed: pip install gcsfs"):
        collect(spec("gs://bucket"), tmp_path)


def test_storage_that_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(collecting, "PATIENCE", 0.2)
    monkeypatch.setattr(collecting, "_files", lambda *_: time.sleep(5))
    with pytest.raises(CollectError, match="gave no answer in 0 s"):
        collect(spec(str(tmp_path)), tmp_path / "here")


def test_a_claim_and_a_folder_that_is_here(run, tmp_path):
    with pytest.raises(ConfigError, match="kubectl cp"):
        collect(spec("pvc://claim/folder"), tmp_path)
    with pytest.raises(ConfigError, match="is here already"):
        collect(spec(str(run.parent)), run.parent)


def test_studies_have_folders_in_theirs(run, tmp_path):
    study = dataclasses.replace(spec(str(run.parent.parent)), name="there")
    here, files, _ = collect(study, tmp_path / "here")
    assert files == 2 and json.loads((here / "nano" / "metrics.jsonl").read_text()) == {"step": 1}


def test_two_runs_of_one_name_are_not_mixed(run, tmp_path):
    """Nor is a run mixed with what was here before."""
    collect(spec(str(run.parent)), tmp_path / "here")
    other = tmp_path / "other" / "nano"
    other.mkdir(parents=True)
    (other / "metrics.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match=r"here/nano was collected from /.*/there/nano, not /.*/other/nano; give ano"):
        collect(spec(str(other.parent)), tmp_path / "here")
    with pytest.raises(ConfigError, match=r"/other/nano holds files that were not collected; give another .* --to"):
        collect(spec(str(run.parent)), tmp_path / "other")
    assert content(tmp_path / "here" / "nano")["metrics.jsonl"] == '{"step": 1}\n' and content(other) == {
        "metrics.jsonl": "{}"
    }
    listed = (tmp_path / "here" / "nano" / collecting.LIST).read_text().splitlines()
    assert [json.loads(line) for line in listed].count({"": str(run)}) == 1


@pytest.mark.parametrize("to, name", [("file", "file/nano"), ("taken", "taken/nano"), ("/proc/x", "proc/x")])
def test_a_place_that_cannot_be_written_is_named(to, name, run, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "nano").touch()
    with pytest.raises(CollectError, match=rf"^cannot write /(.*/)?{name}: (Not a directory|File exists|No such file)"):
        collect(spec(str(run.parent)), tmp_path / to)


def test_a_full_disk_is_no_fault_of_the_storage(run, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(collecting.os, "replace", full)
    with pytest.raises(CollectError, match=r"^cannot write /.*/here/nano/.*: No space left on device$"):
        collect(spec(str(run.parent)), tmp_path / "here")


def test_links_to_nothing_are_left_out(run, tmp_path, capsys):
    (run / "latest.json").symlink_to(run / "gone.json")
    (run / "newest").symlink_to(run / "heartbeats")
    here, files, fetched = collect(spec(str(run.parent)), tmp_path / "here")
    assert (files, fetched) == (2, 2) and len(content(here)) == 2
    note = capsys.readouterr().out
    assert note.startswith("note: left out, because they are gone or links to nothing: ")
    assert "latest.json" in note and "newest" in note
