"""Forms of conversations that other programs write, and the command that makes messages of them."""

from collections.abc import Mapping
from typing import Any

QUESTIONS = 'prompt', 'question', 'query', 'instruction'
ANSWERS = 'completion', 'response', 'answer', 'output', 'chosen'
TURNS = '{role: ({"human": "user", "gpt": "assistant"}[.from] // .from), content: .value}'


def as_messages(document: Mapping[str, Any]) -> str:
    """Return how a line becomes messages, for example of a prompt and its completion, or ''."""
    turns = _turns(document)
    return f"for a chat, write messages: jq -c '{{messages: {turns}}}' OLD > NEW.jsonl" * bool(
        turns
    )


def _turns(document: Mapping[str, Any]) -> str:
    for key, value in document.items():
        first = value[0] if isinstance(value, list) and value else None
        if isinstance(first, dict) and {'role', 'content'} <= first.keys():
            answer = _of(document, ANSWERS)
            together = key in QUESTIONS and isinstance(document.get(answer), list)
            return f'(.{key} + .{answer})' if together else f'.{key}'
        if isinstance(first, dict) and {'from', 'value'} <= first.keys():
            return f'[.{key}[] | {TURNS}]'
    question, answer = _of(document, QUESTIONS), _of(document, ANSWERS)
    if not question or not answer:
        return ''
    asked = f'.{question}'
    if 'input' in document:
        asked = f'([{asked}, .input] | map(select(. != null and . != "")) | join("\\n\\n"))'
    return f'[{{role: "user", content: {asked}}}, {{role: "assistant", content: .{answer}}}]'


def _of(document: Mapping[str, Any], names: tuple[str, ...]) -> str:
    return next((name for name in names if name in document), '')
