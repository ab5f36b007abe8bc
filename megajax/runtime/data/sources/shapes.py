"""Suggest commands that convert lines of other programs to the form that megajax reads."""

from collections.abc import Mapping
from typing import Any

from megajax.runtime.data.sources.commands import jq

QUESTIONS = 'prompt', 'question', 'query', 'instruction', 'problem', 'inputs', 'input'
ANSWERS = (
    *('completion', 'response', 'answer', 'output', 'chosen'),
    *('solution', 'targets', 'target'),
)
CONTEXTS = 'input', 'context'  # names of keys with the context of a question
SYSTEMS = 'system', 'system_prompt'
TEXTS = 'text', 'content', 'body', 'article', 'document'
SPEAKERS = '{"human": "user", "gpt": "assistant"}[.from] // .from'
TURNS = f'{{role: ({SPEAKERS}), content: .value}}'
ALTERNATE = '{role: ["user", "assistant"][.key % 2], content: .value}'


def as_messages(document: Mapping[str, Any], place: str) -> str:
    """Return a conversion to messages, for example from prompt and completion, or ''.

    It is for the file of the line or row at a place.
    """
    turns = _turns(document)
    return f'for a chat, write messages: {jq(f"{{messages: {turns}}}", place)}' if turns else ''


def as_prompt(document: Mapping[str, Any], place: str) -> str:
    """Return a conversion of the question or text of a line or row to a prompt, or ''."""
    name = _text(document, (*QUESTIONS, *TEXTS))
    return f'write it there: {jq(f"{{prompt: .{name}}}", place)}' if name else ''


def _turns(document: Mapping[str, Any]) -> str:
    for key, value in document.items():
        first = value[0] if isinstance(value, list) and value else None
        if isinstance(first, dict) and {'role', 'content'} <= first.keys():
            answer = next((name for name in ANSWERS if name in document), '')
            together = key in QUESTIONS and isinstance(document.get(answer), list)
            return f'(.{key} + .{answer})' if together else f'.{key}'
        if isinstance(first, dict) and {'from', 'value'} <= first.keys():
            return f'[.{key}[] | {TURNS}]'
        is_said = isinstance(first, str) and key.startswith(('conversation', 'dialog'))
        if is_said and all(isinstance(said, str) for said in value):
            return f'[.{key} | to_entries[] | {ALTERNATE}]'
    question, answer = _text(document, QUESTIONS), _text(document, ANSWERS)
    if not question or not answer:
        return ''
    asked = [question, *(name for name in CONTEXTS if name in document and name != question)]
    text = f'.{question}'
    if asked[1:]:
        parts = ', '.join(f'.{name}' for name in asked)
        text = f'([{parts}] | map(select(. != null and . != "")) | join("\\n\\n"))'
    system = next((name for name in SYSTEMS if name in document), '')
    before = f'{{role: "system", content: (.{system} | select(. != null and . != ""))}}, '
    return (
        f'[{before if system else ""}{{role: "user", content: {text}}}, '
        f'{{role: "assistant", content: .{answer}}}]'
    )


def _text(document: Mapping[str, Any], names: tuple[str, ...]) -> str:
    return next((name for name in names if isinstance(document.get(name), str)), '')
