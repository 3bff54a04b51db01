"""Processes that meet, as threads of this one: what each is told when one is missing or does not fit."""

import contextlib
import re
import socket
import threading
import time

import jax
import pytest

from k3jax import distributed
from k3jax.config import ConfigError
from k3jax.distributed import Membership, join_processes, meet, membership
from launch.local import free_port

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "TPU_WORKER_HOSTNAMES")
SLURM = {
    "SLURM_JOB_ID": "5",
    "SLURM_STEP_NODELIST": "tpu[08-10],gate",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_NODES": "4",
}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in (*VARIABLES, *SLURM):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(distributed, "LINGER", 0.5)
    monkeypatch.setattr(distributed, "PATIENCE", 1.0)


def told(*members: Membership, seconds: float = 1.0, visitor=None) -> list[BaseException | None]:
    """What each of the processes is told, in a minute that takes so many seconds."""
    outcomes: list[BaseException | None] = [None] * len(members)

    def run(number, member):
        try:
            meet(member, deadline=time.monotonic() + seconds)
        except (ConfigError, ConnectionError) as error:
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=(n, member)) for n, member in enumerate(members)]
    for thread in threads:
        thread.start()
    if visitor:
        visitor(members[0].address)
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()
    return outcomes


def members(processes: int, *present: int, **options) -> list[Membership]:
    coordinator = f"localhost:{free_port()}"
    return [Membership(coordinator, processes, number, **options) for number in present]


def test_all_come_and_the_port_is_free_again():
    four = members(4, 0, 3, 1, 2)
    assert told(*four) == [None] * 4
    socket.create_server(("", four[0].address[1]), reuse_port=False).close()


def test_the_missing_are_named_to_all_who_came():
    outcomes = told(*members(5, 0, 2, 4, hosts=("a0", "b1", "c2", "d3", "e4")))
    assert all(isinstance(error, ConnectionError) for error in outcomes)
    for error in outcomes:
        assert r"of 5 processes 2 did not come" in str(error)
        assert r"1 (b1), 3 (d3)" in str(error)
        assert f"0 ({socket.gethostname()})" in str(error)


def test_a_wrong_count_is_told_to_both():
    (zero,) = members(2, 0)
    outcomes = told(zero, Membership(zero.coordinator, 3, 2))
    assert all(isinstance(error, ConfigError) for error in outcomes)
    counts = r"process 2 \(.*\) was started with --processes=3, but process 0 \(.*\) with --processes=2"
    assert all(re.fullmatch(counts, str(error)) for error in outcomes)


def test_a_number_given_twice():
    zero, *ones = members(3, 0, 1, 1)
    outcomes = told(zero, *ones)
    assert {str(error) for error in outcomes} == {str(outcomes[0])}
    assert "two processes were started with --process=1" in str(outcomes[0])


def test_a_closed_port_and_an_unknown_host():
    (closed,) = told(*members(2, 1), seconds=0.5)
    assert isinstance(closed, ConnectionError) and "is closed: process 0 does not run there" in str(closed)
    (unknown,) = told(Membership("no-such-host.invalid:1234", 2, 1), seconds=0.1)
    assert "no host of the name 'no-such-host.invalid'" in str(unknown)


def test_a_port_that_is_taken_and_one_that_answers_otherwise():
    with socket.create_server(("", 0)) as other:
        zero, one = (Membership(f"localhost:{other.getsockname()[1]}", 2, number) for number in (0, 1))
        (taken,) = told(zero)
        assert "process 0 cannot open port" in str(taken)
        (silent,) = told(one, seconds=0.2)
        assert "the port belongs to another program" in str(silent)


def test_a_visitor_that_is_no_process_changes_nothing():
    def visitor(address):
        with contextlib.suppress(OSError):
            time.sleep(0.1)
            with socket.create_connection(address) as connection:
                connection.sendall(b'{"process": "GET / HTTP/1.1"}\n')

    late = members(2, 0, 1)
    assert told(*late, visitor=visitor) == [None, None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, 2, 0), "needs --coordinator=HOST:PORT as well"),
        (("here:1234", None, None), "needs --processes, --process as well; there is --coordinator=here:1234"),
        (("here:1234", 2, 2), r"--process=2, but it must lie in 0\.\.1"),
        (("here:1234", 0, 0), "at least one"),
        (("here", 2, 0), "HOST:PORT"),
        (("here:99999", 2, 0), "HOST:PORT"),
    ],
)
def test_processes_that_do_not_fit_together_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        join_processes(*arguments)


def test_hosts_must_be_as_many_as_processes():
    with pytest.raises(ConfigError, match=r"2 hosts are named \(a, b\) for 3 processes"):
        join_processes("a:1", 3, 0, hosts=("a", "b"))


def test_what_the_environment_says(monkeypatch):
    assert membership() is None
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "here:1234")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    assert membership() == Membership("here:1234", 2, 1, ("a", "b"))
    assert membership(process=0) == Membership("here:1234", 2, 0, ("a", "b"))
    assert membership(processes=1) is None
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "WARNING: no names, please set them")
    assert membership().hosts == ()
    monkeypatch.setenv("JAX_PROCESS_ID", "first")
    with pytest.raises(ConfigError, match="JAX_PROCESS_ID must be a number, got 'first'"):
        membership()


def test_what_a_cluster_says(monkeypatch):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    found = membership()
    assert (found.processes, found.process, found.address[0]) == (8, 3, "tpu08")
    assert found.hosts == ("tpu08", "tpu08", "tpu09", "tpu09", "tpu10", "tpu10", "gate", "gate")
    assert membership(processes=1) is None


def test_jax_is_started_with_what_was_agreed(monkeypatch):
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: calls.append((args, kwargs)))
    zero, one = members(2, 0, 1)
    other = threading.Thread(target=meet, args=(one,), kwargs={"deadline": time.monotonic() + 5})
    other.start()
    join_processes(zero.coordinator, 2, 0, timeout=8)
    other.join()
    ((arguments, options),) = calls
    assert arguments == (zero.coordinator, 2, 0)
    assert 2 <= options["initialization_timeout"] <= 8


def test_a_failure_of_jax_itself_is_a_connection_error(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("DEADLINE_EXCEEDED: nothing\nmore")

    monkeypatch.setattr(jax.distributed, "initialize", fail)
    monkeypatch.setattr(distributed, "meet", lambda *args, **kwargs: None)
    monkeypatch.setenv("https_proxy", "there")
    with pytest.raises(
        ConnectionError, match="could not join JAX's service there: DEADLINE_EXCEEDED: nothing; https_p"
    ):
        join_processes("here:1234", 2, 1)
