"""What pictures and documents may be, and what the model reads."""

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits of a server, the same for every request.

    Attributes:
        max_bytes: Largest file of a picture.
        max_pixels: Most pixels of a picture before it is resized, and of a rendered page.
        max_side_ratio: Longest side over shortest side; the reference processor ends at 200.
        min_side: Shortest side, pixels.
        max_document_bytes: Largest file of a document.
        max_pages: Most pages that one request may read.
        decode_timeout_s: Longest time that one picture or page may keep a worker.
        memory_bytes: Address space of a worker, interpreter and codecs included.
    """

    max_bytes: int = 32 * MIB
    max_pixels: int = 64_000_000
    max_side_ratio: float = 200.0
    min_side: int = 2
    max_document_bytes: int = 64 * MIB
    max_pages: int = 1000
    decode_timeout_s: float = 30.0
    memory_bytes: int = 1536 * MIB


@dataclass(frozen=True, slots=True)
class ImageSize:
    """The size of the picture that the model reads: `preprocessor.json`, or what a request asks.

    Attributes:
        min_pixels: A picture with fewer pixels is enlarged.
        max_pixels: A picture with more pixels is reduced.
        factor: Height and width are multiples of it: patch_size * merge_size.
    """

    min_pixels: int
    max_pixels: int
    factor: int = 32
