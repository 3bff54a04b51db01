"""How the processes of a run find each other: within a minute all have come, or all are told who has not.

JAX's own start-up knows processes by number only, and waits for five minutes. So they meet before it: process 0 opens
the port of the coordinator, the others tell it their number, their host and how many they expect, and it answers all of
them at once. Then JAX's service takes over the port. What they say of their hosts on that occasion can be judged before
anything is computed (`k3jax.preflight`).
"""

import contextlib
import dataclasses
import json
import os
import re
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from k3jax.config import ConfigError
from k3jax.data import DataError
from k3jax.exits import Exit

TIMEOUT = 60
LINGER = 3.0  # seconds in which process 0 tells a mistake to those who come later
PATIENCE = 5.0  # seconds for a single connection, line or farewell
CLOCK = "what time is it"
ERRORS = {
    Exit.CONFIGURATION: ConfigError, Exit.DATA: DataError, Exit.STORAGE: OSError, Exit.PEERS: ConnectionError,
}  # fmt: skip

type Problem = tuple[int, str]  # the exit code, and the message
type Judge = Callable[[dict[int, dict[str, Any]]], Problem | None]


@dataclasses.dataclass(frozen=True)
class Membership:
    """One process of a run of several.

    coordinator: HOST:PORT of process 0. hosts: names by process, if they are known, for messages.
    """

    coordinator: str
    processes: int
    process: int
    hosts: tuple[str, ...] = ()

    def __post_init__(self):
        if self.processes < 1:
            raise ConfigError(f"--processes={self.processes}, but a run has at least one")
        if not 0 <= self.process < self.processes:
            raise ConfigError(f"--process={self.process}, but it must lie in 0..{self.processes - 1}")
        if self.hosts and len(self.hosts) != self.processes:
            raise ConfigError(
                f"{len(self.hosts)} hosts are named ({', '.join(self.hosts)}) for {self.processes} processes"
            )
        host, colon, port = self.coordinator.rpartition(":")
        if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16):
            raise ConfigError(f"the coordinator is HOST:PORT of process 0, got {self.coordinator!r}")

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the coordinator."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)

    def name(self, process: int, host: str = "") -> str:
        """A process, with its host if that is known."""
        host = host or (self.hosts[process] if self.hosts else "")
        return f"{process} ({host})" if host else f"{process}"


def join_processes(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    hosts: Sequence[str] = (),
    timeout: float = TIMEOUT,
    facts: dict[str, Any] | None = None,
    judge: Judge | None = None,
) -> None:
    """Joins the processes of a run that spans several; one that is alone is only judged. To be called before anything
    computes.

    Args:
      coordinator, processes, process, hosts: as for :func:`membership`.
      timeout: seconds in which all must have come, counted by the first one.
      facts: what this process says of its host, in JSON types.
      judge: asked by process 0, with {process: {"host": name, "offset": seconds that its clock is ahead of process 0's,
        "facts": its facts}}.

    Raises:
      ConfigError: the numbers do not fit together, among each other or with those of another process.
      ConnectionError: not all came in time: the message names who is missing, or why process 0 cannot be reached.
      ConfigError, DataError, ConnectionError, OSError: on all processes alike, what ``judge`` found (:data:`ERRORS`).
    """
    began = time.monotonic()
    member = membership(coordinator, processes, process, hosts=hosts, timeout=timeout)
    if member is None or jax.distributed.is_initialized():
        if judge is not None:
            refuse(judge({0: {"host": socket.gethostname(), "offset": 0.0, "facts": facts}}))
        return
    reserve = min(15.0, timeout / 4)
    meet(member, deadline=began + timeout - reserve, facts=facts, judge=judge)
    left = round(max(reserve, began + timeout - time.monotonic()))
    try:
        jax.distributed.initialize(member.coordinator, member.processes, member.process, initialization_timeout=left)
    except RuntimeError as error:
        proxies = sorted(name for name in os.environ if name.lower() in ("http_proxy", "https_proxy", "grpc_proxy"))
        hint = f"; {', '.join(proxies)} may be in the way: unset it for this command" if proxies else ""
        raise ConnectionError(
            f"all {member.processes} processes came to {member.coordinator}, but process {member.process} could not "
            f"join JAX's service there: {str(error).partition(chr(10))[0]}{hint}"
        ) from error


def membership(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    hosts: Sequence[str] = (),
    timeout: float = TIMEOUT,
) -> Membership | None:
    """What this process is, or None for a process that is alone.

    What is not given comes from ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID``, or from a
    cluster that JAX knows (TPU pods, Slurm, Open MPI, Kubernetes). ``processes=1`` is alone on a cluster, too.

    Args:
      coordinator: HOST:PORT of process 0.
      hosts: names by process.

    Raises:
      ConfigError: something is missing or does not fit.
      ConnectionError: the cluster's coordinator has no address.
    """
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    processes = _number("JAX_NUM_PROCESSES") if processes is None else processes
    process = _number("JAX_PROCESS_ID") if process is None else process
    if processes == 1:
        return None
    if None in (coordinator, processes, process):
        coordinator, processes, process = _ask_cluster(coordinator, processes, process, timeout)
    if processes == 1 or (coordinator, processes, process) == (None, None, None):
        return None
    given = {"--coordinator=HOST:PORT": coordinator, "--processes": processes, "--process": process}
    missing = [flag for flag, value in given.items() if value is None]
    if missing:
        known = ", ".join(f"{flag.partition('=')[0]}={value}" for flag, value in given.items() if value is not None)
        raise ConfigError(f"a run of several processes needs {', '.join(missing)} as well; there is {known} so far")
    return Membership(coordinator, processes, process, tuple(hosts) or _hosts_of_cluster(processes))


def _number(variable: str) -> int | None:
    text = os.environ.get(variable)
    if text is not None and not text.isdecimal():
        raise ConfigError(f"the environment variable {variable} must be a number, got {text!r}")
    return None if text is None else int(text)


def _ask_cluster(coordinator, processes, process, timeout):
    """JAX offers the numbers that it finds only to its own start-up: its module is not public."""
    from jax._src.clusters import ClusterEnv

    try:
        found = ClusterEnv.auto_detect_unset_distributed_params(
            coordinator, processes, process, None, None, round(timeout)
        )
    except RuntimeError as error:
        raise ConnectionError(f"the cluster's coordinator was not found in {timeout:.0f} s: {error}") from error
    return found[:3]


def _hosts_of_cluster(processes: int) -> tuple[str, ...]:
    """Host names by process, if a variable of the environment lists as many or each for equally many processes."""
    names = [name for name in os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if name]
    names = names or _expanded(os.environ.get("SLURM_STEP_NODELIST", ""))
    words = any(" " in name for name in names)  # libtpu puts a sentence there when it knows none
    if not names or words or processes % len(names):
        return ()
    return tuple(names[number * len(names) // processes] for number in range(processes))


def _expanded(nodes: str) -> list[str]:
    """Slurm's ``a[01-03,7],b`` as a01, a02, a03, a7, b."""
    names = []
    for prefix, ranges in re.findall(r"([^,\[\]]+)(?:\[([^\]]*)\])?", nodes):
        for part in ranges.split(",") if ranges else [""]:
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1) if first else [""]
            names += [f"{prefix}{number:0{len(first)}}" if first else prefix for number in numbers]
    return names


def meet(
    member: Membership, *, deadline: float, facts: dict[str, Any] | None = None, judge: Judge | None = None
) -> None:
    """Returns when all processes have come to process 0, and ``judge`` has found nothing.

    Args:
      deadline: by ``time.monotonic()``; the earliest of those who have come counts for all.

    Raises: as :func:`join_processes`.
    """
    refuse(_receive(member, deadline, facts, judge) if member.process == 0 else _visit(member, deadline, facts))


def refuse(problem: Problem | None) -> None:
    """Raises the error of a problem, if there is one."""
    if problem is not None:
        code, text = problem
        raise ERRORS[code](text)


def _receive(member: Membership, deadline: float, facts: dict[str, Any] | None, judge: Judge | None) -> Problem | None:
    """Process 0: takes in the others and answers them."""
    arrived, said, connections, problem = {0: socket.gethostname()}, {0: (None, facts)}, [], None
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listen(member))
        while len(arrived) < member.processes and (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            with contextlib.suppress(TimeoutError):
                connection = stack.enter_context(listener.accept()[0])
                hello = _hello(connection)
                if hello is None:
                    continue
                connections.append(connection)
                clash = _clash(member, hello, arrived)
                problem = problem or clash
                deadline = min(deadline, time.monotonic() + (LINGER if clash else hello["seconds"]))
                if clash is None:
                    arrived[hello["process"]] = hello["host"]
                    said[hello["process"]] = connection, hello.get("facts")
        if problem is None and len(arrived) < member.processes:
            problem = Exit.PEERS, _missing(member, arrived)
        if problem is None and judge is not None:
            problem = judge({
                number: {"host": arrived[number], "offset": _offset(connection), "facts": own}
                for number, (connection, own) in sorted(said.items())
            })  # fmt: skip
        _answer(connections, problem)
    return problem


def _listen(member: Membership) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    port = member.address[1]
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=1024)
    except OSError as error:
        raise ConnectionError(
            f"process 0 cannot open port {port} on {socket.gethostname()}: {error.strerror}; is a run still going on "
            "there? Another port in --coordinator would do"
        ) from error


def _hello(connection: socket.socket) -> dict | None:
    """What a process says of itself; None for a visitor that is none."""
    connection.settimeout(PATIENCE)
    try:
        hello = json.loads(_line(connection))
        kinds = {"process": int, "processes": int, "host": str, "seconds": (int, float)}
        return hello if all(isinstance(hello[key], kind) for key, kind in kinds.items()) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _line(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as file:
        return file.readline(2**20)


def _offset(connection: socket.socket | None) -> float:
    """Seconds that another process's clock is ahead at least, whatever the way there and back took; 0 where it gives no
    answer, which its next step will show."""
    if connection is None:
        return 0.0
    try:
        asked = time.time()
        connection.sendall(json.dumps(CLOCK).encode() + b"\n")
        there = float(json.loads(_line(connection)))
        answered = time.time()
    except (OSError, ValueError, TypeError):
        return 0.0
    return min(there - asked, 0.0) + max(there - answered, 0.0)


def _clash(member: Membership, hello: dict, arrived: dict[int, str]) -> Problem | None:
    process, host = hello["process"], hello["host"]
    if hello["processes"] != member.processes:
        return Exit.CONFIGURATION, (
            f"process {process} ({host}) was started with --processes={hello['processes']}, but process 0 "
            f"({arrived[0]}) with --processes={member.processes}"
        )
    if process in arrived:
        return Exit.CONFIGURATION, (
            f"two processes were started with --process={process}, on {arrived[process]} and on {host}; each of the "
            f"{member.processes} needs a number of its own"
        )
    return None


def _missing(member: Membership, arrived: dict[int, str]) -> str:
    missing = [member.name(number) for number in range(member.processes) if number not in arrived]
    there = [member.name(number, host) for number, host in sorted(arrived.items())]
    host = member.address[0]
    aside = (
        "" if _is_here(host) else f"; {host} is no address of process 0's host {arrived[0]}, so they may ask elsewhere"
    )
    return (
        f"of {member.processes} processes {len(missing)} did not come to {member.coordinator} in time: "
        f"{some(missing)}; there are {some(there)}{aside}"
    )


def some(names: list[str], limit: int = 16) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _is_here(host: str) -> bool:
    """Whether a name stands for an address of this machine: only such an address can be bound."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
    except OSError:
        return False
    return False


def _answer(connections: list[socket.socket], problem: Problem | None) -> None:
    """Tells all, then waits until they have hung up, so that the port is free at once."""
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.sendall(json.dumps(problem).encode() + b"\n")
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.recv(1)


def _visit(member: Membership, deadline: float, facts: dict[str, Any] | None) -> Problem | None:
    """The other processes: what process 0 says."""
    connection = _connect(member, deadline)
    left = max(deadline - time.monotonic(), 0.0)
    hello = dict(process=member.process, processes=member.processes, host=socket.gethostname(), seconds=left)
    with connection:
        connection.settimeout(left + PATIENCE)
        try:
            connection.sendall(json.dumps(hello | {"facts": facts}).encode() + b"\n")
            while (problem := json.loads(_line(connection))) == CLOCK:
                connection.sendall(json.dumps(time.time()).encode() + b"\n")
        except (OSError, ValueError) as error:
            raise ConnectionError(
                f"process {member.process} ({hello['host']}) reached {member.coordinator}, but got no answer of a "
                "process 0: it stopped, it began without this one, or the port belongs to another program"
            ) from error
    return problem if problem is None else tuple(problem)


def _connect(member: Membership, deadline: float) -> socket.socket:
    (host, port), began = member.address, time.monotonic()
    while True:
        try:
            return socket.create_connection((host, port), timeout=PATIENCE)
        except socket.gaierror:
            reason = f"no host of the name {host!r} is known here"
        except ConnectionRefusedError:
            reason = f"{host} is there, but port {port} is closed: process 0 does not run there, or a firewall refuses"
        except TimeoutError:
            reason = f"nothing answers: {host} is down, or a firewall drops what is sent to port {port}"
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() >= deadline:
            waited = time.monotonic() - began
            here = member.name(member.process, socket.gethostname())
            raise ConnectionError(
                f"process {here} could not reach process 0 at {member.coordinator} in {waited:.0f} s: {reason}"
            )
        time.sleep(0.2)
