"""`preprocessor.json`: how a picture becomes patches."""

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Size = Annotated[int, Field(gt=0)]
Channels = Annotated[list[float], Field(min_length=3, max_length=3)]


class Preprocessor(BaseModel):
    """Sizes in pixels; a picture is resized to multiples of `factor` between the two areas.

    Attributes:
        patch_size: Rows and columns of a patch.
        merge_size: Rows and columns of patches that become one token.
        temporal_patch_size: Frames of a patch; a still picture fills them all.
        min_pixels: Smallest area of a resized picture.
        max_pixels: Largest area of a resized picture.
        image_mean: Per channel, of values in [0, 1].
        image_std: Per channel.
        rescale_factor: What turns a byte into a value in [0, 1].
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    patch_size: Size
    merge_size: Size
    temporal_patch_size: Size
    min_pixels: Size
    max_pixels: Size
    image_mean: Channels
    image_std: Channels
    rescale_factor: Annotated[float, Field(gt=0)]

    @property
    def factor(self) -> int:
        """Pixels of a token in either direction."""
        return self.patch_size * self.merge_size

    @model_validator(mode="after")
    def _areas_hold_a_picture(self) -> Self:
        if not self.min_pixels <= self.max_pixels or self.max_pixels < self.factor**2:
            raise ValueError("min_pixels, max_pixels and the sizes of patches disagree")
        return self
