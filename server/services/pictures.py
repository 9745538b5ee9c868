"""Pictures of a request: their headers, the memory they take, how they are read."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from deltaflash.v1 import documents_pb2, generation_pb2, inference_pb2
from server.backend import EngineInfo
from server.config import ServerConfig
from server.errors import PromptTooLongError
from server.images import (
    DecodePool,
    ImageHeader,
    ImageRefusedError,
    ImageSize,
    PreparedImage,
    RefusalReason,
    check_header,
)
from server.images.resize import smart_resize

BYTES_PER_PIXEL = 3
COPIES = 2
"""A decoded picture lies in the server and, until the engine has read it, in the engine too."""


@dataclass(frozen=True, slots=True)
class Picture:
    """An encoded picture whose header is good.

    Attributes:
        data: The file.
        mime_type: Its declared type; None says nothing.
        header: What the file says of itself.
        path: Its field in the request, for messages; empty where there is only one.
    """

    data: bytes
    mime_type: str | None
    header: ImageHeader
    path: str = ""

    async def prepare(self, pool: DecodePool, size: ImageSize) -> PreparedImage:
        """Returns what the model reads; raises as `DecodePool.prepare`."""
        try:
            return await pool.prepare(self.data, size, self.mime_type)
        except ImageRefusedError as error:
            raise with_path(error, self.path) from error


def with_path(error: ImageRefusedError, path: str) -> ImageRefusedError:
    """Returns a refusal whose message names the field of the picture."""
    if not path:
        return error
    return ImageRefusedError(error.reason, f"{path}: {error}", error.metadata)


def check_picture(image: generation_pb2.Image, config: ServerConfig, path: str = "") -> Picture:
    """Holds the header of a picture to the limits; decodes nothing.

    Args:
        image: The picture.
        config: Has the limits.
        path: Its field in the request, for messages; empty where there is only one.

    Raises:
        ImageRefusedError: It is no picture, or too large.
    """
    data = image.data
    mime_type = image.mime_type if image.HasField("mime_type") else None
    try:
        return Picture(data, mime_type, check_header(data, config.images, mime_type), path)
    except ImageRefusedError as error:
        raise with_path(error, path) from error


def check_chat_pictures(chat: inference_pb2.Chat, config: ServerConfig) -> list[Picture]:
    """Checks the pictures of a chat, in order.

    Raises:
        ImageRefusedError: One is bad, or there are too many.
    """
    places = [
        (part.image, f"chat.messages[{number}].content[{index}].image")
        for number, message in enumerate(chat.messages)
        for index, part in enumerate(message.content)
        if part.HasField("image")
    ]
    if len(places) > config.max_images:
        raise ImageRefusedError(
            RefusalReason.TOO_LARGE,
            f"the chat has {len(places)} pictures, the limit is {config.max_images}",
            {"value": str(len(places)), "limit": str(config.max_images)},
        )
    return [check_picture(image, config, path) for image, path in places]


async def prepare_all(
    pictures: Sequence[Picture], pool: DecodePool, size: ImageSize
) -> list[PreparedImage]:
    """Returns what the model reads of several pictures; the first refusal ends the others."""
    tasks = [asyncio.ensure_future(picture.prepare(pool, size)) for picture in pictures]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def default_size(info: EngineInfo) -> ImageSize:
    """Returns what the model reads when the request does not say."""
    return ImageSize(info.min_image_pixels, info.max_image_pixels, info.image_factor)


def decoded_bytes(size: ImageSize, header: ImageHeader | None) -> int:
    """Returns what a picture takes at most once it is decoded; None for one of unknown size."""
    num_pixels = size.max_pixels
    if header is not None:
        # EXIF may turn it: width and height go in alike.
        height, width = smart_resize(header.height, header.width, size)
        num_pixels = height * width
    return COPIES * BYTES_PER_PIXEL * num_pixels


def check_room(
    pictures: Sequence[Picture], size: ImageSize, prompt_ids: Sequence[int], info: EngineInfo
) -> None:
    """Refuses pictures that the model cannot read, before they are decoded.

    Args:
        pictures: The pictures.
        size: What the model reads.
        prompt_ids: The prompt, one placeholder a picture.
        info: What is loaded.

    Raises:
        ImageRefusedError: One is so long that it has too many pixels even when it is reduced.
        PromptTooLongError: They leave no room in the context.
    """
    num_tokens = len(prompt_ids) - len(pictures)
    for picture in pictures:
        header = picture.header
        height, width = smart_resize(header.height, header.width, size)
        try:
            check_resized(height, width, info)
        except ImageRefusedError as error:
            raise with_path(error, picture.path) from error
        num_tokens += height * width // size.factor**2
    if num_tokens > info.context_len - 1:
        raise PromptTooLongError(num_tokens, info.context_len - 1)


def check_resized(height: int, width: int, info: EngineInfo) -> None:
    """Refuses a picture that has too many pixels for the model even when it is reduced.

    Raises:
        ImageRefusedError: It has; only one much longer than wide can.
    """
    if height * width > info.max_image_pixels:
        raise ImageRefusedError(
            RefusalReason.TOO_LARGE,
            f"the image is {height * width} pixels ({width} x {height}) when it is reduced so far "
            f"that its short side is {info.image_factor}; the limit is {info.max_image_pixels}",
            {"value": str(height * width), "limit": str(info.max_image_pixels)},
        )


def image_tokens(images: Sequence[PreparedImage], info: EngineInfo) -> list[int]:
    """Returns how many tokens of the prompt each decoded picture is.

    Raises:
        ImageRefusedError: One is too large for the model.
    """
    counts = []
    for image in images:
        height, width, _ = image.pixels.shape
        check_resized(height, width, info)
        counts.append(height * width // info.image_factor**2)
    return counts


def page_info(image: PreparedImage) -> documents_pb2.PageInfo:
    """Returns what became of a page's picture."""
    height, width, _ = image.pixels.shape
    return documents_pb2.PageInfo(
        source_width=image.source_width,
        source_height=image.source_height,
        model_width=width,
        model_height=height,
    )
