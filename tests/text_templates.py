"""Chat templates in the idioms of the model families, with their control words."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from text_vocab import CONTROL, byte_level

from tinyvllm_cli.text.chat_template import ChatTemplate
from tinyvllm_cli.text.codec import TextCodec
from tinyvllm_cli.text.gguf_tokenizer import build_tokenizer


@dataclass(frozen=True)
class Family:
    source: str
    words: tuple[str, ...]  # control words

    @functools.cache  # noqa: B019 - the families are few and stay
    def codec(self) -> TextCodec:
        """A byte-level codec with the template and these control words, the first BOS and the last EOS."""
        metadata = byte_level(words=self.words, types=[CONTROL] * len(self.words))
        template = ChatTemplate(self.source, variables={"bos_token": self.words[0], "eos_token": self.words[-1]})
        return TextCodec(build_tokenizer(metadata, "file"), template)


_QWEN3 = """\
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.last and reasoning_content %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning_content + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
    {%- elif content.startswith('<tool_response>') and content.endswith('</tool_response>') %}
        {{- '<|im_start|>tool\\n' + content }}
    {%- else %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

_SMOLLM3 = """\
{%- set mode = namespace(thinks=true) -%}
{%- set first = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if '/no_think' in first %}{%- set mode.thinks = false %}{%- endif -%}
<|im_start|>system
{{ first.replace('/no_think', '').replace('/think', '').rstrip() }}<|im_end|>
{% macro turn(role, text) %}{{ '<|im_start|>' + role }}
{{ text }}{{ '<|im_end|>' }}
{% endmacro %}
{%- for m in messages %}{% if m.role != 'system' %}{{ turn(m.role, m.content.lstrip()) }}{% endif %}{% endfor -%}
<|im_start|>assistant
{% if not mode.thinks %}<think>

</think>
{% endif %}"""

_LLAMA3 = """\
{{- bos_token }}
{%- for m in messages %}
    {%- set header = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' %}
    {{- header + m['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

_MISTRAL = """\
{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}
{%- else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"""

_GEMMA = """\
{{ bos_token }}{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role -%}
{{ '<start_of_turn>' + role + '\\n' + m['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

_ZEPHYR = """\
{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + eos_token + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""

_CHATML = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

FAMILIES = {
    "llama-3": Family(_LLAMA3, ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "chatml": Family(_CHATML, ("<|endoftext|>", "<|im_start|>", "<|im_end|>")),
    "qwen3": Family(_QWEN3, ("<|endoftext|>", "<|im_start|>", "<|im_end|>")),
    "smollm3": Family(_SMOLLM3, ("<|endoftext|>", "<|im_start|>", "<|im_end|>")),
    "mistral": Family(_MISTRAL, ("<s>", "[INST]", "[/INST]", "</s>")),
    "gemma": Family(_GEMMA, ("<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>")),
    "zephyr": Family(_ZEPHYR, ("<s>", "<|system|>", "<|user|>", "<|assistant|>", "</s>")),
}
