"""What is wrong with a host is said to all, by name and with a remedy: as data, and by processes that are threads."""

import copy
import json
import os
import pathlib
import socket
import subprocess
import threading
import time

import jax
import pytest

from k3jax import config as c
from k3jax import distributed, preflight, preflight_devices
from k3jax.config import ConfigError
from k3jax.config_data import Mixture, TokenRecords, Weighted
from k3jax.exits import Exit
from k3jax.presets import tiny
from launch.local import free_port

VERSIONS = {"commit": "abc (sources 12)", "Python": "3.12.3", "jax": "0.12.0.1", "libtpu": "0.0.52"}


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(preflight, "SHARED", 0.3)
    monkeypatch.setattr(preflight, "PATIENCE", 0.3)


def hosts(run: pathlib.Path, count: int = 4) -> dict[int, dict]:
    """What processes on hosts n0, n1 and so on say when all is well, with their marks in the run folder."""
    found = {}
    for number in range(count):
        mark = run / f".preflight-n{number}"
        mark.write_text(f"{number}")
        storage = {"mark": mark.name, "content": f"{number}", "free": 10**9, "made": False}
        facts = {"versions": dict(VERSIONS), "storage": storage, "problems": []}
        found[number] = {"host": f"n{number}", "offset": 0.0, "facts": facts}
    return found


def test_nothing_is_wrong_and_nothing_is_left(tmp_path):
    assert preflight.Judge(tmp_path, 10**6)(hosts(tmp_path)) is None
    assert not list(tmp_path.iterdir())


def version(name, value):
    return lambda found: found[2]["facts"]["versions"].update({name: value})


INJECTED = {
    "Python": (version("Python", "3.13.1"), Exit.CONFIGURATION, "Python is 3.13.1, but 3.12.3 elsewhere; make the"),
    "jax": (version("jax", "0.11.2"), Exit.CONFIGURATION, "jax is 0.11.2, but 0.12.0.1 elsewhere; make"),
    "libtpu": (version("libtpu", "not installed"), Exit.CONFIGURATION, "libtpu is not installed, but 0.0.52 elsewhere"),
    "a commit": (version("commit", "abd (sources 13)"), Exit.CONFIGURATION, "commit is abd (sources 13), but abc"),
    "a clock": (lambda found: found[2].update(offset=-7.3), Exit.CONFIGURATION, "its clock is 7 s behind the others"),
    "a full disk": (lambda found: found[2]["facts"]["storage"].update(free=3e8), Exit.STORAGE, "room for 0.300 GB"),
    "another folder": (
        lambda found: found[2]["facts"]["storage"].update(mark="elsewhere"), Exit.STORAGE, "wrote into another /",
    ),
    "its own": (
        lambda found: found[2]["facts"].update(storage=None, problems=[[6, "the run folder /r cannot be written"]]),
        Exit.STORAGE, "the run folder /r cannot be written",
    ),
}  # fmt: skip


@pytest.mark.parametrize("inject, code, text", INJECTED.values(), ids=INJECTED)
def test_the_host_is_named(inject, code, text, tmp_path):
    found = hosts(tmp_path)
    inject(found)
    problem = preflight.Judge(tmp_path, 2 * 10**8)(found)
    assert problem[0] == code
    (line,) = problem[1].splitlines()
    assert line.startswith("n2 (process 2)") and text in line


def test_all_that_is_wrong_is_said_at_once(tmp_path):
    found = hosts(tmp_path)
    for inject, _, _ in (INJECTED["jax"], INJECTED["a clock"], INJECTED["a full disk"]):
        inject(found)
    found[0]["offset"] = 30.0
    code, text = preflight.Judge(tmp_path, 2 * 10**8)(found)
    assert code == Exit.CONFIGURATION and len(text.splitlines()) == 4
    assert "n0 (process 0): its clock is 30 s ahead of the others" in text


def test_room_for_two_checkpoints_less_those_that_are_there(tmp_path):
    judge = preflight.Judge(tmp_path, 6 * 10**8)
    assert "room for 1.000 GB, but 2 checkpoint(s) of 0.600 GB must fit" in judge(hosts(tmp_path))[1]
    (tmp_path / "checkpoints" / "12").mkdir(parents=True)
    assert judge(hosts(tmp_path)) is None


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    facts = preflight.facts_of_host(tiny(), tmp_path / "file" / "run")
    ((code, text),) = facts["problems"]
    assert code == Exit.STORAGE and str(tmp_path / "file" / "run") in text and "mount it there" in text


def test_marks_of_processes_that_were_stopped_are_removed(tmp_path):
    """Of this host only, and only where the process is gone."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    own = f".preflight-{socket.gethostname()}-"
    names = {f"{own}{ended.pid}", f"{own}{os.getppid()}", f"{own}x", f".preflight-other-{ended.pid}"}
    for name in names:
        (tmp_path / name).touch()
    preflight.facts_of_host(tiny(), tmp_path)
    assert set(os.listdir(tmp_path)) == names - {f"{own}{ended.pid}"} | {f"{own}{os.getpid()}"}


def test_a_manifest_that_cannot_be_read(tmp_path):
    """In the data of a stage or in a part of a mixture, too."""
    records = TokenRecords(path=str(tmp_path / "tokens"))
    mixed = Mixture(parts=(Weighted(source=records, weight=1.0, name="web"),))
    for data in (records, mixed):
        ((code, text),) = preflight.facts_of_host(c.replace(tiny(), data=data), tmp_path)["problems"]
        assert code == Exit.DATA and f"manifest {tmp_path}/tokens/manifest.json cannot be read" in text
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "manifest.json").write_text("{}")
    assert preflight.facts_of_host(c.replace(tiny(), data=mixed), tmp_path)["problems"] == []


def test_storage_that_never_answers(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "_write_mark", lambda run: time.sleep(5))
    ((code, text),) = preflight.facts_of_host(tiny(), tmp_path)["problems"]
    assert code == Exit.STORAGE and "the run folder did not answer in 0 s" in text


def test_a_bucket_is_no_folder():
    with pytest.raises(ConfigError, match="--run=gs:/bucket/run: a run folder is a path; mount the bucket"):
        preflight.start(tiny(), pathlib.Path("gs://bucket/run"))


def meet(member, facts, judge, outcomes):
    try:
        distributed.meet(member, deadline=time.monotonic() + 5, facts=facts, judge=judge)
    except (ConfigError, OSError) as error:
        outcomes[member.process] = error


def test_processes_are_judged_when_they_meet(tmp_path, monkeypatch):
    """All are told the same, and the clock of process 1 is asked."""
    monkeypatch.setattr(distributed, "LINGER", 0.5)
    ours, outcomes = hosts(tmp_path, 2), {}
    ours[1]["facts"]["versions"]["jax"] = "0.11.2"
    seen = []

    def judge(found):
        seen.append(copy.deepcopy(found))
        return preflight.Judge(tmp_path, 1)(found)

    port = free_port()
    members = [distributed.Membership(f"localhost:{port}", 2, number) for number in (0, 1)]
    threads = [threading.Thread(target=meet, args=(m, ours[m.process]["facts"], judge, outcomes)) for m in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert len(seen) == 1 and abs(seen[0][1]["offset"]) < 1
    assert {str(error) for error in outcomes.values()} == {str(outcomes[0])} and len(outcomes) == 2
    assert "(process 1): jax is 0.11.2, but 0.12.0.1 elsewhere" in str(outcomes[0])


def device(count=4, kind="TPU v5", **fields):
    return {"host": "n", "count": count, "kind": kind, "error": "", "all": 8} | fields


DEVICES = {
    "a missing chip": (
        [device(), device(3)],
        "v5p:4",
        "n (process 1): 3 x TPU v5, but it must be 4 x v5p; a device",
    ),
    "another kind": ([device(), device(kind="TPU v5 lite")], "v5p:4", "4 x TPU v5 lite, but it must be 4 x v5p; leave"),
    "no plugin": ([device(), device(kind="cpu")], "v5p:4", "4 x cpu, but it must be 4 x v5p; the accelerator's plugin"),
    "odd ones": ([device(), device(3), device()], "", "n (process 1): 3 x TPU v5, but it must be 4 x TPU v5; a device"),
    "two slices": ([device(all=4), device(all=4)], "v5p:4", "JAX joins 4 devices, but 2 hosts have 8: they are of two"),
    "none": (
        [device(), device(error="its devices did not appear")],
        "v5p:4",
        "(process 1): its devices did not appear",
    ),
}


@pytest.mark.parametrize("found, expect, text", DEVICES.values(), ids=DEVICES)
def test_devices_that_are_not_those_of_the_spec(found, expect, text):
    code, said = preflight_devices.judge(dict(enumerate(found)), preflight_devices.expected(expect))
    assert said.startswith(text) or text in said
    assert code == (Exit.PEERS if "appear" in text else Exit.CONFIGURATION)


@pytest.mark.parametrize(
    "kind, chip",
    [("TPU v5", "v5p"), ("TPU v5p", "v5p"), ("TPU v6 lite", "v6e"), ("NVIDIA H100 80GB HBM3", "h100"), ("cpu", "cpu")],
)
def test_kinds_of_devices(kind, chip):
    assert preflight_devices.judge({0: device(8, kind)}, (chip, 8)) is None


def test_devices_of_this_process():
    assert preflight_devices.check("cpu:8", timeout=60) == "1 process(es) with 8 x cpu each"
    with pytest.raises(ConfigError, match=r"8 x cpu, but it must be 4 x v5p; the accelerator's plugin is not"):
        preflight_devices.check("v5p:4", timeout=60)
    with pytest.raises(ConfigError, match=r"--expect=v9:4, but it must be CHIP:DEVICES"):
        preflight_devices.check("v9:4", timeout=60)


def test_devices_that_do_not_appear_and_do_not_answer(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: time.sleep(5))
    with pytest.raises(ConnectionError, match=r"its devices did not appear in 0 s; does another process hold them"):
        preflight_devices.check("cpu:8", timeout=0.2)
    monkeypatch.setattr(preflight_devices.runtime, "from_first_process", lambda text: time.sleep(5))
    with pytest.raises(ConnectionError, match=r"2 processes have met, but an exchange between their devices did"):
        preflight_devices._reach(2, 0.2)


class Store:
    """JAX's keys and values, without a service."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value):
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, milliseconds):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, milliseconds / 1000):
                raise RuntimeError("DEADLINE_EXCEEDED")
            return self.values[key]


def test_all_are_told_of_the_devices_of_one(monkeypatch):
    """Process 2 never says anything."""
    monkeypatch.setattr(distributed, "PATIENCE", 0.1)
    store, verdicts = Store(), {}
    state = type("State", (), {"client": store, "num_processes": 3, "process_id": 0})()
    monkeypatch.setattr(preflight_devices.jax_distributed, "global_state", state)
    store.key_value_set(preflight_devices.KEY.format(1), json.dumps(device()))
    verdicts[0] = preflight_devices._agree(device(), ("v5p", 4), 0.2)
    state.process_id = 1
    verdicts[1] = preflight_devices._agree(device(), ("v5p", 4), 0.2)
    assert tuple(verdicts[1]) == verdicts[0] and "host unknown (process 2): it said nothing" in verdicts[0][1]


def test_this_machine_is_well(tmp_path):
    """The facts of the real host, whose mark is found and removed."""
    facts = preflight.facts_of_host(tiny(), tmp_path)
    assert facts["versions"]["jax"] == jax.__version__ and facts["problems"] == []
    assert os.listdir(tmp_path) == [facts["storage"]["mark"]] and not facts["storage"]["made"]
    assert preflight.Judge(tmp_path, 1)({0: {"host": "here", "offset": 0.0, "facts": facts}}) is None
    assert os.listdir(tmp_path) == []
    facts = preflight.facts_of_host(tiny(), tmp_path / "new")
    assert preflight.Judge(tmp_path / "new", 1)({0: {"host": "here", "offset": 0.0, "facts": facts}}) is None
    assert os.listdir(tmp_path) == []
