"""Files that callers send: pictures and PDFs, good and bad, made without a decoder of ours."""

import io
import struct
import zlib

from PIL import Image


def png(width: int = 96, height: int = 64, colour: tuple[int, int, int] = (250, 240, 230)) -> bytes:
    """A picture of one colour with a darker stripe."""
    picture = Image.new("RGB", (width, height), colour)
    picture.paste((20, 20, 20), (0, 0, width, max(1, height // 8)))
    return encoded(picture, "PNG")


def encoded(picture: Image.Image, image_format: str) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, image_format)
    return stream.getvalue()


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_bomb(side: int = 40_000) -> bytes:
    """A square picture of one bit a pixel, all zero: some 194 kB at 40,000 pixels a side."""
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    row = bytes(1 + (side + 7) // 8)
    packer = zlib.compressobj(9)
    body = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
    )


def gif_header(width: int = 65_535, height: int = 65_535) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height) + b"\x80\0\0" + bytes(6) + b"\x3b"


def pdf(*pages: str, broken: tuple[int, ...] = (), trailer: str = "") -> bytes:
    """A PDF of A6 pages, each with a line of text; those of `broken` are no pages at all."""
    font = b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"
    objects = [b"", b"", font]
    kids = []
    for index, text in enumerate(pages):
        content = f"BT /F1 24 Tf 20 300 Td ({text}) Tj ET".encode()
        objects.append(b"<</Length %d>>stream\n%s\nendstream" % (len(content), content))
        page = (
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 298 420]/Contents %d 0 R"
            b"/Resources<</Font<</F1 3 0 R>>>>>>" % len(objects)
        )
        objects.append(b"42" if index in broken else page)
        kids.append(f"{len(objects)} 0 R")
    objects[0] = b"<</Type/Catalog/Pages 2 0 R>>"
    objects[1] = f"<</Type/Pages/Kids[{' '.join(kids)}]/Count {len(pages)}>>".encode()
    body, offsets = bytearray(b"%PDF-1.4\n"), []
    for number, value in enumerate(objects, 1):
        offsets.append(len(body))
        body += b"%d 0 obj" % number + value + b"endobj\n"
    start = len(body)
    body += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    body += b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    body += b"trailer<</Size %d/Root 1 0 R%s>>\nstartxref\n%d\n%%%%EOF" % (
        len(objects) + 1,
        trailer.encode(),
        start,
    )
    return bytes(body)


def encrypted_pdf() -> bytes:
    """A PDF that asks for a password: the standard handler, with keys that fit none."""
    key = "41" * 32
    return pdf(
        "secret",
        trailer=f"/Encrypt<</Filter/Standard/V 1/R 2/O<{key}>/U<{key}>/P -4>>"
        "/ID[<00112233445566778899aabbccddeeff><00112233445566778899aabbccddeeff>]",
    )
