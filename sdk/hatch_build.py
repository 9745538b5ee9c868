"""Build hook: generates the stubs of the wire contract, `deltaflash.v1`, from its .proto files.

`python sdk/hatch_build.py` does the same in a checkout, after an edit of a .proto file.
"""

import os
import shutil
import sysconfig
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

from grpc_tools import protoc  # type: ignore[import-untyped]
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent


def find_protos() -> Path:
    """Returns the folder that holds `deltaflash/v1/*.proto`: an sdist's own, or the checkout's."""
    for folder in (ROOT / "proto", ROOT.parent / "proto"):
        if (folder / "deltaflash" / "v1").is_dir():
            return folder
    message = f"no deltaflash/v1/*.proto in {ROOT / 'proto'} or {ROOT.parent / 'proto'}"
    raise FileNotFoundError(message)


def find_plugin(name: str) -> str:
    """Returns the path of a protoc plugin: of the build's own environment, else the interpreter's.

    Args:
        name: The program's name without extension.

    Raises:
        FileNotFoundError: The plugin is not installed.
    """
    found = shutil.which(name) or shutil.which(name, path=sysconfig.get_path("scripts"))
    if found is None:
        raise FileNotFoundError(f"{name} is not installed; pip install mypy-protobuf")
    return found


def run_protoc(arguments: list[str]) -> None:
    """Runs the protoc of grpcio-tools.

    Raises:
        RuntimeError: protoc refused; it has printed why.
    """
    status = protoc.main(["protoc", *arguments])
    if status != 0:
        raise RuntimeError(f"protoc ended with {status}: {' '.join(arguments)}")


def generate_stubs(proto_root: Path, target: Path) -> None:
    """Replaces `target` with the stubs of every `deltaflash/v1/*.proto` under `proto_root`.

    No `__init__.py` is written: `deltaflash` and `deltaflash.v1` are namespace packages.

    Args:
        proto_root: Folder from which .proto files are imported.
        target: The folder `deltaflash`; its parent is the import root.
    """
    protos = sorted(str(path) for path in (proto_root / "deltaflash" / "v1").glob("*.proto"))
    services = [p for p in protos if "\nservice " in Path(p).read_text(encoding="utf-8")]
    includes = [f"-I{proto_root}", f"-I{resources.files('grpc_tools') / '_proto'}"]
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".stubs-") as staging:
        messages = [f"--python_out={staging}", f"--mypy_out=quiet:{staging}"]
        plugin = f"--plugin=protoc-gen-mypy={find_plugin('protoc-gen-mypy')}"
        run_protoc([*includes, plugin, *messages, *protos])
        calls = [f"--grpc_python_out={staging}", f"--mypy_grpc_out=quiet:{staging}"]
        plugin = f"--plugin=protoc-gen-mypy_grpc={find_plugin('protoc-gen-mypy_grpc')}"
        run_protoc([*includes, plugin, *calls, *services])
        made = Path(staging) / "deltaflash"
        (made / "v1" / "py.typed").touch()
        shutil.rmtree(target, ignore_errors=True)
        os.replace(made, target)  # noqa: PTH105


class StubsHook(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the .proto files into an sdist and the generated stubs into a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Runs before a build; for an editable install the stubs stay in the checkout."""
        del version
        protos = find_protos()
        if self.target_name == "sdist":
            folder = protos / "deltaflash"
            build_data["force_include"][str(folder)] = "proto/deltaflash"
        else:
            generate_stubs(protos, ROOT / "deltaflash")


if __name__ == "__main__":
    generate_stubs(find_protos(), ROOT / "deltaflash")
