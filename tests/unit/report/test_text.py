import math
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from service.report.sample_text import load_tokenizer, token_texts
from service.report.wording import count, number, percent, short
from service.visible import one_line, visible

TEXT = "Say hi: \u4f60\u597d, \U0001f985!  Two  spaces.\nA new line, na\u00efve."


@pytest.fixture(scope="module", params=["bytes", "sentencepiece"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two families: bytes joined to words, and words that mark their space and lose the first one."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=request.param == "sentencepiece"))
    if request.param == "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        tokenizer.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always"), decoders.Fuse()]
        )
        alphabet = []
    special = ["<|end|>", *(f"<0x{byte:02X}>" for byte in range(256))][
        : 1 if request.param == "bytes" else 257
    ]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["Say hi. Two spaces. A new line."], trainer)
    made = tmp_path_factory.mktemp(request.param)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(made)
    return made


def test_the_texts_of_all_tokens_together_are_the_text(folder):
    loaded = load_tokenizer(folder)
    assert not isinstance(loaded, str)
    decode, vocab_size = loaded
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = tokenizer.encode(TEXT + "<|end|>")
    texts = token_texts(ids, decode, vocab_size)
    assert "".join(text or "" for text in texts) == decode(ids)
    assert TEXT in decode(ids)
    assert texts[-1] == "<|end|>"
    eagle = next(place for place, text in enumerate(texts) if text and "\U0001f985" in text)
    assert texts[eagle - 3 : eagle] == ["", "", ""]


def test_an_id_that_is_no_token_has_no_text_and_hides_no_other(folder):
    decode, vocab_size = load_tokenizer(folder)
    ids = PreTrainedTokenizerFast.from_pretrained(folder).encode("Two spaces.")
    texts = token_texts([-1, *ids, vocab_size, *ids, 2**31 - 1], decode, vocab_size)
    assert [place for place, text in enumerate(texts) if text is None] == [0, len(ids) + 1, 2 * len(ids) + 2]
    assert "".join(text or "" for text in texts[1 : len(ids) + 1]) == "Two spaces."


def test_tokens_that_never_make_a_character_are_told_all_the_same(folder):
    decode, vocab_size = load_tokenizer(folder)
    (first, *_) = PreTrainedTokenizerFast.from_pretrained(folder).encode("\U0001f985")[-4:]
    texts = token_texts([first] * 9, decode, vocab_size)
    assert None not in texts
    assert "\ufffd" in "".join(texts)


def test_a_folder_without_a_tokenizer_says_why(tmp_path):
    assert isinstance(load_tokenizer(tmp_path), str)


def test_a_tokenizer_that_nests_too_deep_says_why(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"a":' + "[" * 200_000 + "]" * 200_000 + "}")
    assert "recursion" in load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (count(1234567), "1,234,567"),
        (number(None), "-"),
        (number(0.0), "0"),
        (number(2.75634), "2.756"),
        (number(123456.7), "123,457"),
        (number(0.00012345), "1.23e-4"),
        (number(-3e12), "-3.00e12"),
        (number(math.nan), "not a number"),
        (number(math.inf), "infinite"),
        (number(-math.inf), "-infinite"),
        (percent(0.701), "70.1 %"),
        (percent(1.0), "100 %"),
        (percent(0.99999), "> 99.9 %"),
        (percent(0.00001), "< 0.1 %"),
        (percent(0.0), "0 %"),
    ],
)
def test_numbers_are_told_as_people_read_them(told, text):
    assert told == text


def test_characters_that_hide_or_reorder_others_are_named():
    assert visible("a\u202eb\x00\u2066\ufeff\x1b[1m") == "a<U+202E>b<U+0000><U+2066><U+FEFF><U+001B>[1m"
    assert visible("line\nnext\ttab \u4f60 \U0001f985") == "line\nnext\ttab \u4f60 \U0001f985"
    assert visible("\ud800").isascii()
    assert one_line("a\nb\tc\x9b1A") == "a<U+000A>b<U+0009>c<U+009B>1A"


def test_a_long_text_is_cut_to_one_line():
    assert short("x" * 1000, 10) == "x" * 10 + "..."
    assert short("a\nb") == "a b"
