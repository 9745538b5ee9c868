import numpy as np
import pytest

from runtime._native import plugins


def conv(table: np.ndarray) -> None:
    arrays = np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float32)
    ring = np.zeros((2, 1, 1), np.float32)
    out = np.zeros((1, 1), np.float32)
    plugins.causal_conv(
        *arrays, ring, out, table, np.zeros(1, np.int32), np.array([0, 1], np.int32)
    )


def test_entries_are_aligned_and_zero() -> None:
    table = plugins.make_slot_table(3)
    dtype = plugins.slot_table_dtype()
    assert table.shape == (3,)
    assert table.dtype == dtype
    assert dtype.itemsize % 64 == 0
    assert table.ctypes.data % 64 == 0
    assert not any(table.tobytes())


def test_fields_follow_each_other() -> None:
    dtype = plugins.slot_table_dtype()
    end = 0
    for name in dtype.names:
        field, offset = dtype.fields[name]
        assert offset == end
        end = offset + field.itemsize
    assert end <= dtype.itemsize
    assert dtype["end_ids"].shape == (plugins.MAX_END_IDS,)


def test_takes_entries_or_their_bytes() -> None:
    table = plugins.make_slot_table(2)
    conv(table)
    conv(table.view(np.uint8).reshape(2, -1))


def test_refuses_other_arrays() -> None:
    table = plugins.make_slot_table(4)
    read_only = table[:2].copy()
    read_only.flags.writeable = False
    for wrong in (table.view(np.int32), table[::2], np.zeros(2, np.float32), read_only):
        with pytest.raises(TypeError, match="causal_conv"):
            conv(wrong)


def test_refuses_misaligned_memory() -> None:
    size = plugins.slot_table_dtype().itemsize
    memory = np.zeros(3 * size + 64, np.uint8)
    start = -memory.ctypes.data % 64 + 4
    with pytest.raises(ValueError, match="causal_conv: expected a slot table aligned to 64 bytes"):
        conv(memory[start : start + 2 * size].reshape(2, size))
