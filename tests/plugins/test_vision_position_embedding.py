import numpy as np
import pytest
from reference.linear import from_bfloat16, to_bfloat16
from reference.vision_position_embedding import position_embedding

from runtime._native import plugins

# height and width in patches, merge_size, side, dim
CASES = [
    (1, 1, 1, 1, 1),
    (1, 5, 1, 4, 3),
    (2, 2, 2, 6, 64),
    (6, 10, 2, 6, 100),
    (3, 48, 3, 48, 17),
    (50, 2, 2, 48, 40),
    (94, 96, 2, 48, 33),
]


@pytest.mark.parametrize(("height", "width", "merge", "side", "dim"), CASES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_reference_in_any_pieces(
    rng: np.random.Generator,
    height: int,
    width: int,
    merge: int,
    side: int,
    dim: int,
    with_bias: bool,
) -> None:
    table = to_bfloat16(rng.normal(size=(side * side, dim)))
    x = rng.normal(size=(height * width, dim)).astype(np.float32)
    bias = rng.normal(size=dim).astype(np.float32) if with_bias else None
    position = position_embedding(from_bfloat16(table), height, width, merge)
    added = np.zeros(dim) if bias is None else bias.astype(np.float64)
    largest = np.abs(from_bfloat16(table)).max()
    bound = 8 * 2.0**-24 * (np.abs(x) + np.abs(added) + largest)

    whole = x.copy()
    plugins.vision_position_embedding(whole, table, height, width, merge, bias)
    assert (np.abs(whole - (x + added + position)) <= bound).all()
    pool = plugins.ThreadPool(2)
    for piece in (1, 13, len(x)):
        out = x.copy()
        for first in range(0, len(x), piece):
            plugins.vision_position_embedding(
                out[first : first + piece],
                table,
                height,
                width,
                merge,
                bias,
                first,
                pool,
            )
        assert out.tobytes() == whole.tobytes()


def test_refuses_what_does_not_fit() -> None:
    def run(entries: int, dim: int, rows: int) -> None:
        x = np.zeros((rows, 4), np.float32)
        plugins.vision_position_embedding(x, np.zeros((entries, dim), np.uint16), 2, 2, 2)

    run(9, 4, 4)
    with pytest.raises(ValueError, match="a table of a square number of entries, found 8"):
        run(8, 4, 4)
    with pytest.raises(ValueError, match=r"expected table of shape \[9, 4\], found \[9, 5\]"):
        run(9, 5, 4)
    with pytest.raises(ValueError, match="expected rows inside the 4 of the picture, got 5"):
        run(9, 4, 5)
