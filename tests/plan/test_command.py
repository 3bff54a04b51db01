"""The planner's command: which stage of a run it plans, where it writes, and how it says amounts."""

import jax
import pytest

from k3jax import presets
from k3jax.config import ConfigError, replace
from k3jax.plan import __main__ as command
from k3jax.plan import chips, compiled, units
from k3jax.run_config import Stage


def test_of_several_stages_the_hardest_is_planned(capsys):
    tiny = replace(presets.load("tiny"), batch=8, seq_len=64, steps=100)
    assert command.hardest(tiny) is tiny and not capsys.readouterr().out
    long = replace(tiny, stages=(Stage(start=50, seq_len=512, batch=1), Stage(start=70, seq_len=128, batch=4)))
    assert command.hardest(long).seq_len == 512
    assert "of 3 stages number 1 needs most, and is planned: rows of 512 tokens" in capsys.readouterr().out
    cut = replace(tiny, stages=(Stage(start=50, seq_len=128, batch=4, micro_batches=4),))
    assert command.hardest(cut).seq_len == 64


@pytest.mark.parametrize("folder", ["file", "file/below", "/proc/none"])
def test_a_folder_that_cannot_be_written_is_said_before_anything_is_computed(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ConfigError, match=rf"--out={folder}: nothing can be written there"):
        command.writable(folder)
    assert (tmp_path / "file").read_text() == "kept"


def test_a_new_folder_is_made(tmp_path):
    assert command.writable("") is None
    assert command.writable(str(tmp_path / "new" / "folder")).is_dir()


@pytest.mark.parametrize(
    "said, expected",
    [
        (units.size(21.088e9), "21.09 GB"),
        (units.size(-1.688e9), "-1.688 GB"),
        (units.size(999_990), "1 MB"),
        (units.size(0), "0 B"),
        (units.size(2.5e13), "25 TB"),
        (units.seconds(16.197), "16.2 s"),
        (units.seconds(0.0123), "12.3 ms"),
        (units.seconds(2.2e-7), "0.22 us"),
        (units.seconds(0), "0 us"),
    ],
)
def test_amounts_have_the_unit_that_suits(said, expected):
    assert said == expected


@pytest.mark.parametrize(
    "said, message",
    [
        (
            "INTERNAL: Ragged all-to-all is currently not supported in limited ICI routing settings\nmore",
            r"cannot do this step on v5e:16x16: INTERNAL: Ragged .*settings; --layout \.\.\.,transport=AllGather",
        ),
        ("INTERNAL: something else", "the compiler cannot do this step on v5e:16x16: INTERNAL: something else$"),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20G of 16G hbm.",
            "the compiler finds no way to fit the step on v5e:16x16: .* Used 20G of 16G hbm.*--no-compile says",
        ),
    ],
)
def test_what_the_compiler_refuses_is_said_in_a_line(said, message):
    class Refused:
        def compile(self):
            raise jax.errors.JaxRuntimeError(said)

    with pytest.raises(ConfigError, match=message):
        compiled._compile(Refused(), chips.topology("v5e:16x16"))
