"""A tokenizer of one token a byte, with the control tokens of a chat, and a chat template."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL_TOKENS = {
    "<|im_start|>": True,  # 256
    "<|im_end|>": True,
    "<|endoftext|>": True,
    "<|vision_start|>": True,
    "<|image_pad|>": True,  # 260
    "<think>": False,
    "</think>": False,
    "<|vision_end|>": True,
}

TEMPLATE = """\
{%- macro text(content) %}
{%- if content is string %}{{ content }}{% else %}
{%- for part in content %}
{%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}{{ part.text }}{% endif %}
{%- endfor %}
{%- endif %}
{%- endmacro %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- set content = text(message.content) | trim %}
{%- if message.role == 'assistant' and '</think>' in content %}
{%- set content = content.split('</think>')[-1] | trim %}
{%- endif %}
{%- if content == 'refuse' %}{{ raise_exception('refused by the template') }}{% endif %}
{{- content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n<think>\\n' }}
{%- if not enable_thinking %}{{ '\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""


def tokenizer_json() -> str:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for content, special in CONTROL_TOKENS.items():
        token = AddedToken(content, special=special, normalized=False)
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([token])
    return tokenizer.to_str()


def id_of(token: str) -> int:
    return 256 + list(CONTROL_TOKENS).index(token)
