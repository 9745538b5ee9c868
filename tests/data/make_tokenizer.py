"""Makes the tokenizer that the tiny checkpoints of this folder share.

    PYTHONPATH=tests python -m data.make_tokenizer [--out DIR]

Without --out, writes tokenizer.json, tokenizer_config.json and chat_template.jinja into both
checkpoint folders. The tokenizer is a byte-level BPE of 512 entries, built as the published ones
are (NFC, the split pattern with combining marks in the letter class, no prefix space, no bos):

    0..255    the byte symbols, in the order of the GPT-2 byte alphabet (id 0 is "!")
    256..499  244 merges learned from `CORPUS`; some of them hold a part of a UTF-8 character
    500..511  `SPECIAL_TOKENS`, at the ids that the tiny configs name

Needs tokenizers 0.22.2.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

FOLDERS = ("tiny_qwen3_5", "tiny_ratio3")
NUM_BASE_IDS = 500
MAX_LENGTH = 4096

# Token -> whether decoding may skip it; the think tags are text, as in the published tokenizers.
SPECIAL_TOKENS = {
    "<|image_pad|>": True,  # 500
    "<|video_pad|>": True,
    "<|vision_start|>": True,
    "<|vision_end|>": True,
    "<|endoftext|>": True,
    "<|pad|>": True,
    "<|im_start|>": True,
    "<|im_end|>": True,
    "<think>": False,
    "</think>": False,
    "<|reserved_0|>": True,
    "<|reserved_1|>": True,  # 511
}

SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Pages as a document parser writes them. CJK and emoji share lead bytes, so that merges end inside
# a character: a detokeniser must hold such bytes back until the rest has come.
CORPUS = """\
# Quarterly report of the harbour authority

The harbour handled 1,284 ships in the third quarter, which is more than in the second quarter. The
number of containers rose, and the number of delays fell. We don't expect that the trend continues:
the winter brings storms, and it's the season in which the cranes are maintained.

## 1. Traffic

| Month | Ships | Containers | Delay (h) |
| --- | ---: | ---: | ---: |
| July | 412 | 18,220 | 3.5 |
| August | 431 | 19,004 | 2.9 |
| September | 441 | 19,871 | 2.2 |

- The *first* berth was closed for the whole of July.
- The **second** berth was opened again in August.
- The third berth, and the fourth, were in use throughout.

```python
def total(rows):
    return sum(row.ships for row in rows)
```

## 2. Überblick

Der Hafen hat im dritten Quartal mehr Schiffe abgefertigt als im zweiten. Für den Winter müssen wir
größere Verspätungen erwarten; die Kräne können dann nicht überall benutzt werden. Straße, Höhe,
Größe, Übergröße, Öffnung, für, über, müssen, können, größer, außen, süß, heiß.

## 3. Résumé

L'année a été très bonne. La société a déjà traité 1 284 navires ; l'été a été calme, la météo a été
clémente. Où était le problème ? À côté de la grue, là où la marée était très basse. Garçon, façade,
élève, fête, forêt, île, août, œuvre. El niño comió una piña mañana; ¿dónde está el señor Muñoz?

## 4. 概要

港口在第三季度处理了更多的船舶。中国的港口和日本的港口都在增长。一个人、一条船、一个港口。
中文 中国 中心 中间 一个 一下 一些 不是 不同 不能 上海 上面 下面 下午 人们 人口 他们 今天 以下 会议
第一季度 第二季度 第三季度 第四季度 报告 表格 数字 数据 数量 时间 时候 日本 日期 明天 是的 有人 更多

## 5. まとめ

これは港の報告書です。この表は船の数です。これまでの数とこれからの数があります。
ひらがな カタカナ テキスト データ テーブル ページ レポート コンテナ クレーン

## 6. Mood

😀😁😂😃😄😅😆😇😈😉😊😋 😀😁😂 😃😄😅 😆😇😈 🙂🙃🙄 🚀🚢🚀🚢 👍👍👍🏽 ✅✅✅ ✓ → ⇒ ÷ ± € £
The crew was happy 😀, then tired 😅, then asleep 😴. 🚢 in, 🚢 out: 👍.

1. The total is $E = mc^2$ for each of the rows, with \\(x_i\\) and \\(y_i\\) as the coordinates.
2. See <https://example.org/harbour> for the tables, the figures and the whole of the report.
3. Temperature: 21.5 °C ± 0.5 °C; area: 12 m²; angle: 45°; price: 12 € / m³; share: ½ or ¼.
"""

CHAT_TEMPLATE = """\
{%- macro render(content, may_hold_images) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- else -%}
        {%- for item in content -%}
            {%- if item.type == 'image' -%}
                {%- if not may_hold_images -%}
                    {{- raise_exception('Only user messages may hold images.') -}}
                {%- endif -%}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- elif item.type == 'text' -%}
                {{- item.text -}}
            {%- else -%}
                {{- raise_exception('Unknown content type: ' ~ item.type) -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- if tools -%}
    {{- raise_exception('This template has no tools.') -}}
{%- endif -%}
{%- set last = namespace(user=-1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {%- set last.user = loop.index0 -%}
    {%- endif -%}
{%- endfor -%}
{%- if last.user < 0 -%}
    {{- raise_exception('There is no user message.') -}}
{%- endif -%}
{%- for message in messages -%}
    {%- set content = render(message.content, message.role == 'user') | trim -%}
    {%- if message.role == 'system' -%}
        {%- if not loop.first -%}
            {{- raise_exception('The system message must come first.') -}}
        {%- endif -%}
    {%- elif message.role == 'assistant' -%}
        {%- if '</think>' in content and loop.index0 < last.user -%}
            {%- set content = content.split('</think>')[-1] | trim -%}
        {%- endif -%}
    {%- elif message.role != 'user' -%}
        {{- raise_exception('Unknown role: ' ~ message.role) -}}
    {%- endif -%}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ content ~ '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n<think>\\n' -}}
    {%- if enable_thinking is defined and enable_thinking is false -%}
        {{- '\\n</think>\\n\\n' -}}
    {%- endif -%}
{%- endif -%}
"""


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(
        add_prefix_space=False, trim_offsets=False, use_regex=False
    )
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_BASE_IDS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    tokens = [
        AddedToken(token, special=special, normalized=False)
        for token, special in SPECIAL_TOKENS.items()
    ]
    tokenizer.add_tokens(tokens)
    return tokenizer


def tokenizer_config() -> dict[str, Any]:
    added = {
        str(NUM_BASE_IDS + i): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": special,
        }
        for i, (token, special) in enumerate(SPECIAL_TOKENS.items())
    }
    named = ("<|endoftext|>", "<|pad|>")
    others = [t for t, special in SPECIAL_TOKENS.items() if special and t not in named]
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": others,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|endoftext|>",
        "errors": "replace",
        "model_max_length": MAX_LENGTH,
        "pad_token": "<|pad|>",
        "split_special_tokens": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="one folder to write instead")
    args = parser.parse_args()
    here = Path(__file__).parent
    tokenizer = make_tokenizer()
    for folder in [args.out] if args.out else [here / name for name in FOLDERS]:
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(folder / "tokenizer.json"))
        config = json.dumps(tokenizer_config(), indent=2)
        (folder / "tokenizer_config.json").write_text(config + "\n")
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


if __name__ == "__main__":
    main()
