import codecs
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import _native

END_OF_TURN = 0
IMAGE_PAD = 1


def table(*tokens: bytes) -> _native.Vocabulary:
    """Ids 0 and 1 are special, `tokens` follow from id 2."""
    return _native.Vocabulary.from_tokens(
        [b"<|im_end|>", b"<|image_pad|>", *tokens], [END_OF_TURN, IMAGE_PAD]
    )


def deltas(stream: _native.TextStream, ids: Sequence[int]) -> list[str]:
    """The text released by each token up to a stop, and by the end of the sequence."""
    texts = []
    for token_id in ids:
        stopped = stream.push(token_id)
        texts.append(stream.take_text())
        if stopped:
            break
    stream.finish()
    return [*texts, stream.take_text()]


# Reference: everything by brute force on whole strings.
def decode(tokens: list[bytes]) -> str:
    return b"".join(tokens).decode("utf-8", errors="replace")


def find_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    ends = [(text.index(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    return (min(ends)[0], min(ends)[2]) if ends else None


def certain_text(tokens: list[bytes]) -> str:
    """The decoding without the tail that a next byte could change."""
    a, b = decode([*tokens, b"A"])[:-1], decode([*tokens, b"\xbf"])
    return a if b.startswith(a) and len(b) > len(a) else a[:-1]


token_bytes = st.lists(
    st.sampled_from(
        [b"a", b"b", b"ab", b"ba", b"xabz", "世".encode(), b"\xe4", b"\xb8", b"\x96a", b"\xff"]
    ),
    max_size=14,
)
stop_lists = st.lists(st.text("ab世\ufffd", min_size=1, max_size=4), max_size=3)


@settings(max_examples=400)
@given(token_bytes, stop_lists, st.booleans())
def test_text_count_and_stop_equal_a_scan(
    tokens: list[bytes], stops: list[str], include_stop: bool
) -> None:
    stream = _native.TextStream(table(*tokens), stops=stops, include_stop=include_stop)
    text = "".join(deltas(stream, range(2, 2 + len(tokens))))

    whole = decode(tokens)
    found = find_stop(whole, stops)
    if found is None:
        assert (text, stream.num_tokens, stream.matched_stop) == (whole, len(tokens), None)
        assert not stream.stopped
        return
    end, stop = found
    assert text == whole[: end if include_stop else end - len(stop)]
    assert stream.matched_stop == stop
    assert stream.stopped
    # The token that completed it is the first after which no next byte can take it away.
    counts = [n for n in range(1, len(tokens) + 1) if find_stop(certain_text(tokens[:n]), stops)]
    assert stream.num_tokens == (counts[0] if counts else len(tokens))


@settings(max_examples=200)
@given(token_bytes, stop_lists, st.booleans(), st.integers(0, 16))
def test_stops_count_only_after_min_tokens(
    tokens: list[bytes], stops: list[str], include_stop: bool, min_tokens: int
) -> None:
    stream = _native.TextStream(
        table(*tokens), stops=stops, include_stop=include_stop, min_tokens=min_tokens
    )
    text = "".join(deltas(stream, range(2, 2 + len(tokens))))

    whole = decode(tokens)
    free = len(certain_text(tokens[:min_tokens])) if min_tokens < len(tokens) else len(whole)
    found = find_stop(whole[free:], stops)
    if found is None:
        assert (text, stream.num_tokens, stream.stopped) == (whole, len(tokens), False)
        return
    end, stop = found
    assert text == whole[: free + (end if include_stop else end - len(stop))]
    assert stream.matched_stop == stop
    assert stream.num_tokens > min_tokens


def num_held(data: bytes) -> int:
    """Bytes at the end that a next byte may make a character of."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return len(decoder.getstate()[0])


@settings(max_examples=400)
@given(token_bytes, stop_lists, st.booleans(), st.integers(0, 5))
def test_a_token_is_released_with_its_text(
    tokens: list[bytes], stops: list[str], include_stop: bool, min_tokens: int
) -> None:
    tokens = [*tokens, b""]  # as a hidden token is
    stream = _native.TextStream(
        table(*tokens), stops=stops, include_stop=include_stop, min_tokens=min_tokens
    )
    text = ""
    text_ends: list[int] = []  # of the tokens whose bytes are all characters by now
    for count in range(1, len(tokens) + 1):
        stream.push(1 + count)
        text += stream.take_text()
        if stream.stopped:
            assert stream.num_tokens_released == stream.num_tokens == count
            break
        data = b"".join(tokens[:count])
        num_certain = len(data) - num_held(data)
        while len(text_ends) < count and len(b"".join(tokens[: len(text_ends) + 1])) <= num_certain:
            text_ends.append(len(certain_text(tokens[:count])))
        assert stream.num_tokens_released == sum(end <= len(text) for end in text_ends)
    stream.finish()
    assert stream.num_tokens_released == stream.num_tokens


@settings(max_examples=200)
@given(
    token_bytes,
    stop_lists,
    st.lists(st.integers(0, 15), max_size=20),
    st.integers(1, 8),
)
def test_deltas_join_to_the_collected_text(
    tokens: list[bytes], stops: list[str], ids: list[int], block_len: int
) -> None:
    vocabulary = table(*tokens)
    streamed = deltas(_native.TextStream(vocabulary, stops=stops), ids)
    collected = _native.TextStream(vocabulary, stops=stops)
    for begin in range(0, len(ids), block_len):  # many tokens a step, text taken at the end only
        for token_id in ids[begin : begin + block_len]:
            collected.push(token_id)
    collected.finish()
    assert "".join(streamed) == collected.take_text()
    assert collected.take_text() == ""


@pytest.mark.parametrize("ending", ["end_id", "length", "stop"])
def test_the_end_repeats_no_text(ending: str) -> None:
    stream = _native.TextStream(table(b"one ", b"two ", b"STOP"), stops=["STOP"])
    ids = [2, 3, {"end_id": END_OF_TURN, "length": 2, "stop": 4}[ending]]
    want = ["one ", "two ", "one " if ending == "length" else "", ""]
    assert deltas(stream, ids) == want
    assert stream.num_tokens == 3


def test_stop_over_several_tokens_does_not_leak() -> None:
    tokens = [b"Total: 5", b"\n", b"##", b" E", b"ND", b" of page"]
    stream = _native.TextStream(table(*tokens), stops=["\n## END"])
    assert deltas(stream, range(2, 8)) == ["Total: 5", "", "", "", "", ""]
    assert stream.num_tokens == 5
    assert stream.matched_stop == "\n## END"


def test_false_start_is_released_in_full() -> None:
    tokens = [b"Total: 5", b"\n##", b" EN", b"TRY", b" 2"]
    stream = _native.TextStream(table(*tokens), stops=["\n## END"])
    assert deltas(stream, range(2, 7)) == ["Total: 5", "", "", "\n## ENTRY", " 2", ""]
    assert stream.matched_stop is None


@pytest.mark.parametrize(("include_stop", "want"), [(False, "x"), (True, "xab")])
def test_stop_in_the_middle_of_a_token(include_stop: bool, want: str) -> None:
    stream = _native.TextStream(table(b"xabz"), stops=["ab"], include_stop=include_stop)
    assert "".join(deltas(stream, [2, 2])) == want
    assert stream.matched_stop == "ab"
    assert stream.num_tokens == 1


def test_block_of_tokens_is_cut_at_the_stop() -> None:
    stream = _native.TextStream(table(b"a", b"b", b"."), stops=["."])
    assert [stream.push(i) for i in [2, 3, 4, 2, 3, 4]] == [False, False, True, True, True, True]
    assert stream.num_tokens == 3
    assert stream.take_text() == "ab"


@pytest.mark.parametrize(("skip", "want"), [(True, "ab"), (False, "a<|image_pad|>b<|im_end|>")])
def test_special_tokens_show_on_request_only(skip: bool, want: str) -> None:
    stream = _native.TextStream(table(b"a", b"b"), skip_special_tokens=skip)
    assert "".join(deltas(stream, [2, IMAGE_PAD, 3, END_OF_TURN])) == want
    assert stream.num_tokens == 4


def test_stop_goes_over_a_hidden_special_token() -> None:
    stream = _native.TextStream(table(b"xa", b"b"), stops=["ab"])
    assert deltas(stream, [2, IMAGE_PAD, 3]) == ["x", "", "", ""]
    assert stream.matched_stop == "ab"


def test_stop_that_the_end_of_the_sequence_completes() -> None:
    stream = _native.TextStream(table(b"x\xe4"), stops=["\ufffd"])
    assert not stream.push(2)
    assert stream.finish()
    assert (stream.take_text(), stream.matched_stop) == ("x", "\ufffd")


@pytest.mark.parametrize("token_id", [-1, 99, 2**31 - 1])
def test_id_out_of_range_counts_without_text(token_id: int) -> None:
    stream = _native.TextStream(table(b"\xe4", b"\xb8\x96"))
    assert "".join(deltas(stream, [2, token_id, 3])) == "世"
    assert stream.num_tokens == 3


def test_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="stop string 0 is empty"):
        _native.TextStream(table(b"a"), stops=[""])


def test_vocabulary_lives_as_long_as_its_stream() -> None:
    stream = _native.TextStream(_native.Vocabulary.from_tokens([b"kept"]))
    stream.push(0)
    assert stream.take_text() == "kept"
