"""Edit distance and table cells."""

import random

from models.nano.train.score import cell_counts, edit_distance


def slow_distance(a: str, b: str) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            best = min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
            diagonal, row[j] = row[j], best
    return row[-1]


def test_edit_distance_is_that_of_the_table() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(400):
        a = "".join(rng.choices("abc", k=rng.randrange(90)))
        b = "".join(rng.choices("abc", k=rng.randrange(90)))
        assert edit_distance(a, b) == slow_distance(a, b), (a, b)


def test_cells() -> None:
    want = "Text\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n| x | y |\n|---|---|\n| - | 3 |"
    assert cell_counts(want, want) == (8, 8, 8)
    assert cell_counts(want.replace("2", "3"), want) == (7, 8, 8)
    assert cell_counts("Text", want) == (0, 0, 8)
    assert cell_counts("| a | b |\n|---|---|\n| 1 | 2 |", want) == (4, 4, 8)
