from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime import RepetitionLimits, _native


def repeats(ids: list[int], max_period: int, min_repeats: int, min_repeated_tokens: int) -> bool:
    """Whether the tail of `ids` is a repetition, by the words of the definition."""
    for period in range(1, max_period + 1):
        size = max(period * min_repeats, min_repeated_tokens)
        tail = ids[-size:]
        if len(ids) >= size and tail == (tail[:period] * size)[:size]:
            return True
    return False


def first_end(ids: list[int], limits: tuple[int, int, int], min_tokens: int) -> int | None:
    for count in range(min_tokens + 1, len(ids) + 1):
        if repeats(ids[:count], *limits):
            return count
    return None


def guard_end(ids: list[int], limits: tuple[int, int, int], min_tokens: int) -> int | None:
    names = ("max_period", "min_repeats", "min_repeated_tokens")
    guard = _native.RepetitionGuard(
        RepetitionLimits(**dict(zip(names, limits, strict=True))), min_tokens=min_tokens
    )
    return next((count for count, id_ in enumerate(ids, start=1) if guard.push(id_)), None)


def loops(parts: list[tuple[list[int], int]]) -> list[int]:
    return [id_ for stretch, count in parts for id_ in stretch * count]


sequences = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=7), st.integers(1, 6)), max_size=6
).map(loops)
limits_of = st.tuples(st.integers(1, 8), st.integers(2, 5), st.integers(0, 20))


@settings(max_examples=1000)
@given(sequences, limits_of, st.integers(0, 20))
@example([0] * 9, (1, 2, 0), 0)
@example([0, 1] * 9, (1, 2, 0), 0)
@example([0, 0, 1] * 4, (3, 3, 10), 0)
@example([0] * 12, (8, 3, 7), 9)
def test_equals_the_definition(
    ids: list[int], limits: tuple[int, int, int], min_tokens: int
) -> None:
    assert guard_end(ids, limits, min_tokens) == first_end(ids, limits, min_tokens)


@pytest.mark.parametrize("period", [1, 2, 63, 64, 65, 511, 512])
def test_period_as_long_as_the_limit_and_longer(period: int) -> None:
    ids = list(range(1000, 1100)) + list(range(period)) * 4
    for max_period in (64, 512):
        want = 100 + 3 * period if period <= max_period else None
        assert guard_end(ids, (max_period, 3, 0), 0) == want


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("max_period", x) for x in (-1, 0, 513)],
        *[("min_repeats", x) for x in (-1, 1, 1025)],
        *[("min_repeated_tokens", x) for x in (-1, 65537)],
    ],
)
def test_limits_out_of_range_are_named(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"repetition_guard.{field}: {value}, expected"):
        _native.RepetitionGuard(RepetitionLimits(**{field: value}))


@pytest.mark.plain_build
def test_time_does_not_grow_with_the_sequence() -> None:
    guard = _native.RepetitionGuard(
        RepetitionLimits(max_period=512, min_repeats=1024, min_repeated_tokens=65536)
    )
    begin = time.perf_counter()
    found = [count for count in range(1, 500_001) if guard.push(count % 600)]
    # Comparing the tail at each period and token would be 10^11 steps and more.
    assert time.perf_counter() - begin < 5
    assert found == []
