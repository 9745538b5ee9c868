"""What comes out of the workers."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from server.images.shared_bytes import SharedBytes


@dataclass(frozen=True, slots=True, eq=False)
class PreparedImage:
    """A picture as the model reads it, before normalisation.

    Attributes:
        pixels: uint8 [height, width, 3], RGB, C-contiguous; height and width are multiples of
            ImageSize.factor.
        source_width: Width of the upright picture as sent or rendered, pixels.
        source_height: Height of the upright picture as sent or rendered, pixels.
        digest: sha256 of the shape and the pixels: equal for pictures that the model cannot tell
            apart.
    """

    pixels: npt.NDArray[np.uint8]
    source_width: int
    source_height: int
    digest: bytes


@dataclass(frozen=True, slots=True, eq=False)
class PdfInfo:
    """An open document: its bytes, kept once for all its pages.

    The bytes live in shared memory until `close`, or until nothing refers to this object.

    Attributes:
        num_pages: Pages of the document, 1 and up.
        page_indices: The pages that the request reads, at most ImageLimits.max_pages.
        data: The file.
    """

    num_pages: int
    page_indices: range
    data: SharedBytes

    def close(self) -> None:
        """Frees the bytes; pages can be prepared no more. Belongs to the event loop."""
        self.data.close_off_loop()
