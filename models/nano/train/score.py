"""What a reading is worth: character errors, and the cells of tables."""

from collections import Counter


def edit_distance(a: str, b: str) -> int:
    """Returns the Levenshtein distance (Hyyrö 2003, bit-parallel: a column is one integer)."""
    if not a:
        return len(b)
    places: dict[str, int] = {}
    for index, char in enumerate(a):
        places[char] = places.get(char, 0) | 1 << index
    full, last = (1 << len(a)) - 1, 1 << (len(a) - 1)
    plus, minus, score = full, 0, len(a)
    for char in b:
        match = places.get(char, 0)
        diagonal = (((match & plus) + plus) ^ plus) | match | minus
        up, down = minus | ~(diagonal | plus) & full, plus & diagonal
        score += bool(up & last) - bool(down & last)
        up = (up << 1 | 1) & full
        plus = (down << 1 & full) | ~(diagonal | up) & full
        minus = up & diagonal
    return score


def table_cells(markdown: str) -> Counter[tuple[int, int, int, str]]:
    """Returns the cells of all tables: table, row, column, text."""
    cells: Counter[tuple[int, int, int, str]] = Counter()
    table, row, inside = -1, 0, False
    for line in markdown.split("\n"):
        if not line.startswith("|"):
            inside = False
            continue
        if not inside:
            table, row, inside = table + 1, 0, True
        parts = [part.strip() for part in line.strip().strip("|").split("|")]
        if all(part and set(part) <= set("-: ") for part in parts) and row == 1:
            row += 1
            continue
        for column, text in enumerate(parts):
            cells[table, row, column, text] += 1
        row += 1
    return cells


def cell_counts(got: str, want: str) -> tuple[int, int, int]:
    """Returns how many cells agree, and how many there are on either side."""
    ours, theirs = table_cells(got), table_cells(want)
    return sum((ours & theirs).values()), ours.total(), theirs.total()
