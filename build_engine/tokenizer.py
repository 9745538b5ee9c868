"""The text files of an engine: tokenizer, vocabulary, chat template, preprocessor, generation.

Which ids end a generation (`end_ids`): the union, in this order and without repetition, of
  1. `eos_token_id` of `generation_config.json` (an id or a list),
  2. the id of the tokenizer's `eos_token`, which for chat models is `<|im_end|>`,
  3. `eos_token_id` of `config.json`, text part first.
For the published Qwen3.5 models that is [248046, 248044]: `<|im_end|>`, then `<|endoftext|>`.

`page_instruction` of `generation_config.json`, a key of ours, is what the model is told to do with
a page; "" for one that was trained on pictures alone.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from build_engine.errors import CheckpointError
from build_engine.model_config import ModelConfig, check_readable, read_json
from build_engine.preprocessor import PREPROCESSOR_CONFIG, read_preprocessor
from runtime.engine_directory import MAX_END_IDS
from runtime.errors import refusal
from runtime.preprocessor import Preprocessor
from runtime.vocabulary import VocabularyTable, vocabulary_from_tokenizer

_DOWNLOAD = "download the checkpoint again, tokenizer files included"


@dataclass(frozen=True)
class TextFiles:
    """Contents of the text files.

    Attributes:
        tokenizer: `tokenizer.json`, byte for byte that of the checkpoint.
        vocabulary: What goes into `vocab.bin`.
        chat_template: The Jinja template, None where the checkpoint has none.
        preprocessor: `preprocessor.json`, None for a model without vision.
        generation: `generation.json`.
        sources: Names of the checkpoint files that were read.
    """

    tokenizer: bytes
    vocabulary: VocabularyTable
    chat_template: str | None
    preprocessor: Preprocessor | None
    generation: dict[str, Any]
    sources: tuple[str, ...]


def read_text_files(path: Path, config: ModelConfig) -> TextFiles:
    """Reads and checks the text files of a checkpoint.

    Args:
        path: The checkpoint directory.
        config: Its model.

    Returns:
        What goes into the engine.

    Raises:
        CheckpointError: A needed file is missing or does not fit the model.
    """
    reader = _Reader(path)
    tokenizer_json = reader.required("tokenizer.json")
    tokenizer_bytes = (path / "tokenizer.json").read_bytes()
    vocabulary = _vocabulary(path, tokenizer_json, tokenizer_bytes, config.vocab_size)
    tokenizer_config = reader.optional("tokenizer_config.json")
    generation_config = reader.optional("generation_config.json")
    preprocessor = None
    if config.vision is not None:
        raw = reader.required(PREPROCESSOR_CONFIG)
        preprocessor = read_preprocessor(path / PREPROCESSOR_CONFIG, raw, config.vision)
    chat_template = _chat_template(reader, tokenizer_config)
    generation = _generation(path, config, tokenizer_json, tokenizer_config, generation_config)
    return TextFiles(
        tokenizer=tokenizer_bytes,
        vocabulary=vocabulary,
        chat_template=chat_template,
        preprocessor=preprocessor,
        generation=generation,
        sources=tuple(sorted(reader.read)),
    )


class _Reader:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.read: set[str] = set()

    def required(self, name: str) -> dict[str, Any]:
        self.read.add(name)
        return read_json(self.path / name, _DOWNLOAD)

    def optional(self, name: str) -> dict[str, Any]:
        return self.required(name) if (self.path / name).exists() else {}

    def text(self, name: str) -> str | None:
        file = self.path / name
        if not file.exists():
            return None
        self.read.add(name)
        try:
            check_readable(file)
            return file.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(
                refusal(file, "text that is not UTF-8", "UTF-8", _DOWNLOAD)
            ) from error
        except OSError as error:
            found = str(error.strerror or error)
            raise CheckpointError(refusal(file, found, "a readable file", _DOWNLOAD)) from error


def _vocabulary(
    path: Path, tokenizer_json: Mapping[str, Any], tokenizer_bytes: bytes, vocab_size: int
) -> VocabularyTable:
    try:
        Tokenizer.from_buffer(tokenizer_bytes)
        return vocabulary_from_tokenizer(tokenizer_json, vocab_size)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise CheckpointError(
            refusal(
                path / "tokenizer.json",
                f"a tokenizer that does not load ({error})",
                f"byte-level BPE of at most {vocab_size} ids",
                _DOWNLOAD,
            )
        ) from error


def _chat_template(reader: _Reader, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The template: `chat_template.jinja`, else `chat_template.json`, else `tokenizer_config.json`.

    Where several named templates are listed, the one named `default`.
    """
    text = reader.text("chat_template.jinja")
    if text is not None:
        return text
    value = reader.optional("chat_template.json").get(
        "chat_template", tokenizer_config.get("chat_template")
    )
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise CheckpointError(
            refusal(reader.path, "a chat_template that is no text", "Jinja text", _DOWNLOAD)
        )
    return value


def _generation(
    path: Path,
    config: ModelConfig,
    tokenizer_json: Mapping[str, Any],
    tokenizer_config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
) -> dict[str, Any]:
    listed = generation_config.get("eos_token_id")
    ids = list(listed) if isinstance(listed, list) else [] if listed is None else [listed]
    token = tokenizer_config.get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if token is not None:
        ids.append(_token_id(path, tokenizer_json, token))
    ids += config.eos_ids
    unfit = [one for one in ids if type(one) is not int or not 0 <= one < config.vocab_size]
    if unfit:
        raise CheckpointError(
            refusal(
                path,
                f"the end id {json.dumps(unfit[0])}",
                f"ids in 0 to {config.vocab_size - 1}",
                "correct eos_token_id in generation_config.json or config.json",
            )
        )
    end_ids = list(dict.fromkeys(ids))
    if not 1 <= len(end_ids) <= MAX_END_IDS:
        raise CheckpointError(
            refusal(
                path,
                f"{len(end_ids)} end ids",
                f"1 to {MAX_END_IDS} of them",
                "set eos_token_id in generation_config.json",
            )
        )
    pad_id = generation_config.get("pad_token_id")
    return {
        "end_ids": end_ids,
        "pad_id": pad_id if type(pad_id) is int and 0 <= pad_id < config.vocab_size else None,
        "sampling": _sampling(path, generation_config),
        "page_instruction": _page_instruction(path, generation_config),
    }


def _page_instruction(path: Path, generation_config: Mapping[str, Any]) -> str | None:
    value = generation_config.get("page_instruction")
    if value is None or isinstance(value, str):
        return value
    raise CheckpointError(
        refusal(
            path / "generation_config.json",
            f"page_instruction = {json.dumps(value)}",
            "a string",
            "correct page_instruction",
        )
    )


def _token_id(path: Path, tokenizer_json: Mapping[str, Any], token: object) -> int:
    vocabulary: Mapping[str, int] = tokenizer_json["model"]["vocab"]
    for added in tokenizer_json.get("added_tokens") or ():
        if added["content"] == token:
            return int(added["id"])
    if not isinstance(token, str) or token not in vocabulary:
        raise CheckpointError(
            refusal(
                path / "tokenizer_config.json",
                f"the eos_token {json.dumps(token)}",
                "a token of tokenizer.json",
                _DOWNLOAD,
            )
        )
    return int(vocabulary[token])


def _sampling(path: Path, generation_config: Mapping[str, Any]) -> dict[str, Any]:
    def number(key: str, neutral: float, low: float, high: float) -> float:
        value = generation_config.get(key)
        if value is None:
            return neutral
        if type(value) not in (int, float) or not low <= value <= high:
            raise CheckpointError(
                refusal(
                    path / "generation_config.json",
                    f"{key} = {json.dumps(value)}",
                    f"a number from {low:g} to {high:g}",
                    f"correct {key}",
                )
            )
        return float(value)

    samples = generation_config.get("do_sample") is True
    return {
        "temperature": number("temperature", 1.0, 0.0, 100.0) if samples else 0.0,
        "top_k": int(number("top_k", 0, 0, 1 << 31)) if samples else 0,
        "top_p": max(number("top_p", 1.0, 0.0, 1.0), 1e-6) if samples else 1.0,
        "min_p": number("min_p", 0.0, 0.0, 1.0) if samples else 0.0,
    }
