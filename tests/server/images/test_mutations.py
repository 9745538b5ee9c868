"""Damaged files of every format, through real workers: each is read or refused, nothing grows."""

from __future__ import annotations

import asyncio
import io
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pdf_files import PdfPage, pdf_file
from picture_files import ORIENTATION, random_file
from PIL import Image

from server.images import (
    DecodePool,
    ImageLimits,
    ImageRefusedError,
    ImageSize,
    PreparedImage,
    RefusalReason,
)

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20
LIMITS = ImageLimits(max_pixels=4_000_000, decode_timeout_s=10, memory_bytes=512 * MIB)
SIZE = ImageSize(1024, 65536)
NUM_WORKERS = 2
NUM_IN_FLIGHT = 8


def sound_files() -> list[bytes]:
    """Files to damage: every format and mode, kinds of JPEG, frames, PDF."""
    files = [random_file(index, "to be damaged").data for index in range(42)]
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    photo = Image.fromarray(random_file(0, "photo").upright)
    for image_format, options in (
        ("JPEG", {"exif": exif}),
        ("JPEG", {"progressive": True}),
        ("JPEG", {"subsampling": 0, "restart_marker_rows": 1}),
        ("WEBP", {"quality": 60}),
        ("WEBP", {"save_all": True, "append_images": [photo]}),
        ("GIF", {"save_all": True, "append_images": [photo.rotate(180)]}),
        ("TIFF", {"compression": "jpeg"}),
        ("TIFF", {"save_all": True, "append_images": [photo]}),
        ("PNG", {"save_all": True, "append_images": [photo.rotate(180)]}),
        ("PDF", {}),
    ):
        out = io.BytesIO()
        photo.save(out, image_format, **options)
        files.append(out.getvalue())
    for image_format in ("JPEG", "TIFF"):
        out = io.BytesIO()
        photo.convert("CMYK").save(out, image_format)
        files.append(out.getvalue())
    text = b"BT /F1 24 Tf 20 40 Td (words on a page) Tj ET 0 0 1 RG 3 w 0 0 m 200 100 l S"
    pages = [PdfPage(), PdfPage(content=text, rotate=90)]
    return [*files, pdf_file(pages), pdf_file(pages, user_password=b"")]


def flip_bits(data: bytearray, draw: random.Random) -> None:
    for _ in range(draw.choice((1, 1, 2, 8, 64))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def set_bytes(data: bytearray, draw: random.Random) -> None:
    for _ in range(draw.choice((1, 2, 4, 16))):
        data[draw.randrange(len(data))] = draw.choice((0, 1, 0x7F, 0x80, 0xFF))


def damage_the_header(data: bytearray, draw: random.Random) -> None:
    for _ in range(draw.choice((1, 2, 3))):
        data[draw.randrange(min(len(data), 128))] = draw.randrange(256)


def set_a_number(data: bytearray, draw: random.Random) -> None:
    at = draw.randrange(len(data))
    size = draw.choice((2, 4, 8))
    number = draw.choice((0, 1, 255, 256, 32767, 65535, (1 << 31) - 1, 1 << 31, (1 << 32) - 1))
    order = draw.choice(("little", "big"))
    data[at : at + size] = (number % (1 << 8 * size)).to_bytes(size, order)


def cut(data: bytearray, draw: random.Random) -> None:
    del data[draw.randrange(1, len(data)) :]


def remove_a_part(data: bytearray, draw: random.Random) -> None:
    at = draw.randrange(len(data))
    del data[at : at + draw.randrange(1, 200)]


def repeat_a_part(data: bytearray, draw: random.Random) -> None:
    at = draw.randrange(len(data))
    part = data[at : at + draw.randrange(1, 400)]
    data[at:at] = part * draw.randrange(1, 20)


def insert_noise(data: bytearray, draw: random.Random) -> None:
    at = draw.randrange(len(data))
    data[at:at] = draw.randbytes(draw.randrange(1, 100))


MUTATIONS: list[Callable[[bytearray, random.Random], None]] = [
    flip_bits,
    set_bytes,
    damage_the_header,
    set_a_number,
    cut,
    remove_a_part,
    repeat_a_part,
    insert_noise,
]


def damaged(files: list[bytes], draw: random.Random) -> bytes:
    """Damages a file once or more, now and then with the end of another."""
    data = bytearray(draw.choice(files))
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        draw.choice(MUTATIONS)(data, draw)
        if len(data) < 2:
            break
    if draw.randrange(20) == 0:
        other = draw.choice(files)
        data[draw.randrange(len(data) + 1) :] = other[draw.randrange(len(other)) :]
    return bytes(data)


def resident_kib(pid: int | str) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4


async def read(pool: DecodePool, data: bytes) -> PreparedImage:
    if b"%PDF" not in data[:1024]:
        return await pool.prepare(data, SIZE)
    pdf = await pool.open_pdf(data)
    try:
        return await pool.prepare_pdf_page(pdf, pdf.page_indices[-1], 72, SIZE)
    finally:
        pdf.close()


async def read_damaged_files(seed: int, count: int, budget_s: float) -> Counter[str]:
    """Reads so many files, fewer if the time is over; returns what became of them."""
    draw = random.Random(seed)
    files = sound_files()
    outcomes: Counter[str] = Counter()
    end = time.monotonic() + budget_s
    pool = DecodePool(LIMITS, NUM_WORKERS)
    await pool.start()

    async def work() -> None:
        while outcomes["files"] < count and time.monotonic() < end:
            outcomes["files"] += 1
            data = damaged(files, draw)
            try:
                picture = await read(pool, data)
            except ImageRefusedError as error:
                outcomes[error.reason.value] += 1
                if "takes longer" in str(error) or "ends its decoder" in str(error):
                    outcomes["workers lost"] += 1
                    print(f"{error}: {len(data)} bytes, {data[:64].hex()}")
            else:
                outcomes["read"] += 1
                assert picture.pixels.size > 0

    try:
        for data in files:
            assert isinstance(await read(pool, data), PreparedImage)
        before_kib = resident_kib("self")
        await asyncio.gather(*(work() for _ in range(NUM_IN_FLIGHT)))
        outcomes["server grew, KiB"] = max(0, resident_kib("self") - before_kib)
        outcomes["largest worker, KiB"] = max(map(resident_kib, pool.worker_pids))
        for data in files:  # and all is well
            assert isinstance(await read(pool, data), PreparedImage)
        assert len(pool.worker_pids) == NUM_WORKERS
    finally:
        await pool.close()
    return outcomes


@pytest.mark.plain_build
def test_damaged_files_are_read_or_refused() -> None:
    """1,500 in the default suite, or as many as 20 s allow; MUTATIONS=10000 for more, unhurried."""
    asked = os.environ.get("MUTATIONS")
    count, budget_s = (int(asked), 3600.0) if asked else (1500, 20.0)
    seed = random.randrange(1 << 32)
    print("seed", seed)
    outcomes = asyncio.run(read_damaged_files(seed, count, budget_s))
    print(dict(outcomes))
    assert outcomes["files"] >= (count if asked else 100)
    refused = sum(outcomes[reason.value] for reason in RefusalReason)
    assert outcomes["read"] + refused == outcomes["files"]
    assert min(outcomes["read"], outcomes["IMAGE_INVALID"]) > 0
    assert outcomes["server grew, KiB"] < 50 * 1024
    assert outcomes["largest worker, KiB"] < 300 * 1024
    # Codecs as they are pinned are sound: next to no file ends a worker.
    assert outcomes["workers lost"] <= 1 + outcomes["files"] // 200
