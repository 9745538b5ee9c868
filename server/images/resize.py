"""Size and pixels as the reference image processor makes them.

The reference is `Qwen2VLImageProcessorPil` of transformers 5.14.1 with Pillow 13.0.0, which this
package pins: other versions of Pillow resize in another order and give other pixels.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image

from server.images.limits import ImageSize


def smart_resize(height: int, width: int, size: ImageSize) -> tuple[int, int]:
    """Returns height and width of the picture that the model reads.

    Both are multiples of `size.factor`. Their product lies in the range of `size` as far as the
    shape allows: a side is never shorter than the factor.
    """
    factor = size.factor
    # round() goes to the even number in the middle, as the reference does.
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    if new_height * new_width > size.max_pixels:
        shrink = math.sqrt(height * width / size.max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < size.min_pixels:
        grow = math.sqrt(size.min_pixels / (height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def resize(picture: Image.Image, size: ImageSize) -> Image.Image:
    """Resizes an upright RGB picture to what the model reads, antialiased bicubic on uint8."""
    height, width = smart_resize(picture.height, picture.width, size)
    return picture.resize((width, height), Image.Resampling.BICUBIC)


def normalisation_table(
    mean: Sequence[float], std: Sequence[float], rescale: float
) -> npt.NDArray[np.float32]:
    """Returns the model's input for every value of a pixel, bit for bit that of the reference.

    The reference multiplies in float64 and rounds to float32; then it subtracts and divides in
    float32, where mean and std are rounded too.

    Args:
        mean: Mean of each channel, in units of the rescaled pixel.
        std: Standard deviation of each channel, likewise.
        rescale: Factor of the pixel, 1/255 as a rule.

    Returns:
        float32 [3, 256]: entry [c, p] is (p * rescale - mean[c]) / std[c].
    """
    rescaled = (np.arange(256, dtype=np.float64) * rescale).astype(np.float32)
    means = np.array(mean, np.float32)[:, None]
    stds = np.array(std, np.float32)[:, None]
    table: npt.NDArray[np.float32] = (rescaled[None, :] - means) / stds
    return table
