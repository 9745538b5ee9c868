"""`preprocessor_config.json` of a checkpoint -> `preprocessor.json`; the table of pixel values."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from build_engine.errors import CheckpointError
from build_engine.model_config import Vision
from runtime.errors import refusal
from runtime.preprocessor import Preprocessor

PREPROCESSOR_CONFIG = "preprocessor_config.json"

_LEVELS = 256  # values of a byte
_BICUBIC = 3  # PIL's number of the filter
_REQUIRED = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
_ALWAYS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")


def read_preprocessor(path: Path, raw: dict[str, Any], vision: Vision) -> Preprocessor:
    """Checks the configuration of an image processor of the Qwen2-VL kind.

    Args:
        path: Where it was read, for messages.
        raw: The JSON object.
        vision: The encoder that takes the pictures.

    Returns:
        What the engine keeps of it.

    Raises:
        CheckpointError: Incomplete, for another encoder, or with steps that would be left out.
    """

    def refuse(found: str, needed: str) -> CheckpointError:
        fix = "download the checkpoint again, preprocessor_config.json included"
        return CheckpointError(refusal(path, found, needed, fix))

    absent = [key for key in _REQUIRED if key not in raw]
    size = raw.get("size")
    areas = size if isinstance(size, dict) else {}
    least: Any = raw.get("min_pixels", areas.get("shortest_edge"))
    most: Any = raw.get("max_pixels", areas.get("longest_edge"))
    if least is None or most is None:
        absent.append("size")
    if absent:
        raise refuse(f"no {', '.join(absent)}", "an image processor configuration")
    for key in _ALWAYS:
        if raw.get(key, True) is not True:
            raise refuse(f"{key} = {raw[key]}", "true")
    if raw.get("resample", _BICUBIC) != _BICUBIC:
        raise refuse(f"resample = {raw['resample']}", f"{_BICUBIC}, bicubic")
    try:
        result = Preprocessor(
            patch_size=raw["patch_size"],
            merge_size=raw["merge_size"],
            temporal_patch_size=raw["temporal_patch_size"],
            min_pixels=least,
            max_pixels=most,
            image_mean=raw["image_mean"],
            image_std=raw["image_std"],
            rescale_factor=raw.get("rescale_factor", 1 / 255),
        )
    except ValidationError as error:
        detail = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in detail["loc"]) or "sizes"
        raise refuse(f"{where}: {detail['msg']}", "an image processor configuration") from error
    for key, expected in (
        ("patch_size", vision.patch_size),
        ("temporal_patch_size", vision.temporal_patch_size),
        ("merge_size", vision.spatial_merge_size),
    ):
        if raw[key] != expected:
            raise refuse(f"{key} = {raw[key]}", f"{expected}, as config.json says")
    if not np.isfinite(pixel_levels(result)).all():
        raise refuse("image_mean and image_std that make no finite pixels", "finite pixels")
    return result


def pixel_levels(preprocessor: Preprocessor) -> npt.NDArray[np.float32]:
    """What each byte of each channel becomes, to the bit as the reference processor computes it.

    That is `rescale` and `normalize` of transformers 5.14.1: the product in double precision,
    rounded to float32, then a subtraction and a division in float32.

    Returns:
        [3, 256].
    """
    rescaled = np.arange(_LEVELS, dtype=np.float64) * preprocessor.rescale_factor
    mean = np.array(preprocessor.image_mean, np.float32)[:, None]
    std = np.array(preprocessor.image_std, np.float32)[:, None]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        levels = (rescaled.astype(np.float32) - mean) / std
    return levels.astype(np.float32)
