"""stream_text: whole characters only, and joined exactly the decoded whole, for byte-level, byte-fallback and word pieces."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hf_cb import RequestCancelledError, stream_text
from hf_cb.handle import GenerationHandle, OutputQueue
from hf_cb.request import FinishReason, Request

TEXTS = {
    "emoji": "so 👩‍👩‍👧‍👦 and 🏳️‍🌈, 😀😃 end",
    "cjk": "你好、世界。これは日本語です。한국어도",
    "hindi": "नमस्ते दुनिया, क्षत्रिय",
    "arabic": "مرحبا بالعالم، كيف الحال؟",
    "latin": "Ünïcode isn't hard, is it ? No , it's not .",
    "spaces": "  two  spaces \n\n and lines\t",
}


@functools.cache
def byte_level() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["</s>"], show_progress=False)
    tokenizer.train_from_iterator(TEXTS.values(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


@functools.cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2's: characters that it has no piece for are runs of byte tokens."""
    pieces = ["</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz,.?'好世の한नम"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


@functools.cache
def word_pieces() -> PreTrainedTokenizerFast:
    pieces = ["[UNK]", "do", "n", "t", "'", "s", ".", "?", "it", "##s", "isn", "n't", "'s", "a", ","]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", clean_up_tokenization_spaces=True)


MAKERS: dict[str, Callable[[], Any]] = {"byte level": byte_level, "byte fallback": byte_fallback, "word pieces": word_pieces}


class Nobody:
    """Whom no handle has anything to say to."""

    def abort(self, request_id: int) -> None: ...

    def forget(self, request_id: int) -> None: ...

    def refuse_own_thread(self, name: str) -> None: ...


class Source:
    """A request whose tokens come one by one, each as soon as the one before was read."""

    def __init__(self, tokens: Sequence[int], reason: FinishReason = FinishReason.LENGTH) -> None:
        self.queue = OutputQueue(Request((1,), max(1, len(tokens))))
        self.handle = GenerationHandle(self.queue, Nobody())
        self._tokens, self._reason = list(tokens), reason
        waits = self.queue.wait

        def wait(have: int | None = None, timeout: float | None = None) -> bool:
            if len(self.queue.tokens) < len(self._tokens):
                self.queue.put((self._tokens[len(self.queue.tokens)],))
            else:
                self.queue.close(self._reason)
            return waits(have, timeout)

        self.queue.wait = wait  # type: ignore[method-assign]


def pieces(tokens: Sequence[int], tokenizer: Any, **options: Any) -> Iterator[str]:
    return stream_text(Source(tokens).handle, tokenizer, **options)


@pytest.mark.parametrize("make", [byte_level, byte_fallback], ids=["byte level", "byte fallback"])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_texts(make: Callable[[], Any], text: str) -> None:
    tokenizer = make()
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    got = list(pieces(tokens, tokenizer))
    assert "".join(got) == tokenizer.decode(tokens, skip_special_tokens=True)
    assert "".join(got).strip() == text.strip()
    assert not any("\ufffd" in piece for piece in got)
    assert all(got)
    assert len(got) > 3


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("skip", [True, False])
def test_any_tokens(make: Callable[[], Any], skip: bool) -> None:
    """Random tokens are full of bytes that are no characters: those, and only those, come out as replacement characters."""
    tokenizer, choice = make(), random.Random(0)
    for _ in range(300):
        tokens = [choice.randrange(len(tokenizer)) for _ in range(choice.randrange(1, 25))]
        got = list(pieces(tokens, tokenizer, skip_special_tokens=skip))
        assert "".join(got) == tokenizer.decode(tokens, skip_special_tokens=skip)
        assert all(got)


def test_a_slow_reader_gets_the_same() -> None:
    tokenizer = byte_level()
    tokens = tokenizer(TEXTS["emoji"])["input_ids"]
    source = Source(tokens)
    for token in tokens:
        source.queue.put((token,))
    source.queue.close(FinishReason.LENGTH)
    assert list(stream_text(source.handle, tokenizer)) == [TEXTS["emoji"]]


def test_what_the_handle_raises_comes_after_the_text() -> None:
    tokenizer = byte_level()
    stream = stream_text(Source(tokenizer("Hello, world")["input_ids"], FinishReason.CANCELLED).handle, tokenizer)
    got: list[str] = []
    with pytest.raises(RequestCancelledError):
        got.extend(stream)
    assert "".join(got) == "Hello, world"


def test_a_long_text_is_not_decoded_from_its_beginning_at_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level()
    tokens = tokenizer(TEXTS["cjk"] * 20)["input_ids"]
    decode, lengths = tokenizer.decode, []

    def noted(ids: list[int], **options: Any) -> str:
        lengths.append(len(ids))
        return str(decode(ids, **options))

    monkeypatch.setattr(tokenizer, "decode", noted)
    assert "".join(pieces(tokens, tokenizer)) == TEXTS["cjk"] * 20
    assert max(lengths) <= 4  # the bytes of one character
