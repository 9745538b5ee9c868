"""Gets fonts and texts from Debian packages into a folder that git ignores.

    python -m models.nano.data.fetch [--cache DIR]

Runs `apt-get download` and `dpkg -x` for each package of `sources.toml`, checks the digest, and
writes `fonts/` (the named faces), `text.jsonl` (paragraphs, with what is held out) and `words.txt`.
A machine without a network gets the folder copied.
"""

import argparse
import hashlib
import html.parser
import json
import re
import shutil
import subprocess
import tempfile
import tomllib
import unicodedata
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).with_name("sources.toml")
CACHE = Path(__file__).with_name("cache")
LANGUAGES = ("en-US", "fr-FR", "de-DE", "es-ES", "it-IT", "pt-BR", "nb-NO", "nl-NL")
"""Translations of the handbook that Latin-1 can spell."""
HELD_OUT_EVERY = 24
"""Of this many paragraphs in a row, the last is held out."""


class _Paragraphs(html.parser.HTMLParser):
    """Collects the text of paragraphs and list items."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._parts: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("p", "li", "h2", "h3") or (tag == "div" and ("class", "para") in attrs):
            self._flush()
            self._parts = []

    def handle_endtag(self, tag: str) -> None:
        if tag in ("p", "li", "h2", "h3", "div"):
            self._flush()

    def handle_data(self, data: str) -> None:
        if self._parts is not None:
            self._parts.append(data)

    def _flush(self) -> None:
        if self._parts:
            self.texts.append(" ".join("".join(self._parts).split()))
        self._parts = None


def read_sources() -> dict[str, Any]:
    """Returns the content of `sources.toml`."""
    return tomllib.loads(SOURCES.read_text())


def clean(text: str) -> str:
    """Composes accents and turns rare spaces and signs into those the tokenizer knows."""
    text = unicodedata.normalize("NFC", text)
    return re.sub(r"[\s\u00ad\u200b]+", " ", text.replace("\u2212", "-")).strip()


def _unpack(source: dict[str, Any], folder: Path) -> Path:
    command = ["apt-get", "download", "-qq", f"{source['package']}={source['version']}"]
    subprocess.run(command, cwd=folder, check=True, stderr=subprocess.DEVNULL)  # noqa: S603
    (deb,) = folder.glob(f"{source['package']}_*.deb")
    digest = hashlib.sha256(deb.read_bytes()).hexdigest()
    if digest != source["sha256"]:
        raise SystemExit(f"{deb.name}: expected sha256 {source['sha256']}, found {digest}")
    target = folder / source["package"]
    subprocess.run(["dpkg", "-x", deb, target], check=True)  # noqa: S603, S607 from the PATH
    return target


def _paragraphs(root: Path) -> list[str]:
    texts: dict[str, None] = {}
    for file in sorted(root.rglob("*.html")):
        language = file.relative_to(root).parts[0]
        if root.name == "html" and language not in LANGUAGES:
            continue
        if root.name != "html" and not re.search(r"(\.en|^[a-z0-9-]+)\.html$", file.name):
            continue
        parser = _Paragraphs()
        parser.feed(file.read_text(errors="replace"))
        texts |= dict.fromkeys(clean(text) for text in parser.texts)
    return [text for text in texts if len(text) >= 20]


def fetch(cache: Path) -> None:
    """Fills the folder."""
    fonts = cache / "fonts"
    fonts.mkdir(parents=True, exist_ok=True)
    sources = read_sources()
    words: dict[str, None] = {}
    with tempfile.TemporaryDirectory() as name, (cache / "text.jsonl").open("w") as out:
        for source in sources["fonts"]:
            root = _unpack(source, Path(name))
            for face in [f for family in source["families"] for f in family["faces"] if f]:
                shutil.copyfile(next(p for p in root.rglob(face)), fonts / face)
        for source in sources["texts"]:
            root = _unpack(source, Path(name)) / source["path"].lstrip("/")
            if source["kind"] == "words":
                lines = root.read_text(errors="replace").split("\n")
                words |= dict.fromkeys(clean(line.partition("/")[0]) for line in lines[::4] if line)
                continue
            for index, text in enumerate(_paragraphs(root)):
                held_out = index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
                json.dump([int(held_out), text], out, ensure_ascii=False)
                out.write("\n")
    (cache / "words.txt").write_text("\n".join(words) + "\n")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description="Gets fonts and texts from Debian packages.")
    arguments.add_argument("--cache", type=Path, default=CACHE)
    fetch(arguments.parse_args().cache)
