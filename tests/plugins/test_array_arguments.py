"""No op takes a converted copy of an array: results written into one would be lost."""

import numpy as np
import pytest

from runtime._native import plugins


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def weights(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.uint16)


TABLE = plugins.make_slot_table(1)
# Arguments that each op takes; the arrays among them are made wrong in turn.
CALLS = {
    "linear": [zeros(2, 8), weights(4, 8), zeros(2, 4)],
    "silu_mul": [zeros(2, 16), zeros(2, 8)],
    "embedding": [ids(0, 1), weights(3, 4), zeros(2, 4)],
    "gather_rows": [zeros(3, 4), ids(0, 2), zeros(2, 4)],
    "rms_norm": [zeros(2, 4), zeros(4), zeros(2, 4), 1e-6, True, zeros(2, 4)],
    "gated_rms_norm": [zeros(2, 2, 4), zeros(2, 8), zeros(4), zeros(2, 2, 4), 1e-6],
    "causal_conv": [
        *(zeros(2, 8), zeros(8, 4), zeros(1, 8, 8), zeros(2, 8)),
        *(TABLE, ids(0, -1), ids(0, 2, 2)),
    ],
    "gated_attention": [
        *(zeros(2, 2, 8), zeros(2, 2, 8), zeros(2, 2, 8), zeros(2, 2, 4, 8), zeros(2, 2, 4, 8)),
        *(np.array([[0, 1]], np.int32), TABLE, ids(0, -1), ids(0, 2, 2), 1.0),
    ],
    "patchify": [np.zeros((4, 4, 3), np.uint8), zeros(3, 256), zeros(4, 12), 2, 2, 1],
    "vision_position_embedding": [zeros(4, 4), weights(9, 4), 2, 2, 2, zeros(4)],
    "layer_norm": [zeros(2, 4), zeros(4), zeros(4), zeros(2, 4), 1e-6],
    "bias_residual": [zeros(2, 4), zeros(4), zeros(2, 4)],
    "bias_activation": [zeros(2, 4), zeros(4), zeros(2, 4), plugins.Activation.GELU_ERF],
    "vision_rotary": [
        *(zeros(4, 48), zeros(48), zeros(2, 2, 4), zeros(4, 16), zeros(1, 1, 16, 64)),
        *(zeros(1, 64, 16), 2, 2, 2),
    ],
    "vision_attention": [
        *(zeros(4, 16), zeros(1, 1, 16, 64), zeros(1, 64, 16), 4, zeros(4, 16), 1.0),
    ],
    "sample_accept": [
        *(zeros(2, 4), TABLE, ids(0, -1), ids(0, 2, 2), ids(0, -1), ids(2, 0), ids(1, 1)),
        *(np.zeros((2, 2), np.int32), ids(0, 0), ids(0, 0), ids(0, 0), ids(1, 1)[None]),
        *(np.zeros((1, 4), np.uint16), np.zeros((1, 256), np.int32), zeros(1, 256)),
    ],
}
# A view into the fused projection: the op itself looks at its strides.
GATE = ("gated_attention", 1)


def array_positions() -> list[tuple[str, int]]:
    return [
        (op, position)
        for op, arguments in CALLS.items()
        for position, argument in enumerate(arguments)
        if isinstance(argument, np.ndarray) and argument is not TABLE
    ]


@pytest.mark.parametrize(("op", "position"), array_positions())
def test_takes_an_array_as_it_is_or_not_at_all(op: str, position: int) -> None:
    def call(array: np.ndarray) -> None:
        before, after = CALLS[op][:position], CALLS[op][position + 1 :]
        getattr(plugins, op)(*before, array, *after)

    fitting = CALLS[op][position]
    call(fitting)
    wide = np.int64 if fitting.dtype.kind in "iu" else np.float64
    with pytest.raises(TypeError, match=op):
        call(fitting.astype(wide))
    strided = np.repeat(fitting, 2, -1)[..., ::2]
    with pytest.raises(ValueError if (op, position) == GATE else TypeError, match=op):
        call(strided)
