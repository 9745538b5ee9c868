"""Reading and writing .safetensors files as bytes: NumPy has no bfloat16.

Format: 8 bytes little-endian header length, a JSON header, the tensors without gaps
(github.com/huggingface/safetensors, README).
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from build_engine.errors import CheckpointError
from build_engine.model_config import check_readable
from runtime.errors import refusal

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "U16": 2,
    "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format's reference reader
_ALIGNMENT = 64
_LENGTH_BYTES = 8

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a file: its dtype as safetensors spells it, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the data."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        """`BF16 [512, 64]`."""
        return f"{self.dtype} {list(self.shape)}"


class SafetensorsFile:
    """A file opened for reading; data is mapped, not loaded.

    Attributes:
        path: The file.
        tensors: Name to dtype and shape.
    """

    def __init__(self, path: Path) -> None:
        """Maps the file and checks its whole header.

        Args:
            path: The file.

        Raises:
            CheckpointError: Unreadable, truncated, or no safetensors file.
        """
        self.path = path
        try:
            check_readable(path)
            self._bytes: Bytes = np.memmap(path, dtype=np.uint8, mode="r")
        except OSError as error:
            raise self._refuse(str(error.strerror or error)) from error
        except ValueError as error:
            raise self._refuse("an empty file") from error
        header_bytes = self._header_bytes()
        self._data_start = _LENGTH_BYTES + header_bytes
        self.tensors: dict[str, TensorInfo] = {}
        self._offsets: dict[str, int] = {}
        self._read_header(self._parse(self._bytes[_LENGTH_BYTES : self._data_start].tobytes()))

    def data(self, name: str) -> Bytes:
        """The bytes of a tensor, a view of the map."""
        start = self._data_start + self._offsets[name]
        return self._bytes[start : start + self.tensors[name].num_bytes]

    def _refuse(self, found: str) -> CheckpointError:
        return CheckpointError(
            refusal(self.path, found, "a whole safetensors file", "download the file again")
        )

    def _header_bytes(self) -> int:
        size = self._bytes.size
        if size < _LENGTH_BYTES:
            raise self._refuse(f"a file of {size} bytes")
        header_bytes = int.from_bytes(self._bytes[:_LENGTH_BYTES].tobytes(), "little")
        if self._bytes[:_LENGTH_BYTES].tobytes() == b"version ":
            raise self._refuse("a Git LFS pointer, not the weights")
        if header_bytes > _MAX_HEADER_BYTES:
            raise self._refuse("a file that is not safetensors")
        if header_bytes > size - _LENGTH_BYTES:
            raise self._refuse(f"a header of {header_bytes} bytes in a file of {size} bytes")
        return header_bytes

    def _parse(self, header: bytes) -> dict[str, Any]:
        try:
            parsed = json.loads(header, object_pairs_hook=_no_duplicates)
        except (ValueError, RecursionError) as error:
            raise self._refuse(f"a header that is not JSON ({error})") from error
        if not isinstance(parsed, dict):
            raise self._refuse("a header that is no JSON object")
        parsed.pop("__metadata__", None)
        return parsed

    def _read_header(self, header: dict[str, Any]) -> None:
        spans: list[tuple[int, int, str]] = []
        for name, entry in header.items():
            try:
                dtype, shape = entry["dtype"], tuple(entry["shape"])
                start, end = entry["data_offsets"]
            except (TypeError, KeyError, ValueError) as error:
                raise self._refuse(f"a damaged header at {name}") from error
            if any(type(n) is not int or n < 0 for n in (*shape, start, end)):
                raise self._refuse(f"a damaged header at {name}")
            if dtype not in ITEM_BYTES:
                raise self._refuse(f"{name} of the unknown dtype {dtype}")
            info = TensorInfo(dtype, shape)
            if end - start != info.num_bytes:
                raise self._refuse(f"{name} of {end - start} bytes for {info}")
            self.tensors[name] = info
            self._offsets[name] = start
            spans.append((start, end, name))
        position = 0
        for start, end, name in sorted(spans):
            if start != position:
                raise self._refuse(f"{name} at byte {start} where byte {position} is next")
            position = end
        present = self._bytes.size - self._data_start
        if present != position:
            raise self._refuse(f"{present} bytes of data where the header lists {position}")


def encode_header(tensors: Sequence[tuple[str, TensorInfo]]) -> bytes:
    """The header of a file that holds `tensors` in this order, length field included.

    Padded with spaces so that the data starts at a multiple of 64 bytes.
    """
    entries: dict[str, Any] = {}
    position = 0
    for name, info in tensors:
        end = position + info.num_bytes
        entries[name] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result
