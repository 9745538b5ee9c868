import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime import _native

BYTES = [bytes([byte]) for byte in range(256)]
SPECIAL = 256  # "<|pad|>"
BROKEN_SPECIAL = 257  # bytes that would break a character apart
VOCABULARY = _native.Vocabulary.from_tokens(
    [*BYTES, b"<|pad|>", b"\xff"], [SPECIAL, BROKEN_SPECIAL]
)
TEXTS = {
    "cjk": "世界、文書解析。한국어",
    "emoji_with_joiners": "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽",
    "combining_marks": "e\u0301 n\u0303 क्षि ก็",
    "widths": "a\x7f\u0080\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff",
}

# Bytes at the borders of the ranges in table 3-7 of the Unicode Standard, so that random strings
# of them are often nearly valid.
border_bytes = st.lists(
    st.sampled_from(
        bytes.fromhex("00 41 7f 80 8f 90 9f a0 bf c0 c1 c2 df e0 e1 ec ed ee ef f0 f1 f3 f4 f5 ff")
    ),
    max_size=24,
).map(bytes)

INCOMPLETE = {
    chr(code).encode()[:k]
    for code in range(0x80, 0x110000, 0x40)  # the last byte is never part of it
    if not 0xD800 <= code < 0xE000
    for k in range(1, len(chr(code).encode()))
}


def pieces(vocabulary: _native.Vocabulary, ids: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = _native.Detokenizer(vocabulary, skip_special_tokens=skip)
    return [*(detokenizer.append(token_id) for token_id in ids), detokenizer.finish()]


@st.composite
def cut_bytes(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> list[bytes]:
    content = draw(whole)
    cuts = sorted(draw(st.lists(st.integers(0, len(content)), max_size=6)))
    return [content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True)]


@settings(max_examples=400)
@given(cut_bytes(st.binary(max_size=24) | border_bytes | st.text(max_size=12).map(str.encode)))
@example([b"word", b"\x80", b"word"])
@example([b"\xe2\x82", b"(", b"\xf0\x9f\x98"])
@example([b"\xed\xa0", b"\x80"])
def test_any_bytes_in_any_cut_decode_as_python_does(tokens: list[bytes]) -> None:
    vocabulary = _native.Vocabulary.from_tokens(tokens)
    got = pieces(vocabulary, list(range(len(tokens))))
    assert "".join(got) == b"".join(tokens).decode("utf-8", errors="replace")


@settings(max_examples=300)
@given(border_bytes)
def test_only_a_tail_that_may_become_a_character_is_held_back(content: bytes) -> None:
    detokenizer = _native.Detokenizer(VOCABULARY)
    text = ""
    for end, byte in enumerate(content, start=1):
        text += detokenizer.append(byte)
        tails = [k for k in (1, 2, 3) if k <= end and content[end - k : end] in INCOMPLETE]
        certain = content[: end - max(tails, default=0)]
        assert text == certain.decode("utf-8", errors="replace")


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_characters_over_many_tokens_arrive_whole(text: str) -> None:
    content = text.encode()
    for size in range(1, 6):
        tokens = [content[i : i + size] for i in range(0, len(content), size)]
        got = pieces(_native.Vocabulary.from_tokens(tokens), list(range(len(tokens))))
        assert "".join(got) == text
        assert got[-1] == ""
        assert not any("\ufffd" in piece for piece in got)


def test_lone_continuation_byte_leaves_the_words_around_it_intact() -> None:
    vocabulary = _native.Vocabulary.from_tokens([b"first", b"\x80", b"second"])
    assert pieces(vocabulary, [0, 1, 2]) == ["first", "\ufffd", "second", ""]


def test_incomplete_tail_is_held_back_until_the_end() -> None:
    vocabulary = _native.Vocabulary.from_tokens([b"a\xf0\x9f", b"\x98"])
    assert pieces(vocabulary, [0, 1]) == ["a", "", "\ufffd"]


def test_finish_makes_ready_for_another_sequence() -> None:
    detokenizer = _native.Detokenizer(VOCABULARY)
    assert detokenizer.append(0xE4) + detokenizer.finish() == "\ufffd"
    assert detokenizer.append(0x80) + detokenizer.append(0x41) == "\ufffdA"


@given(st.lists(st.integers(-2, 260), max_size=30), st.booleans())
def test_hidden_special_tokens_are_as_if_not_there(ids: list[int], skip: bool) -> None:
    shown = [i for i in ids if not (skip and i in {SPECIAL, BROKEN_SPECIAL})]
    want = b"".join(VOCABULARY.token_bytes(i) for i in shown).decode("utf-8", errors="replace")
    assert "".join(pieces(VOCABULARY, ids, skip=skip)) == want


def test_special_tokens_show_on_request_only() -> None:
    ids = [ord("a"), SPECIAL, ord("b"), SPECIAL]
    assert "".join(pieces(VOCABULARY, ids)) == "ab"
    assert "".join(pieces(VOCABULARY, ids, skip=False)) == "a<|pad|>b<|pad|>"


def test_hidden_special_token_does_not_break_a_character_apart() -> None:
    first, *rest = "世".encode()
    assert "".join(pieces(VOCABULARY, [first, SPECIAL, BROKEN_SPECIAL, *rest])) == "世"
    shown = "".join(pieces(VOCABULARY, [first, SPECIAL, *rest], skip=False))
    assert shown == "\ufffd<|pad|>\ufffd\ufffd"


def test_vocabulary_lives_as_long_as_its_detokenizer() -> None:
    detokenizer = _native.Detokenizer(_native.Vocabulary.from_tokens([b"kept"]))
    assert detokenizer.append(0) == "kept"
