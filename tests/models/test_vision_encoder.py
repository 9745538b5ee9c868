"""The vision encoder, in NumPy and as a chain of ops, against what transformers recorded."""

import json
from pathlib import Path

import numpy as np
import pytest
from data.make_tiny_qwen3_5 import make_image
from reference.bfloat16 import to_bits
from reference.patchify import patchify
from reference.qwen3_5 import load_safetensors
from reference.vision_encoder import VisionEncoder
from vision_ops import VisionChain

DATA = Path(__file__).parents[1] / "data" / "tiny_qwen3_5"
CONFIG = json.loads((DATA / "config.json").read_text())["vision_config"]
WEIGHTS = load_safetensors(DATA / "model.safetensors")
RECORDED = load_safetensors(DATA / "expected_tensors.safetensors")
ATOL = 2e-4  # the recorded run is fp32 itself; outputs have an rms of about 1
LEVELS = np.tile(((np.arange(256) / 255 - 0.5) / 0.5).astype(np.float32), (3, 1))
PIXELS = make_image(160, 96, 0)


def test_reference_equals_transformers() -> None:
    patches = patchify(PIXELS, LEVELS, 16, 2, 2)
    np.testing.assert_array_equal(to_bits(patches), to_bits(RECORDED["image.pixel_values.bf16"]))
    last, merged = VisionEncoder(CONFIG, WEIGHTS).forward(patches, 6, 10)
    np.testing.assert_allclose(last, RECORDED["image.vision.last_hidden"], rtol=0, atol=ATOL)
    np.testing.assert_allclose(merged, RECORDED["image.vision.merged"], rtol=0, atol=ATOL)


@pytest.mark.parametrize("slice_rows", [None, 7, 48])
def test_ops_equal_transformers(slice_rows: int | None) -> None:
    last, merged = VisionChain(CONFIG, WEIGHTS, 2, slice_rows).forward(PIXELS, LEVELS)
    np.testing.assert_allclose(last, RECORDED["image.vision.last_hidden"], rtol=0, atol=ATOL)
    np.testing.assert_allclose(merged, RECORDED["image.vision.merged"], rtol=0, atol=ATOL)
    whole_last, whole_merged = VisionChain(CONFIG, WEIGHTS).forward(PIXELS, LEVELS)
    assert last.tobytes() == whole_last.tobytes()
    assert merged.tobytes() == whole_merged.tobytes()
