"""Settings of the data: round trips, settings on a command line, and what bad ones are told."""

from dataclasses import dataclass, field

import pytest

from k3jax import config_data as c
from k3jax import config_io
from k3jax.config import ConfigError
from k3jax.config_tasks import Copy


@dataclass(frozen=True)
class Run:
    """As the data part of a training run."""

    data: c.Source = field(default=c.StdlibCorpus())
    tokenizer: c.Tokenizer = field(default=c.Bytes())
    packing: c.Packing = field(default=c.Stream())


MIXTURE = c.Mixture(
    parts=(
        c.Weighted(source=c.TextFolder(path="text", pattern="*.md"), weight=3.0, name="notes"),
        c.Weighted(source=c.TokenRecords(path="tokens"), weight=0.5, name="web"),
        c.Weighted(source=Copy(), weight=1.0, name="copying"),
    )
)


@pytest.mark.parametrize(
    "run",
    [
        Run(),
        Run(data=MIXTURE, packing=c.BestFit(long="refuse")),
        Run(data=c.JsonLines(path="a.jsonl"), tokenizer=c.TokenizerJson(path="t.json", bos="<s>", eos="</s>")),
        Run(data=c.Parquet(path="a.parquet"), tokenizer=c.TiktokenRanks(path="tiktoken.model")),
    ],
)
def test_configurations_survive_json(run):
    assert config_io.from_dict(Run, config_io.to_dict(run)) == run


def test_a_mixture_can_be_given_as_a_setting():
    text = "data=Mixture(parts=[Weighted(source=TextFolder(path='text'), weight=2, name='a'), "
    text += "Weighted(source=Copy(), weight=0.5, name='b')])"
    run = config_io.override(Run(), [text, "packing=BestFit", "tokenizer=TiktokenRanks(path='r', special=4)"])
    assert run.data.parts[0] == c.Weighted(source=c.TextFolder(path="text"), weight=2.0, name="a")
    assert run.packing == c.BestFit() and run.tokenizer.special == 4
    with pytest.raises(ConfigError, match=r"TextFolder has no field 'paht'; did you mean 'path'"):
        config_io.override(Run(), [text.replace("path=", "paht=")])
    with pytest.raises(ConfigError, match="there is no 'Mixture' here"):
        config_io.override(Run(), ["data=Mixture(parts=[Weighted(source=Mixture(parts=[]), weight=1, name='a')])"])


def test_bad_settings_are_named():
    for share in (0.0, 1.0, -0.1, True, "0.1"):
        with pytest.raises(ConfigError, match="must be the share of documents kept for evaluation"):
            c.StdlibCorpus(held_out=share)
    with pytest.raises(ConfigError, match=r"TextFolder.path = '', but it must be a non-empty string"):
        c.TextFolder(path="")
    for weight in (0.0, -1.5):
        with pytest.raises(ConfigError, match=rf"Weighted.weight = {weight} of 'web', but it must be above 0"):
            c.Weighted(source=c.StdlibCorpus(), weight=weight, name="web")
    with pytest.raises(ConfigError, match=r"Mixture.parts is empty"):
        c.Mixture(parts=())
    with pytest.raises(ConfigError, match="has web more than once"):
        c.Mixture(parts=(MIXTURE.parts[1], MIXTURE.parts[1]))
    with pytest.raises(ConfigError, match=r"BestFit.long = 'keep', but it must be one of split, refuse, truncate"):
        c.BestFit(long="keep")
    with pytest.raises(ConfigError, match=r"TiktokenRanks.special = 0, but it must be at least 1"):
        c.TiktokenRanks(path="ranks", special=0)


def test_only_text_needs_a_tokenizer():
    assert c.reads_text(MIXTURE) and c.reads_text(c.TokenRecords(path="tokens"))
    assert not c.reads_text(Copy()) and not c.reads_text(c.Mixture(parts=MIXTURE.parts[2:]))
