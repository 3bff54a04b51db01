"""Configurations as text: round trips, settings, and every way to write one wrong."""

import dataclasses
import json
from typing import Literal

import pytest

from k3jax import config as c
from k3jax import config_io, presets
from k3jax.config_data import StdlibCorpus, TextFolder
from k3jax.config_io import diff, from_dict, load_json, override, save_json, to_dict
from k3jax.config_optim import WSD, Muon, QKClip
from k3jax.run_config import TrainConfig

TINY = presets.tiny()


@dataclasses.dataclass(frozen=True)
class Inner:
    rate: float = 1.0


@dataclasses.dataclass(frozen=True)
class Toy:
    count: int
    flag: bool
    name: str
    label: str | None
    mode: Literal["fast", "slow"]
    pair: tuple[int, float]
    items: tuple[str, ...] = ()
    inner: Inner = Inner()
    choice: Inner | None = None


TOY = Toy(count=3, flag=True, name="a", label=None, mode="fast", pair=(1, 2.5), items=("x", "y"), choice=Inner(2.0))


@pytest.mark.parametrize(
    "config", [TOY, TINY, presets.kimi_k3(), presets.kimi_linear_48b()], ids=lambda x: type(x).__name__
)
def test_round_trip_through_json(config, tmp_path):
    save_json(config, tmp_path / "config.json")
    loaded = load_json(type(config), tmp_path / "config.json")
    assert loaded == config
    assert hash(loaded) == hash(config)
    assert to_dict(loaded) == to_dict(config)


def test_only_unions_are_tagged():
    assert to_dict(TOY)["inner"] == {"rate": 1.0}
    assert to_dict(TOY)["choice"] == {"type": "Inner", "rate": 2.0}
    assert to_dict(TINY)["model"]["kda"]["decay"] == {"type": "BoundedDecay", "lower_bound": -5.0}


@pytest.mark.parametrize(
    ("setting", "path", "value"),
    [
        ("model.moe.experts=32", "model.moe.experts", 32),
        ("model.residual=PlainResidual", "model.residual", c.PlainResidual()),
        ("model.residual=BlockAttnRes(block=4)", "model.residual.block", 4),
        ("model.moe.balancer=SignRule(rate=1e-4)", "model.moe.balancer", c.SignRule(1e-4)),
        ("model.moe.balancer = AuxLoss", "model.moe.balancer", c.AuxLoss()),
        ("optimizer.schedule.peak=1e-2", "optimizer.schedule.peak", 0.01),
        ("optimizer.schedule.peak=1", "optimizer.schedule.peak", 1.0),
        ("optimizer.schedule=WSD(decay=0.5)", "optimizer.schedule", WSD(decay=0.5)),
        ("optimizer.matrices=Muon(newton_schulz=polar8)", "optimizer.matrices.newton_schulz", "polar8"),
        ("optimizer.qk_clip=None", "optimizer.qk_clip", None),
        ("model.mla.q_rank=None", "model.mla.q_rank", None),
        ("model.kda.decay.lower_bound=-3", "model.kda.decay.lower_bound", -3.0),
        ("model.full_attention=(4, 8)", "model.full_attention", (4, 8)),
        ("model.full_attention=[]", "model.full_attention", ()),
        ("model.moe.latent.norm=False", "model.moe.latent.norm", False),
        ("model.dtype=bfloat16", "model.dtype", "bfloat16"),
        ("model.dtype='bfloat16'", "model.dtype", "bfloat16"),
        ("sample_prompt=class ", "sample_prompt", "class "),
        ("sample_prompt=a = 'b'", "sample_prompt", "a = 'b'"),
        ("sample_prompt='quoted'", "sample_prompt", "quoted"),
        ("sample_prompt=5", "sample_prompt", "5"),
        ("eval_bytes=None", "eval_bytes", None),
        ("data=TextFolder(path='/x')", "data", TextFolder(path="/x")),
    ],
)
def test_settings(setting, path, value):
    changes = diff(TINY, override(TINY, [setting]))
    assert list(changes) == [path]
    assert changes[path][1] == value
    assert type(changes[path][1]) is type(value)


def test_settings_apply_in_order_and_are_checked_at_the_end():
    config = override(
        TINY,
        [
            "model.layers=4",
            "model.full_attention=(2,)",
            "optimizer.schedule=WSD(peak=0.5)",
            "optimizer.schedule.decay=0.25",
            "data=TextFolder(path='/x')",
            "data.pattern=*.py",
            "seed=1",
            "seed=2",
        ],
    )
    assert (config.model.layers, config.model.full_attention, config.seed) == (4, (2,), 2)
    assert config.optimizer.schedule == WSD(peak=0.5, decay=0.25)
    assert config.data == TextFolder(path="/x", pattern="*.py")
    with pytest.raises(c.ConfigError, match=r"model: ModelConfig.full_attention has \[8, 12, 13\]"):
        override(TINY, ["model.layers=4"])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.moe.expert=32", r"^model\.moe\.expert: MoE has no field 'expert'; did you mean 'experts'\?"),
        ("modle.moe.experts=32", r"^modle: TrainConfig has no field 'modle'; did you mean 'model'\?"),
        ("model.vocab.size=3", r"^model\.vocab is 258 and has no fields"),
        ("model.residual=BlockAttnRez(block=4)", r"^model\.residual: .*'BlockAttnRez'.*did you mean 'BlockAttnRes'\?"),
        ("model.residual=KDA", r"must be PlainResidual or BlockAttnRes or FullAttnRes"),
        ("model.residual=BlockAttnRes", r"^model\.residual: BlockAttnRes lacks block"),
        ("model.residual=BlockAttnRes(4)", r"must name every field"),
        ("model.residual=BlockAttnRes(blok=4)", r"^model\.residual\.blok: .*did you mean 'block'\?"),
        ("model.residual=BlockAttnRes(block=0)", r"^model\.residual: BlockAttnRes.block = 0"),
        ("model.residual=BlockAttnRes(**{})", r"must name every field"),
        ("model.moe.experts=3.0", r"^model\.moe\.experts = 3\.0, but it must be an integer"),
        ("model.moe.experts=True", r"^model\.moe\.experts = True, but it must be an integer"),
        ("model.moe.experts='3'", r"^model\.moe\.experts = '3', but it must be an integer"),
        ("model.moe.experts=4*8", r"^model\.moe\.experts = '4\*8' is not a literal"),
        ("model.moe.experts=", r"^model\.moe\.experts = '' is not a literal"),
        ("model.moe.latent.norm=1", r"^model\.moe\.latent\.norm = 1, but it must be True or False"),
        ("model.moe.latent=-True", r"is not a literal"),
        ("model.eps=small", r"^model\.eps = 'small', but it must be a finite number"),
        ("model.eps=1e999", r"^model\.eps = inf, but it must be a finite number"),
        ("model.eps=1" + 400 * "0", r"^model\.eps = 10+, but it must be a finite number"),
        ("model.eps=9007199254740993", r"^model\.eps = 9007199254740993, but it must be a finite number"),
        ("model.dtype=float31", r"^model\.dtype = 'float31'.*'float32', 'bfloat16'; did you mean 'float32'\?"),
        ("model.remat=None", r"^model\.remat = None, but it must be one of 'none', 'dots', 'full' or Save"),
        ("model.remat=Save(names=('attend',))", r"^model\.remat\.names\[0\] = 'attend'.*did you mean 'attended'\?"),
        ("model.remat=Save(names=())", r"^model\.remat: Save\.names = \(\), but it must be one or more of"),
        ("model.remat=Save(storage='disk')", r"^model\.remat\.storage = 'disk'.*'fp8_host'"),
        ("model.remat=Save(names=('layer_input',))", r"^model\.remat: Save\.names has 'layer_input' with storage"),
        ("model.remat=Save(names=('states',), storage='fp8')", r"^model\.remat: Save\.names has \['states'\] with"),
        ("model.mla.q_rank=none", r"^model\.mla\.q_rank = 'none', but it must be an integer or None"),
        ("model.full_attention=4", r"^model\.full_attention = 4, but it must be a list, each item an integer"),
        ("model.full_attention=(4, 8.0)", r"^model\.full_attention\[1\] = 8\.0, but it must be an integer"),
        ("optimizer.schedule.peak=-1", r"^optimizer\.schedule: Cosine\.peak must be in"),
        ("optimizer.qk_clip=100", r"^optimizer\.qk_clip = 100, but it must be QKClip or None"),
        ("model.moe.active=8", r"^model\.moe: MoE\.active = 8 of 8 experts"),
        ("micro_batches=3", r"^TrainConfig\.micro_batches = 3, but it must divide batch = 4"),
        ("model.vocab=257", r"^TrainConfig\.model\.vocab = 257, but the byte tokenizer has 258 tokens"),
        ("eval_every=0", r"^TrainConfig\.eval_every = 0, but it must be at least 1"),
        ("seed=-1", r"^TrainConfig\.seed = -1"),
        ("model.moe.balancer=__import__('os').abort()", r"is not a literal"),
        ("model.moe.balancer=[x for x in ()]", r"is not a literal"),
        ("steps", r"not of the form"),
        ("=3", r"not of the form"),
    ],
)
def test_bad_settings_are_named(setting, message):
    with pytest.raises(c.ConfigError, match=message):
        override(TINY, [setting])


def test_a_field_of_nothing():
    plain = override(TINY, ["model.moe.latent=None"])
    with pytest.raises(
        c.ConfigError, match=r"model\.moe\.latent is None and has no fields; set it as a whole first, to Latent"
    ):
        override(plain, ["model.moe.latent.dim=8"])
    assert override(plain, ["model.moe.latent=Latent(dim=8)"]).model.moe.latent == c.Latent(8)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.pop("count"), r"configuration: Toy lacks count"),
        (lambda d: d.pop("inner"), r"configuration: Toy lacks inner"),
        (lambda d: d["inner"].pop("rate"), r"inner: Inner lacks rate"),
        (lambda d: d.update(cuont=3), r"cuont: Toy has no field 'cuont'; did you mean 'count'"),
        (lambda d: d.update(count=True), r"count = True, but it must be an integer"),
        (lambda d: d.update(flag=1), r"flag = 1, but it must be True or False"),
        (lambda d: d.update(name=None), r"name = None, but it must be a string"),
        (lambda d: d.update(label=3), r"label = 3, but it must be a string or None"),
        (lambda d: d.update(mode="fats"), r"mode = 'fats', .*'fast', 'slow'; did you mean 'fast'"),
        (lambda d: d.update(pair=[1]), r"pair = \[1\], but it must be a list"),
        (lambda d: d.update(pair=[1.0, 2]), r"pair\[0\] = 1\.0, but it must be an integer"),
        (lambda d: d.update(inner=3), r"inner = 3, but it must be Inner"),
        (lambda d: d.update(inner={"type": "Inner", "rate": 1}), r"inner\.type: Inner has no field 'type'"),
        (
            lambda d: d.update(choice={"rate": 1}),
            r'choice: the class must be named under "type"; it must be Inner or None',
        ),
        (
            lambda d: d.update(choice={"type": "Innr", "rate": 1}),
            r"choice: there is no 'Innr' here.*did you mean 'Inner'",
        ),
        (lambda d: d.update(choice="Inner"), r"choice = 'Inner', but it must be Inner or None"),
    ],
)
def test_bad_dicts_are_named(edit, message):
    data = to_dict(TOY)
    edit(data)
    with pytest.raises(c.ConfigError, match=message):
        from_dict(Toy, data)


def test_an_integer_becomes_a_float_where_a_float_belongs():
    data = to_dict(TOY)
    data["inner"]["rate"] = 3
    rate = from_dict(Toy, data).inner.rate
    assert rate == 3 and type(rate) is float


def test_a_field_that_came_later_may_be_missing_in_a_saved_run():
    """And no other, whether it has a default or not."""
    data = to_dict(TINY)
    assert data["model"]["mla"].pop("share") == 1
    assert from_dict(TrainConfig, data) == TINY
    del data["model"]["loops"]
    with pytest.raises(c.ConfigError, match="model: ModelConfig lacks loops"):
        from_dict(TrainConfig, data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ('{"seed": 1, "seed": 2}', "'seed' appears twice"),
        ("[1]", "must be TrainConfig"),
        ("{}", "TrainConfig lacks model"),
        ('{"z_loss": NaN}', "TrainConfig lacks model"),
        ("[" * 100_000, "recursion"),
        ("\udcff", "utf-8"),
    ],
)
def test_bad_files_are_named(tmp_path, text, message):
    path = tmp_path / "bad.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(c.ConfigError, match=f"bad.json.*{message}"):
        load_json(TrainConfig, path)
    with pytest.raises(c.ConfigError, match=r"absent\.json"):
        load_json(TrainConfig, tmp_path / "absent.json")


def test_not_a_number_in_a_file(tmp_path):
    data = json.dumps(to_dict(TINY)).replace('"z_loss": 0.0', '"z_loss": NaN')
    (tmp_path / "nan.json").write_text(data)
    with pytest.raises(c.ConfigError, match="z_loss = nan, but it must be a finite number"):
        load_json(TrainConfig, tmp_path / "nan.json")


def test_diff():
    assert diff(TINY, TINY) == {}
    other = override(TINY, ["model.residual=FullAttnRes", "optimizer.qk_clip.threshold=50", "batch=8"])
    assert diff(TINY, other) == {
        "model.residual": (c.BlockAttnRes(3), c.FullAttnRes()),
        "optimizer.qk_clip.threshold": (QKClip().threshold, 50.0),
        "batch": (4, 8),
    }
    with pytest.raises(c.ConfigError, match="cannot compare a TrainConfig with a ModelConfig"):
        diff(TINY, TINY.model)


def test_a_field_type_that_has_no_text_form():
    @dataclasses.dataclass(frozen=True)
    class Strange:
        path: bytes

    with pytest.raises(TypeError, match="path: a configuration field cannot be of type"):
        from_dict(Strange, {"path": "x"})


def test_misspelt_choices_do_not_pass_in_python_either():
    for field, value in (("dtype", "bf16"), ("remat", "some")):
        with pytest.raises(c.ConfigError, match=rf"ModelConfig\.{field} = '{value}', but it must be one of"):
            c.replace(TINY.model, **{field: value})
    with pytest.raises(TypeError, match="expert"):
        c.replace(TINY.model.moe, expert=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        TINY.seed = 3


def test_every_configuration_class_has_a_text_form():
    """Each member of each union, with its defaults or given fields, survives a round trip."""
    settings = {
        "model.residual": ["PlainResidual", "BlockAttnRes(block=2)", "FullAttnRes"],
        "model.moe.balancer": ["QuantileBalancing", "ExactQuantileBalancing", "SignRule", "AuxLoss", "NoBalancing"],
        "model.activation": ["SiTU", "SwiGLU"],
        "model.remat": ["full", "Save", "Save(names=('attended', 'routing'), storage='fp8_host')"],
        "model.kda.decay": ["BoundedDecay", "SoftplusDecay"],
        "model.kda.output_gate": ["FullRankGate", "LowRankGate(rank=3)", "NoGate"],
        "model.mla.output_gate": ["FullRankGate", "NoGate"],
        "model.mla.position": ["NoPE", "RoPE"],
        "optimizer.matrices": ["Muon", "AdamW"],
        "optimizer.schedule": ["Cosine", "WSD"],
        "data": ["StdlibCorpus", "TextFolder(path='x')"],
    }
    for path, values in settings.items():
        for value in values:
            config = override(TINY, [f"{path}={value}"])
            assert from_dict(TrainConfig, json.loads(json.dumps(to_dict(config)))) == config
    assert override(TINY, ["data=StdlibCorpus"]).data == StdlibCorpus()
    assert override(TINY, ["optimizer.router=Muon"]).optimizer.router == Muon()


def test_suggestions():
    assert config_io.did_you_mean("nanno", ["nano", "tiny"]) == "; did you mean 'nano'?"
    assert config_io.did_you_mean("zzz", ["nano", "tiny"]) == ""


@dataclasses.dataclass(frozen=True)
class Empty:
    pass


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    y: int = 0


@dataclasses.dataclass(frozen=True)
class Line:
    points: tuple[Point, ...] = ()
    mixed: tuple[Point | Empty, ...] = ()


def test_tuples_of_dataclasses_travel_both_ways():
    line = Line(points=(Point(1), Point(2, 3)), mixed=(Empty(), Point(4)))
    data = to_dict(line)
    assert data == {
        "points": [{"x": 1, "y": 0}, {"x": 2, "y": 3}],
        "mixed": [{"type": "Empty"}, {"type": "Point", "x": 4, "y": 0}],
    }
    assert from_dict(Line, data) == line
    assert override(Line(), ["points=[Point(x=1), Point(x=2, y=3)]"]).points == line.points
    with pytest.raises(c.ConfigError, match=r"points\[1\].*no field 'z'"):
        override(Line(), ["points=[Point(x=1), Point(z=2)]"])
