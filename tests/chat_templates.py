"""Chat templates written for the tests, with what published ones do to contents, and a tokenizer.

`THINKING` does what those of Qwen3 do: thoughts of earlier answers go, those of the last one
stay; `PARTS` those of Qwen3-VL: a content is text or a list; `TRIMMED` those of Llama;
`DEFAULT_SYSTEM` that of SmolLM2; `ROLE_TOKENS` those that put a role between "<|" and "|>".
"""

from __future__ import annotations

import json

from tokenizers import AddedToken

from tests.tiny_checkpoint import tiny_tokenizer

SPECIAL = ("<|header|>", "<|/header|>", "<|eot|>", "<|bos|>", "<|user|>", "<|assistant|>")
IN_ANSWERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
              "</tool_response>")

THINKING = """
{%- set found = namespace(done=false, question=0) -%}
{%- for turn in messages[::-1] -%}
    {%- set text = turn.content if turn.content is string else '' -%}
    {%- set is_result = text.startswith('<tool_response>') and text.endswith('</tool_response>') -%}
    {%- if not found.done and turn.role == 'user' and not is_result -%}
        {%- set found.done = true -%}
        {%- set found.question = messages | length - 1 - loop.index0 -%}
    {%- endif -%}
{%- endfor -%}
{%- for turn in messages -%}
    {%- set text = turn.content if turn.content is string else '' -%}
    {%- if turn.role == 'assistant' -%}
        {%- set thought = turn.reasoning_content if turn.reasoning_content is string else '' -%}
        {%- if not thought and '</think>' in text -%}
            {%- set thought = text.split('</think>')[0].rstrip('\\n').split('<think>')[-1] -%}
            {%- set text = text.split('</think>')[-1].lstrip('\\n') -%}
        {%- endif -%}
        {{- '<|im_start|>' + turn.role + '\\n' -}}
        {%- if loop.index0 > found.question and (loop.last or thought) -%}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' -}}
        {%- endif -%}
        {{- text.lstrip('\\n') -}}
        {%- for call in turn.tool_calls or [] -%}
            {{- '\\n<tool_call>\\n' -}}{{- call | tojson -}}{{- '\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- elif turn.role == 'tool' -%}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
            {{- '<|im_start|>user' -}}
        {%- endif -%}
        {{- '\\n<tool_response>\\n' + text + '\\n</tool_response>' -}}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}
            {{- '<|im_end|>\\n' -}}
        {%- endif -%}
    {%- else -%}
        {{- '<|im_start|>' + turn.role + '\\n' + text + '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if enable_thinking is defined and enable_thinking is false -%}
        {{- '<think>\\n\\n</think>\\n\\n' -}}
    {%- endif -%}
{%- endif -%}
"""

PARTS = """
{%- for turn in messages -%}
    {{- '<|im_start|>' ~ turn.role ~ '\\n' -}}
    {%- if turn.content is string -%}
        {{- turn.content -}}
    {%- else -%}
        {%- for part in turn.content -%}
            {%- if 'text' in part -%}{{- part.text -}}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

TRIMMED = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set instructions = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set instructions = '' %}
{%- endif %}
{{- '<|header|>system<|/header|>\\n\\nToday: ' }}
{{- strftime_now('%d') if strftime_now is defined and false else 'day 1' }}
{{- '\\n\\n' + instructions + '<|eot|>' }}
{%- for turn in messages %}
    {{- '<|header|>' + turn['role'] + '<|/header|>\\n\\n' + turn['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|header|>assistant<|/header|>\\n\\n' }}
{%- endif %}
"""

DEFAULT_SYSTEM = (
    "{% for turn in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + turn['role'] + '\n' + turn['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

ROLE_TOKENS = (
    "{% for turn in messages %}{{ '<|' + turn.role + '|>' + turn.content + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

ALL = {"thinking": THINKING, "parts": PARTS, "trimmed": TRIMMED,
       "default system": DEFAULT_SYSTEM, "role tokens": ROLE_TOKENS}


def chat_definition() -> dict:
    """The tokenizer.json of the tiny tokenizer with the control tokens of these templates."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in IN_ANSWERS])
    return json.loads(tokenizer.to_str())
