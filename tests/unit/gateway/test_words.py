"""Ids from words equal the tokenizer's own, and tokenizers of another kind are used as they are."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import tokenizers
from tokenizers import pre_tokenizers

from components.frontend import words
from components.frontend.words import Words
from tests.unit.gateway.stub import renderer

ALPHABET = [*"abAZz   .,'\n\t9é漢", "\u0301", "\u200d", "<|im_start|>", "<|im_end|>", " the", " of", "'s "]


def small(**changes: Any) -> tokenizers.Tokenizer:
    """Byte-level BPE with a few merges, the changed parts of its description aside."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [["Ġ", "t"], ["h", "e"], ["Ġt", "he"], ["o", "r"]]
    vocab = {t: i for i, t in enumerate([*letters, *("".join(m) for m in merges)])}
    return tokenizers.Tokenizer.from_str(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "normalizer": None,
                "pre_tokenizer": {
                    "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True
                },
                "model": {"type": "BPE", "vocab": vocab, "merges": merges},
            } | changes
        )
    )  # fmt: skip


def whole(t: tokenizers.Tokenizer, text: str) -> list[int]:
    return list(t.encode(text, add_special_tokens=False).ids)


def test_ids_are_the_tokenizers_own() -> None:
    w = renderer().words
    assert w.sure
    rng = random.Random(3)
    texts = ["".join(rng.choice(ALPHABET) for _ in range(rng.randrange(60))) for _ in range(800)]
    for text, own in zip(texts, w._tokenizer.encode_batch(texts, add_special_tokens=False), strict=True):
        assert w.encode(text) == w.encode(text) == own.ids, repr(text)


def test_a_full_memory_forgets_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "KEPT", 20)
    t = small()
    w = Words(t)
    assert w.sure
    rng = random.Random(4)
    for _ in range(300):
        text = " ".join("".join(rng.choice("the") for _ in range(3)) for _ in range(9))
        assert w.encode(text) == whole(t, text)
        assert len(w._ids) <= 20
    w.encode("y" * 500 + " x")
    assert max(map(len, w._ids)) <= words.PIECE_LIMIT


def added(content: str, **more: bool) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"added_tokens": [{"id": 1, "content": content} | plain | more]}


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}},
        {"normalizer": {"type": "Lowercase"}},
        added("New York"),
        added("<m>", lstrip=True),
    ],
)  # fmt: skip
def test_another_kind_of_tokenizer_is_used_as_it_is(changes: dict[str, Any]) -> None:
    t = small(**changes)
    w = Words(t)
    text = "The New York words <m> are  joined by spaces"
    assert not w.sure and w.encode(text) == whole(t, text)


def test_what_the_description_does_not_tell_the_trial_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "_by_words", lambda _: True)
    assert not Words(small(normalizer={"type": "Prepend", "prepend": "a"})).sure
