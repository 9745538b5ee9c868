"""Records what the reference image processor makes of random pictures.

    PYTHONPATH=tests python -m data.record_preprocessing

Writes `preprocessing/digests.json`: for each picture, sha256 over its pixel_values (float32) and
its grid (int64) as little-endian bytes.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from picture_files import NUM_RECORDED, random_file, recorded_case


def reference_digest(index: int) -> str:
    """Returns the digest for the upright picture of that number."""
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(
        patch_size=16, merge_size=2, temporal_patch_size=2, **recorded_case(index)
    )
    made = processor(images=Image.fromarray(random_file(index).upright), return_tensors="np")
    digest = hashlib.sha256(made["pixel_values"].astype("<f4", casting="no").tobytes())
    digest.update(made["image_grid_thw"].astype("<i8", casting="no").tobytes())
    return digest.hexdigest()


def main() -> None:
    """Writes the file."""
    import PIL
    import transformers

    recorded = {
        "transformers": transformers.__version__,
        "pillow": PIL.__version__,
        "digests": [reference_digest(index) for index in range(NUM_RECORDED)],
    }
    path = Path(__file__).parent / "preprocessing" / "digests.json"
    path.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
