"""PDF files written by hand: pages of rectangles, and the ways in which a document can be bad."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

PASSWORD_PADDING = bytes.fromhex("28bf4e5e4e758a4164004e56fffa01082e2e00b6d0683e802f0ca9fe6453697a")
PERMISSIONS = -4


@dataclass(frozen=True, slots=True)
class PdfPage:
    """A page.

    Attributes:
        content: Operators; the default paints the lower left quarter of 200 x 100 points red.
        box: Left, bottom, right, top, points.
        rotate: Degrees clockwise.
        broken: No page at all, where the tree says that there is one.
    """

    content: bytes = b"1 0 0 rg 0 0 100 50 re f"
    box: tuple[float, float, float, float] = (0, 0, 200, 100)
    rotate: int = 0
    broken: bool = False


def pdf_file(pages: Sequence[PdfPage], *, user_password: bytes | None = None) -> bytes:
    """Writes a document; with a password, even an empty one, it is encrypted (RC4, 40 bits)."""
    identity = hashlib.md5(b"a document", usedforsecurity=False).digest()
    key = b""
    encrypt = b""
    if user_password is not None:
        owner = bytes(range(32))
        padded = (user_password + PASSWORD_PADDING)[:32]
        seed = padded + owner + struct.pack("<i", PERMISSIONS) + identity
        key = hashlib.md5(seed, usedforsecurity=False).digest()[:5]
        encrypt = b"<< /Filter /Standard /V 1 /R 2 /O <%s> /U <%s> /P %d >>" % (
            owner.hex().encode(),
            rc4(key, PASSWORD_PADDING).hex().encode(),
            PERMISSIONS,
        )
    kids = b" ".join(b"%d 0 R" % (3 + 2 * index) for index in range(len(pages)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Count %d /Kids [%s] >>" % (len(pages), kids),
    ]
    for index, page in enumerate(pages):
        number = 4 + 2 * index
        content = page.content
        if key:
            seed = key + struct.pack("<I", number)[:3] + bytes(2)
            content = rc4(hashlib.md5(seed, usedforsecurity=False).digest()[:10], content)
        box = " ".join(f"{side:g}" for side in page.box).encode()
        objects.append(
            b"(no page)"
            if page.broken
            else b"<< /Type /Page /Parent 2 0 R /MediaBox [%s] /Rotate %d /Contents %d 0 R >>"
            % (box, page.rotate, number)
        )
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(content), content))
    out = bytearray(b"%PDF-1.7\n")
    offsets = []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    out += b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    name = identity.hex().encode()
    out += b"trailer\n<< /Size %d /Root 1 0 R /ID [<%s> <%s>] %s >>\nstartxref\n%d\n%%%%EOF\n" % (
        len(objects) + 1,
        name,
        name,
        b"/Encrypt " + encrypt if encrypt else b"",
        table,
    )
    return bytes(out)


def rc4(key: bytes, data: bytes) -> bytes:
    state = list(range(256))
    j = 0
    for i in range(256):
        j = (j + state[i] + key[i % len(key)]) % 256
        state[i], state[j] = state[j], state[i]
    out = bytearray()
    i = j = 0
    for octet in data:
        i = (i + 1) % 256
        j = (j + state[i]) % 256
        state[i], state[j] = state[j], state[i]
        out.append(octet ^ state[(state[i] + state[j]) % 256])
    return bytes(out)
