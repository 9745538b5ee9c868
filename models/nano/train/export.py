"""Makes a folder that transformers and `build_engine pack` load from a run's checkpoint.

python -m models.nano.train.export --run DIR --out DIR
"""

import argparse
import shutil
from pathlib import Path

from models.nano.config import write_config


def export(run: Path, out: Path) -> None:
    """Copies the weights without the training heads and writes the other files."""
    write_config(out)
    for old in out.glob("model*.safetensors*"):
        old.unlink()
    for file in sorted(run.glob("model*.safetensors*")):
        shutil.copyfile(file, out / file.name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Makes a checkpoint folder of a run.")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    export(arguments.run, arguments.out)
