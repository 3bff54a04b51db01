"""Whether every process has the devices that the run counts on, and whether they reach each other."""

import json
import socket
from typing import Any

import jax
from jax._src import distributed as jax_distributed  # JAX's store of keys and values has no public name

from k3jax import distributed, runtime
from k3jax.config import require
from k3jax.distributed import Problem
from k3jax.exits import Exit
from k3jax.preflight import name_of

# How the kind of a device begins, by the chip's name in `k3jax.plan.chips`; the longest that fits counts.
KINDS = {
    "cpu": ("cpu",),
    "v4": ("TPU v4",),
    "v5e": ("TPU v5 lite", "TPU v5e"),
    "v5p": ("TPU v5p", "TPU v5"),
    "v6e": ("TPU v6 lite", "TPU v6e"),
    "tpu7x": ("TPU7x",),
    "h100": ("NVIDIA H100",),
    "h200": ("NVIDIA H200",),
    "b200": ("NVIDIA B200",),
}
KEY, VERDICT = "k3jax/devices/{}", "k3jax/devices/verdict"


def expected(text: str) -> tuple[str, int] | None:
    """``v5p:4`` as ("v5p", 4): the chip and the devices of a process; None for nothing.

    Raises:
      ConfigError: another form, or an unknown chip.
    """
    if not text:
        return None
    chip, _, count = text.partition(":")
    require(
        chip in KINDS and count.isdecimal() and int(count) > 0,
        f"--expect={text}, but it must be CHIP:DEVICES of a process, with a chip of {', '.join(KINDS)}",
    )
    return chip, int(count)


def check(expect: str, *, timeout: float) -> str:
    """Looks at the devices of all processes and lets them exchange something. Returns what they have, in words.

    Args:
      expect: as :func:`expected`; empty: all processes must have as many of the same kind as most.
      timeout: seconds for the devices to appear, and again for the exchange.

    Raises:
      ConfigError: a process has other devices. ConnectionError: they do not appear, or do not reach each other.
    """
    wanted = expected(expect)
    found = _look(timeout)
    distributed.refuse(_agree(found, wanted, timeout))
    processes = jax_distributed.global_state.num_processes
    if processes > 1:
        _reach(processes, timeout)
    return f"{processes} process(es) with {found['count']} x {found['kind']} each"


def _look(timeout: float) -> dict[str, Any]:
    """The devices of this process, or why there are none."""
    said: dict[str, Any] = {"host": socket.gethostname(), "count": 0, "kind": "none", "error": ""}
    try:
        local, everywhere = runtime.answer_within(timeout, lambda: (jax.local_devices(), jax.device_count()))
    except TimeoutError:
        return said | {
            "error": f"its devices did not appear in {timeout:.0f} s; does another process hold them, or is a host of "
            "the topology down?"
        }
    except RuntimeError as error:
        first = str(error).strip().partition("\n")[0]
        return said | {"error": f"JAX cannot use its devices: {first}; is the accelerator's plugin installed there?"}
    return said | {"count": len(local), "kind": local[0].device_kind, "all": everywhere}


def _agree(found: dict[str, Any], wanted: tuple[str, int] | None, timeout: float) -> Problem | None:
    """What process 0 makes of all that was found, on all processes."""
    state = jax_distributed.global_state
    if state.client is None:
        return judge({0: found}, wanted)
    if state.process_id > 0:
        state.client.key_value_set(KEY.format(state.process_id), json.dumps(found))
        try:
            return json.loads(state.client.blocking_key_value_get(VERDICT, _milliseconds(2 * timeout)))
        except RuntimeError:
            return Exit.PEERS, "process 0 said nothing of the devices of all: it stopped"
    hosts = {0: found} | {number: _said(state.client, number, timeout) for number in range(1, state.num_processes)}
    problem = judge(hosts, wanted)
    state.client.key_value_set(VERDICT, json.dumps(problem))
    return problem


def _said(client, number: int, timeout: float) -> dict[str, Any]:
    try:
        return json.loads(client.blocking_key_value_get(KEY.format(number), _milliseconds(timeout)))
    except RuntimeError:
        return {"host": "host unknown", "count": 0, "kind": "none", "error": "it said nothing of its devices"}


def _milliseconds(timeout: float) -> int:
    return round(1000 * (timeout + distributed.PATIENCE))


def judge(hosts: dict[int, dict[str, Any]], wanted: tuple[str, int] | None) -> Problem | None:
    """All that is wrong with the devices, by host."""
    silent = [f"{name_of(hosts, number)}: {said['error']}" for number, said in hosts.items() if said["error"]]
    if silent:
        return Exit.PEERS, "\n".join(silent)
    values = [(said["kind"], said["count"]) for said in hosts.values()]
    usual = max(values, key=lambda value: (values.count(value), value == values[0]))
    kind, count = wanted or (usual[0], usual[1])
    lines = []
    for number, said in hosts.items():
        right = _is(said["kind"], kind) if wanted else said["kind"] == kind
        if not right or said["count"] != count:
            lines.append(
                f"{name_of(hosts, number)}: {said['count']} x {said['kind']}, but it must be {count} x {kind}; "
                + _remedy(said, kind, right)
            )
    total = count * len(hosts)
    if not lines and hosts[0]["all"] != total:
        lines = [f"JAX joins {hosts[0]['all']} devices, but {len(hosts)} hosts have {total}: they are of two slices"]
    return (Exit.CONFIGURATION, "\n".join(lines)) if lines else None


def _is(kind: str, chip: str) -> bool:
    names = [name for known in KINDS.values() for name in known if kind.lower().startswith(name.lower())]
    return bool(names) and max(names, key=len) in KINDS[chip]


def _remedy(said: dict[str, Any], kind: str, right: bool) -> str:
    if right:
        return "a device is missing or hidden (CUDA_VISIBLE_DEVICES, TPU_VISIBLE_CHIPS), or the spec is of other hosts"
    if said["kind"] == "cpu":
        return "the accelerator's plugin is not installed there (requirements-tpu.txt, requirements-cuda13.txt)"
    return "leave that host out, or name its kind in the spec's topology"


def _reach(processes: int, timeout: float) -> None:
    """Raises ConnectionError where a small exchange between all devices does not end."""
    try:
        runtime.answer_within(timeout, lambda: runtime.from_first_process("reached"))
    except (TimeoutError, RuntimeError) as error:
        why = f"did not end in {timeout:.0f} s" if isinstance(error, TimeoutError) else f"failed: {error}"
        raise ConnectionError(
            f"{processes} processes have met, but an exchange between their devices {why.partition(chr(10))[0]}; look "
            "at the network between the hosts: firewall, interface (NCCL_SOCKET_IFNAME), links of the slice"
        ) from error
