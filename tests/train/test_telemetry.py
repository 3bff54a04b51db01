"""The account of wall time, the training line, what a chip can do, traces; and that fetching is one step late."""

import contextlib
from types import SimpleNamespace
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax import config as c
from k3jax import guard, loop, peak
from k3jax.config import ConfigError
from k3jax.metrics import MetricsWriter
from k3jax.progress import Progress
from k3jax.step import StepMetrics
from k3jax.telemetry import clock as clock_module
from k3jax.telemetry import line, trace
from k3jax.telemetry.clock import Clock, Pace, StepTime, goodput


@pytest.fixture
def now(monkeypatch):
    """A clock that moves only when told to: ``now.sleep(seconds)``."""
    fake = SimpleNamespace(seconds=1000.0)
    fake.sleep = lambda seconds: setattr(fake, "seconds", fake.seconds + seconds)
    fake.monotonic = fake.time = lambda: fake.seconds
    monkeypatch.setattr(clock_module, "time", fake)
    return fake


def booked(clock):
    return {name: seconds for name, seconds in clock.totals().items() if seconds}


def test_every_second_is_booked_once_and_the_classes_add_up(now):
    clock = Clock(began=now.time() - 4)
    with clock.book("compile"):
        now.sleep(10)
        with clock.book("other"):
            now.sleep(2)
        now.sleep(1)
    with clock.book("data"):
        now.sleep(3)
    with clock.steps():
        for number in range(3):
            with clock.book("data"):
                now.sleep(0.5)
            now.sleep(1)
            with clock.book("device"):
                now.sleep(5)
            assert sum(clock.totals().values()) == pytest.approx(now.seconds - 996)
            assert clock.settle(useful=number != 1) == StepTime(data=0.5, device=5.0, host=1.0)
            with clock.book("checkpoint"):
                now.sleep(7)
        assert clock.pace() == Pace(3, StepTime(1.5, 15.0, 3.0)) and clock.pace().steps == 0
        now.sleep(0.25)
    totals = booked(clock)
    assert totals == dict(other=6, compile=11, data=4.5, useful=12, skipped=6, checkpoint=21, lost=0.25)
    assert sum(totals.values()) == pytest.approx(now.seconds - 996)
    assert goodput(clock.totals()) == pytest.approx(12 / 60.75)
    with pytest.raises(ValueError, match=r"one of device, compile, .*not as 'checkpoints'"):
        clock.book("checkpoints").__enter__()


def test_time_is_charged_where_an_exception_left_it(now):
    clock = Clock()
    with pytest.raises(KeyboardInterrupt), clock.steps(), clock.book("evaluation"):
        now.sleep(2)
        raise KeyboardInterrupt
    now.sleep(1)
    assert booked(clock) == {"evaluation": 2, "other": 1}


def test_a_restart_takes_over_the_account_and_loses_what_is_made_again(now, tmp_path):
    """Ten steps of 1 s with a line at each, a kill, 100 s of nothing, and a restart from step 4 that takes 3 s."""
    path, clock = tmp_path / "metrics.jsonl", Clock(began=now.time() - 2)
    with MetricsWriter(path) as writer, clock.steps():
        for step in range(1, 11):
            now.sleep(1)
            clock.settle(useful=step != 3)
            line = {"step": step, "kind": "train", "loss": 1.0, "unix": now.time(), "clock": clock.totals()}
            writer.write(line)
    now.sleep(103)
    again = Clock(began=now.time() - 3)
    again.resume(path, 4)
    assert booked(again) == {"useful": 3, "skipped": 1, "lost": 6 + 100, "other": 2 + 3}
    assert sum(again.totals().values()) == pytest.approx(now.seconds - 998), "all wall time since the first start"
    from_scratch = Clock(began=now.time() - 3)
    from_scratch.resume(path, 0)
    assert booked(from_scratch) == {"lost": 110, "other": 5}
    early = Clock(began=now.time() - 104)  # seems to have started a second before the last line
    early.resume(path, 10)
    assert booked(early) == {"useful": 9, "skipped": 1, "other": 2 + 103}


def test_steps_that_a_checkpoint_kept_are_not_lost(now, tmp_path):
    """Training lines every ten steps of 1 s, a checkpoint of step 18 that takes 2 s, and a kill after step 19."""
    for saved, kept in ((True, 18), (False, 10)):
        path, clock = tmp_path / f"{saved}.jsonl", Clock()
        with MetricsWriter(path) as writer, clock.steps():
            for step in range(1, 20):
                now.sleep(1)
                clock.settle(useful=True)
                kind = {10: "train", 18: "event", 19: "event"}.get(step)
                if step == 18:
                    with clock.book("checkpoint"):
                        now.sleep(2)
                if kind and (saved or step != 18):
                    event = {"event": "saved" if step == 18 else "skipped"} if kind == "event" else {"loss": 1.0}
                    account = {"unix": now.time(), "clock": clock.totals()}
                    writer.write({"step": step, "kind": kind, **event, **account})
        now.sleep(5)
        again = Clock()
        again.resume(path, 18)
        assert booked(again) == {"useful": kept, "checkpoint": 2, "lost": 19 - kept + 5}


@pytest.mark.parametrize("reason", ["done", "preempted", "interrupted", "spike", "killed"])
def test_only_a_pause_that_nobody_wanted_is_lost(now, tmp_path, reason):
    """Two steps of 1 s, an end, 100 s of nothing, and a start that takes 3 s, twice."""
    path, unwanted = tmp_path / "metrics.jsonl", 100.0 * (reason in ("spike", "killed"))
    for life in range(1, 4):
        clock = Clock(began=now.time() - 3)
        if life > 1:
            clock.resume(path, 2 * life - 2)
        assert sum(clock.totals().values()) == pytest.approx(5 * (life - 1) + 3 + unwanted * (life - 1))
        assert clock.totals()["lost"] == unwanted * (life - 1)
        with MetricsWriter(path, resume_step=2 * life - 2) as writer, clock.steps():
            for _ in range(2):
                now.sleep(1)
                clock.settle(useful=True)
            line = {"step": 2 * life, "kind": "event", "unix": now.time(), "clock": clock.totals()}
            writer.write(line | {"event": "stopped", "reason": "done"})  # not the last line: says nothing of the pause
            end = {"event": "saved"} if reason == "killed" else {"event": "stopped", "reason": reason}
            writer.write(line | end)
        now.sleep(103)
    assert goodput(line["clock"]) == pytest.approx(6 / (15 + 2 * unwanted))


def test_a_file_without_an_account_changes_nothing(now, tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write({"step": 1, "kind": "train", "loss": 1.0})
    clock = Clock()
    clock.resume(tmp_path / "metrics.jsonl", 1)
    assert not booked(clock)


def metrics_of(loss, layers=None):
    true, false = np.array(True), np.array(False)
    verdict = guard.Verdict(true, true, false, np.float32(1), np.float32(1), np.int32(0), false)
    roles = {"matrix": np.float32(2)}
    return StepMetrics(
        loss=loss, weight=np.float32(8), accuracy=np.float32(0.5), grad_norm=np.float32(2), grad_norm_by_role=roles,
        param_norm_by_role=roles, update_rms=roles, lr=np.float32(0.1), verdict=verdict, layers=layers or {},
    )  # fmt: skip


def test_the_line_of_a_step_says_what_was_measured(now):
    clock = Clock()
    with clock.steps():
        for _ in range(2):
            with clock.book("data"):
                now.sleep(0.5)
            with clock.book("device"):
                now.sleep(1.5)
            clock.settle(useful=True)
        with clock.book("checkpoint"):
            now.sleep(4)
        layers = {
            "load": jnp.array([[4, 0, 0, 0], [1, 1, 1, 1]]),
            "load_max_over_mean": jnp.array([4.0, 1.0]),
            "dead_share": jnp.array([0.75, 0.0]),
            "margin": jnp.array([0.1, 0.2]),
            "bias_drift": jnp.array([0.0, 0.5]),
            "max_logit": jnp.array([[3.0, 7.0]]),
            "depth_weights": jnp.arange(12.0).reshape(2, 2, 3),
        }
        seen = metrics_of(jnp.float32(2 * np.log(2)), layers)
        found = line.train_line(
            seen,
            clock,
            lr=0.1,
            tokens_per_step=100,
            flops_per_token=6e9,
            peak_flops=1e12,
            bytes_per_token=4.0,
        )
    assert found["bits_per_token"] == pytest.approx(2) and found["bits_per_byte"] == pytest.approx(0.5)
    assert found["tokens_per_second"] == pytest.approx(200 / 4), "checkpoints are no part of a step"
    assert found["mfu"] == pytest.approx(6e9 * 50 / 1e12)
    assert found["step_seconds"] == {"data": 0.5, "device": 1.5, "host": 0.0}
    assert found["goodput"] == pytest.approx(3 / 8) and found["seconds"] == 8
    np.testing.assert_allclose(found["balance"]["dead_share"], [0.75, 0])
    np.testing.assert_array_equal(found["max_attention_logit"], [7])
    np.testing.assert_array_equal(found["depth_weights"]["ffn"], [[3, 4, 5], [9, 10, 11]])
    assert "kda" not in found and 0 < found["memory"]["bytes"] <= found["memory"]["peak_bytes"]
    without = line.train_line(seen, clock, lr=0.1, tokens_per_step=100, flops_per_token=6e9, peak_flops=None)
    assert not without.keys() & {"tokens_per_second", "mfu", "step_seconds", "bits_per_byte"}


def test_model_flops_are_three_forward_passes_whatever_is_recomputed(micro):
    full = c.replace(micro.model, remat="full")
    flops = line.model_flops_per_token(micro.model, 40)
    assert flops == line.model_flops_per_token(full, 40) > line.model_flops_per_token(micro.model, 20)


class State(NamedTuple):
    """As much of a train state as the loop looks at."""

    step: int
    weights: None


class Rows:
    """A data set without data."""

    packing_report: ClassVar[dict] = {}

    def local(self, part, parts):
        return self

    def __getitem__(self, index):
        return None

    def iterate(self, first, count, workers):
        return iter([None] * count)

    def position(self, made):
        return {}


def test_a_step_is_fetched_when_the_next_has_been_sent(micro, tmp_path, monkeypatch):
    """A step that only records: when it is sent, and when anything that it reports is read."""
    events = []

    class Reported:
        def __init__(self, number):
            self.number = number

        def __array__(self, dtype=None, copy=None):
            if ("fetched", self.number) not in events:
                events.append(("fetched", self.number))
            return np.array(1.0, np.float32)

        def __float__(self):
            return float(self.__array__())

    def step(state, batch):
        number = state.step + 1
        events.append(("sent", number))
        return state._replace(step=number), metrics_of(Reported(number))

    config = c.replace(micro, steps=5, log_every=2, eval_every=100, checkpoint_every=100)
    monkeypatch.setattr(loop, "compile_step", lambda *_: step)
    written = []
    with Progress(5, stream=open(tmp_path / "progress", "w")) as progress:
        tools = loop.Tools(
            run=tmp_path,
            mesh=None,
            shardings=None,
            checkpoints=SimpleNamespace(save=lambda *_, **__: events.append("saved"), wait=lambda: None),
            writers=SimpleNamespace(write=written.append),
            clock=Clock(),
            progress=progress,
            stop=SimpleNamespace(at_step=lambda _: None, hurried=False, nothing_to_save=contextlib.nullcontext),
            peak_flops=None,
        )
        loop.run_stages(config, State(0, None), lambda _: loop.StageData(Rows(), {}, "", None, {}), tools)
    order = [("sent", 1)]
    for number in range(2, 6):
        order += [("sent", number), ("fetched", number - 1)]
    assert events == [*order, ("fetched", 5), "saved"]
    assert [line["step"] for line in written if line["kind"] == "train"] == [1, 2, 4, 5]


def test_a_chip_is_known_by_its_longest_name():
    assert peak.device_peak("TPU v5 lite") == 197e12 and peak.device_peak("TPU v5p") == 459e12
    assert peak.device_peak("TPU v5") == 459e12 and peak.device_peak("TPU v6 lite") == 918e12
    assert peak.device_peak("TPU7x") == 1153.5e12
    assert peak.device_peak("NVIDIA H100 80GB HBM3") == 989e12 and peak.device_peak("NVIDIA H100 PCIe") == 756e12
    assert peak.device_peak("NVIDIA H200") == 989e12 and peak.device_peak("NVIDIA L40S") == 362e12
    assert peak.device_peak("TPU v99") is None


def test_a_cpu_is_measured_once_for_a_run(tmp_path, monkeypatch):
    first = peak.of_devices(tmp_path)
    assert first.flops_per_second > 1e8 and "measured, float32" in first.source
    monkeypatch.setattr(peak, "measure", lambda: pytest.fail("measured again"))
    assert peak.of_devices(tmp_path) == first


@pytest.mark.parametrize("text", ["3", "3:", "a:b", "0:3", "5:4", "4:11", "-1:2", "1:2:3"])
def test_bad_spans_to_trace_are_named(text):
    with pytest.raises(ConfigError, match=f"--profile={text}: it must "):
        trace.parse(text, 10)


def test_a_trace_and_the_text_of_a_program_are_written(tmp_path):
    assert not trace.parse("", 10)
    program = jax.jit(jnp.sin).lower(1.0).compile()
    with trace.Trace(tmp_path, trace.parse("2:3", 3)) as tracer:
        for step in range(1, 4):
            tracer.before(step)
            assert tracer._on == (step > 1)
            tracer.after(step, program(1.0))
            assert tracer._on == (step == 2)
    assert list(tmp_path.glob("profile/plugins/profile/*/*.xplane.pb"))
    assert "HloModule" in trace.dump_hlo(tmp_path, program, 0).read_text()
