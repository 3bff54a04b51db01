"""Tokenizers: round trips, special tokens, identity, and files that are not what they should be."""

import base64

import pytest
import tokenizers as library
from tokenizers import decoders, models, pre_tokenizers, trainers

from k3jax import config_data as c
from k3jax.config import ConfigError
from k3jax.data.documents import DataError
from k3jax.data.tokenizers import ByteTokenizer, check_fits, make_tokenizer

TEXT = "def f():\n\treturn 'é漢🙂'"
MERGES = [b"12", b"34", b"1234", b"re", b"ret"]


def write_ranks(path, tokens) -> str:
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    return str(path)


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """A tokenizer of each kind; the file-based ones know the same words."""
    folder = tmp_path_factory.mktemp("tokenizers")
    ranks = write_ranks(folder / "ranks", [bytes([i]) for i in range(256)] + MERGES)
    made = library.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator(["return return 1234"] * 3, trainer)
    made.enable_truncation(4)
    made.save(str(folder / "tokenizer.json"))
    return {
        "bytes": c.Bytes(),
        "json": c.TokenizerJson(path=str(folder / "tokenizer.json"), bos="<s>", eos="</s>"),
        "ranks": c.TiktokenRanks(path=ranks, special=4, bos=261, eos=263),
    }


@pytest.mark.parametrize("kind", ["bytes", "json", "ranks"])
def test_any_text_round_trips_and_special_tokens_stay_out_of_it(configs, kind):
    tokenizer = make_tokenizer(configs[kind])
    text = TEXT + "<s> [BOS] </s>"
    tokens = tokenizer.encode(text)
    assert tokens.dtype == "int32" and tokens.max() <= 2**32 and tokenizer.bos not in tokens
    assert tokens.astype(tokenizer.dtype).tolist() == tokens.tolist(), "dtype stores them"
    assert tokenizer.decode([tokenizer.bos, *tokens, tokenizer.eos]) == text
    assert [found.tolist() for found in tokenizer.encode_batch([text.encode(), "re"])] == [
        tokens.tolist(),
        tokenizer.encode("re").tolist(),
    ]
    with pytest.raises(ValueError, match=f"token {tokenizer.size} is not one of the {tokenizer.size} tokens of"):
        tokenizer.decode([65, tokenizer.size])
    check_fits(tokenizer, tokenizer.size)
    with pytest.raises(ConfigError, match=f"has {tokenizer.size} tokens but the model's vocabulary is only 257"):
        check_fits(tokenizer, 257)


def test_bytes_that_are_not_text_are_replaced():
    assert ByteTokenizer().decode(ByteTokenizer().encode(b"\xff!")) == "\ufffd!"


def test_long_words_are_one_token_and_numbers_are_cut_after_three_digits(configs):
    """The last part is K3's pattern; the negative control is a pattern that cuts nothing."""
    assert len(make_tokenizer(configs["json"]).encode("return")) == 1
    ids = {token: 256 + i for i, token in enumerate(MERGES)}
    ranks = configs["ranks"]
    assert make_tokenizer(ranks).encode("ret1234").tolist() == [ids[b"ret"], ids[b"12"], ord("3"), ord("4")]
    uncut = c.TiktokenRanks(path=ranks.path, pattern=r"[\s\S]+", special=4, bos=261, eos=263)
    assert make_tokenizer(uncut).encode("ret1234").tolist() == [ids[b"ret"], ids[b"1234"]]


def test_the_hash_names_content_and_settings(configs, tmp_path):
    ranks = configs["ranks"]
    first = make_tokenizer(ranks).hash
    assert first == make_tokenizer(ranks).hash
    other = write_ranks(tmp_path / "ranks", [bytes([i]) for i in range(256)] + MERGES[::-1])
    changed = [
        c.TiktokenRanks(path=ranks.path, special=4, bos=262, eos=263),
        c.TiktokenRanks(path=ranks.path, special=4, bos=261, eos=263, pattern=r"\S+|\s+"),
        c.TiktokenRanks(path=other, special=4, bos=261, eos=263),
    ]
    assert len({first, *(make_tokenizer(config).hash for config in changed)}) == 4


def test_files_that_are_no_tokenizer_are_named(configs, tmp_path):
    ends = dict(special=4, bos=256, eos=257)
    with pytest.raises(DataError, match=r"tokenizer .*nowhere: No such file"):
        make_tokenizer(c.TiktokenRanks(path=str(tmp_path / "nowhere")))
    (tmp_path / "ranks").write_text("YQ== 0\nnot a rank\n")
    with pytest.raises(DataError, match=r"ranks:2: not a base64 token and its rank: b'not a rank'"):
        make_tokenizer(c.TiktokenRanks(path=str(tmp_path / "ranks"), **ends))
    few = write_ranks(tmp_path / "few", [bytes([i]) for i in range(3, 256)])
    with pytest.raises(DataError, match=r"few: no rank for the bytes \[0, 1, 2\]"):
        make_tokenizer(c.TiktokenRanks(path=few, **ends))
    with pytest.raises(ConfigError, match=r"bos = 256, but .* has 261 ranks: special ids are 261..264"):
        make_tokenizer(c.TiktokenRanks(path=configs["ranks"].path, **ends))
    with pytest.raises(ConfigError, match=r"pattern = '\(':"):
        make_tokenizer(c.TiktokenRanks(path=configs["ranks"].path, pattern="(", special=4, bos=261, eos=263))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json: not a tokenizer\.json"):
        make_tokenizer(c.TokenizerJson(path=str(tmp_path / "tokenizer.json"), bos="a", eos="b"))
    with pytest.raises(ConfigError, match=r"bos = '<bos>', but .* no such token; its special tokens are: <s>, </s>"):
        make_tokenizer(c.TokenizerJson(path=configs["json"].path, bos="<bos>", eos="</s>"))
