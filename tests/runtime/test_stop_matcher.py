import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime import _native


def first_match(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The end of the match that ends first, and the longest stop that ends there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


def cut(text: str, stops: list[str], *, include_stop: bool) -> tuple[str, str | None]:
    found = first_match(text, stops)
    if found is None:
        return text, None
    end, stop = found
    return text[: end if include_stop else end - len(stop)], stop


def certain(text: str, stops: list[str]) -> str:
    """The part of a text without a match that no continuation can cut."""
    size = len(text)
    for stop in stops:
        for num_there in range(1, len(stop)):
            if text.endswith(stop[:num_there]):
                size = min(size, len(cut(text + stop[num_there:], stops, include_stop=False)[0]))
    return text[:size]


def run(matcher: _native.StopMatcher, pieces: list[str]) -> tuple[list[str], str | None]:
    released = [matcher.push(piece)[0] for piece in pieces]
    return [*released, matcher.finish()], matcher.matched_stop


def cut_at(text: str, cuts: list[int]) -> list[str]:
    borders = sorted(c % (len(text) + 1) for c in cuts)
    return [text[a:b] for a, b in zip([0, *borders], [*borders, len(text)], strict=True)]


ALPHABET = "ab世\u0081"  # few and partly equal bytes: many overlaps
stop_lists = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=4)
texts = st.text(ALPHABET, max_size=30)
cut_lists = st.lists(st.integers(0, 30), max_size=8)


@settings(max_examples=500)
@given(texts, stop_lists, cut_lists, st.booleans())
@example("xabcy", ["abcd", "bc"], [2, 3], False)
@example("xabcy", ["bc", "abc"], [], False)
@example("aab", ["aab", "aaa"], [1, 2], False)
def test_equals_a_scan_whatever_the_pieces(
    text: str, stops: list[str], cuts: list[int], include_stop: bool
) -> None:
    released, matched = run(
        _native.StopMatcher(stops, include_stop=include_stop), cut_at(text, cuts)
    )
    assert ("".join(released), matched) == cut(text, stops, include_stop=include_stop)


@settings(max_examples=300)
@given(texts, stop_lists)
@example("xa", ["abc", "b"])  # `abc` never wins, so `a` need not wait
def test_releases_all_that_no_continuation_can_cut(text: str, stops: list[str]) -> None:
    matcher = _native.StopMatcher(stops)
    released = ""
    for end, character in enumerate(text, start=1):
        piece, matched = matcher.push(character)
        released += piece
        if matched is not None:
            return
        assert released == certain(text[:end], stops)


def test_stop_over_several_pieces_is_held_back() -> None:
    matcher = _native.StopMatcher(["\n## END"])
    pieces = ["Page one.", "\n", "##", " E", "ND", " of it"]
    assert run(matcher, pieces) == (["Page one.", "", "", "", "", "", ""], "\n## END")


def test_false_start_is_released_in_full() -> None:
    released, matched = run(_native.StopMatcher(["\n## END"]), ["Page", "\n## EN", "TRY", " 1"])
    assert released == ["Page", "", "\n## ENTRY", " 1", ""]
    assert matched is None


def test_unfinished_start_is_released_at_the_end() -> None:
    assert run(_native.StopMatcher(["\n## END"]), ["a\n##"]) == (["a", "\n##"], None)


@pytest.mark.parametrize(("include_stop", "want"), [(False, "x"), (True, "xab")])
def test_stop_inside_a_piece(include_stop: bool, want: str) -> None:
    matcher = _native.StopMatcher(["ab"], include_stop=include_stop)
    assert matcher.push("xabz") == (want, "ab")
    assert matcher.push("more") == ("", "ab")
    assert matcher.finish() == ""


def test_included_stop_holds_nothing_back() -> None:
    matcher = _native.StopMatcher(["END"], include_stop=True)
    assert run(matcher, ["a E", "N", "D."]) == (["a E", "N", "D", ""], "END")


def test_without_stops_text_passes() -> None:
    assert run(_native.StopMatcher([]), ["a", "", "世"]) == (["a", "", "世", ""], None)


def test_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="stop string 1 is empty"):
        _native.StopMatcher(["a", ""])


@pytest.mark.plain_build
@pytest.mark.parametrize("piece_len", [64, 1_000_000])
def test_time_is_linear_for_repetitive_stops(piece_len: int) -> None:
    stops = ["a" * (255 - i) + "b" for i in range(8)] + ["a" * 127 + c + "b" * 128 for c in "cdef"]
    text = "a" * 2_000_000
    matcher = _native.StopMatcher(stops)
    begin = time.perf_counter()
    released = [matcher.push(text[i : i + piece_len])[0] for i in range(0, len(text), piece_len)]
    # Comparing every stop at every byte would be 10^9 steps and more.
    assert time.perf_counter() - begin < 1.0
    assert "".join(released) == text[:-255]
    assert matcher.push("b") == ("", stops[0])
