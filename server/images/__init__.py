"""Pictures and pages become pixels, in worker processes with limits.

`check_header` refuses a file by its first bytes; `DecodePool` makes a `PreparedImage` of what is
left, or of a page of a PDF. Nothing here opens a path or a URL on behalf of a caller.
"""

from server.images.formats import ImageFormat, ImageHeader, check_header
from server.images.limits import ImageLimits, ImageSize
from server.images.pool import DecodePool
from server.images.prepared import PdfInfo, PreparedImage
from server.images.refusal import DecoderLostError, ImageRefusedError, RefusalReason

__all__ = [
    "DecodePool",
    "DecoderLostError",
    "ImageFormat",
    "ImageHeader",
    "ImageLimits",
    "ImageRefusedError",
    "ImageSize",
    "PdfInfo",
    "PreparedImage",
    "RefusalReason",
    "check_header",
]
