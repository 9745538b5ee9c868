"""Runs clang-tidy over the project's .cpp files; a file that passed is not run again unchanged.

What "unchanged" means: the file, every header of the project that it includes, its compiler
command, .clang-tidy and the version of clang-tidy are as they were.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = (ROOT / "plugins", ROOT / "runtime")
PASSED = ROOT / "build" / "clang_tidy_passed.json"


@dataclass(frozen=True)
class Unit:
    """One translation unit: its source, and the digest of all that decides the verdict."""

    source: Path
    digest: str


def run(command: list[str]) -> str:
    """Returns the output of a program that must succeed."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def read_includes(build: Path) -> dict[str, list[Path]]:
    """Returns the project's files that each object was made from, as Ninja has recorded them."""
    includes: dict[str, list[Path]] = {}
    current: list[Path] = []
    for line in run([tool("ninja"), "-C", str(build), "-t", "deps"]).splitlines():
        if line.startswith("    "):
            path = Path(os.path.normpath(build / line.strip()))
            if any(path.is_relative_to(room) for room in ROOMS) and path.is_file():
                current.append(path)
        elif ": #deps" in line:
            target = str(build / line.split(": #deps")[0])
            current = includes.setdefault(target, [])
    return includes


def tool(name: str) -> str:
    """Returns the path of a program of this interpreter's environment."""
    return str(Path(sys.prefix) / "bin" / name)


def read_units(build: Path) -> list[Unit]:
    """Returns the translation units under plugins/ and runtime/, by name."""
    includes = read_includes(build)
    config = run([tool("clang-tidy"), "--version"])
    config += (ROOT / ".clang-tidy").read_text() + Path(__file__).read_text()
    units = []
    for entry in json.loads((build / "compile_commands.json").read_text()):
        source = Path(entry["file"])
        if not any(source.is_relative_to(room) for room in ROOMS):
            continue
        digest = hashlib.sha256((config + entry["command"]).encode())
        for path in sorted({source, *includes.get(entry["output"], [])}):
            digest.update(f"\0{path}\0".encode() + path.read_bytes())
        units.append(Unit(source, digest.hexdigest()))
    return sorted(units, key=lambda unit: unit.source)


def check(unit: Unit, build: Path, gcc_folder: Path) -> str:
    """Returns what clang-tidy has to say about a unit; nothing if it passes."""
    command = [
        tool("clang-tidy"),
        "--quiet",
        f"-p={build}",
        f"--header-filter=^{ROOT}/(plugins|runtime)/",
        # The standard library that the build uses, and no complaint about GCC's own options.
        f"--extra-arg=--gcc-install-dir={gcc_folder}",
        "--extra-arg=-Wno-unknown-warning-option",
        "--extra-arg=-Wno-ignored-optimization-argument",
        # The analyzer's shallow mode: its deep one takes three times as long for the same tree.
        *(f"--extra-arg={word}" for word in ("-Xclang", "-analyzer-config")),
        *(f"--extra-arg={word}" for word in ("-Xclang", "mode=shallow")),
        str(unit.source),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    return done.stdout or done.stderr or f"{unit.source}: clang-tidy ended with {done.returncode}"


def main() -> int:
    """Checks what has changed since it last passed; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", type=Path, help="the folder with compile_commands.json")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    build = args.build.resolve()
    gcc_folder = Path(run(["g++", "-print-libgcc-file-name"]).strip()).parent
    passed = json.loads(PASSED.read_text()) if PASSED.is_file() else {}
    units = read_units(build)
    changed = [unit for unit in units if passed.get(str(unit.source)) != unit.digest]
    with ThreadPoolExecutor(args.jobs) as pool:
        verdicts = list(pool.map(lambda unit: check(unit, build, gcc_folder), changed))
    failed = {unit.source for unit, verdict in zip(changed, verdicts, strict=True) if verdict}
    kept = {str(unit.source): unit.digest for unit in units if unit.source not in failed}
    PASSED.write_text(json.dumps(kept, indent=1) + "\n")
    for verdict in verdicts:
        sys.stdout.write(verdict)
    sys.stdout.write(f"{len(changed)} of {len(units)} files checked, {len(failed)} failed\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
