"""Suggest commands that convert lines of other programs to the form that megajax reads."""

from collections.abc import Mapping
from typing import Any

from megajax.runtime.data.sources.commands import images_to_files, jq
from megajax.runtime.data.sources.image_keys import contains_images, image_keys, listed

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
HISTORY = '((.history // [])[] | {role: "user", content: .[0]}, {role: "assistant", content: .[1]})'
# The keys of a chat, besides messages and images, that are lists of objects or their JSON.
OBJECTS = 'tools', 'documents'
DIALOGS = 'conversation', 'dialog'  # beginnings of the keys of a list of turns
ALTERNATE = '{role: ["user", "assistant"][.key % 2], content: .value}'


def as_messages(document: Mapping[str, Any], place: str) -> str:
    """Return a conversion to messages, for example from prompt and completion, or ''.

    It is for the file of the line or row at a place. It keeps system prompts, earlier turns, images
    and what a chat template can read.
    """
    turns = _turns(document)
    if not turns:
        return ''
    others = {key: value for key, value in document.items() if not _is_said(key, value)}
    if contains_images(others):
        return images_to_files(place)
    keys = [f'messages: {turns}', *(_kept(document, key) for key in OBJECTS if key in document)]
    if 'images' in document:
        keys.append('images')
    elif images := image_keys(others):
        keys.append(f'images: {listed(document, images)}')
    program = ', '.join(filter(None, keys))
    return f'for a chat, write messages: {jq(f"{{{program}}}", place)}'


def _is_said(key: str, value: object) -> bool:
    """Whether a value is words or documents of a chat, although it may look like an image."""
    words = {*QUESTIONS, *ANSWERS, *CONTEXTS, *SYSTEMS, *TEXTS}
    is_words = isinstance(value, str) and key in words
    return is_words or key in OBJECTS or key.startswith(DIALOGS)


def as_prompt(document: Mapping[str, Any], place: str) -> str:
    """Return a conversion of the question or text of a line or row to a prompt, or ''."""
    name = _text(document, (*QUESTIONS, *TEXTS))
    return f'write it there: {jq(f"{{prompt: .{name}}}", place)}' if name else ''


def _turns(document: Mapping[str, Any]) -> str:
    name = next((name for name in SYSTEMS if name in document), '')
    content = f'(.{name} | select(. != null and . != ""))'
    before = f'{{role: "system", content: {content}}}' if name else ''
    if turns := _listed_turns(document):
        rest = f'if $turns[0].role == "system" then $turns else [{before}] + $turns end'
        return f'({turns} as $turns | {rest})' if before else turns
    return _question_and_answer(document, before)


def _listed_turns(document: Mapping[str, Any]) -> str:
    for key, value in document.items():
        first = value[0] if isinstance(value, list) and value else None
        if isinstance(first, dict) and {'role', 'content'} <= first.keys():
            answer = next((name for name in ANSWERS if name in document), '')
            together = key in QUESTIONS and isinstance(document.get(answer), list)
            return f'(.{key} + .{answer})' if together else f'.{key}'
        if isinstance(first, dict) and {'from', 'value'} <= first.keys():
            return f'[.{key}[] | {TURNS}]'
        is_said = isinstance(first, str) and key.startswith(DIALOGS)
        if is_said and all(isinstance(said, str) for said in value):
            return f'[.{key} | to_entries[] | {ALTERNATE}]'
    return ''


def _question_and_answer(document: Mapping[str, Any], before: str) -> str:
    question, answer = _text(document, QUESTIONS), _text(document, ANSWERS)
    if not question or not answer:
        return ''
    asked = [question, *(name for name in CONTEXTS if name in document and name != question)]
    text = f'.{question}'
    if asked[1:]:
        parts = ', '.join(f'.{name}' for name in asked)
        text = f'([{parts}] | map(select(. != null and . != "")) | join("\\n\\n"))'
    pair = f'{{role: "user", content: {text}}}, {{role: "assistant", content: .{answer}}}'
    turns = [before, HISTORY if _has_history(document) else '', pair]
    return f'[{", ".join(filter(None, turns))}]'


def _has_history(document: Mapping[str, Any]) -> bool:
    """Whether a document has a list of earlier questions, each with its answer, or null."""
    pairs = document.get('history') or []
    return (
        'history' in document
        and isinstance(pairs, list)
        and all(isinstance(pair, list) and list(map(type, pair)) == [str, str] for pair in pairs)
    )


def _kept(document: Mapping[str, Any], key: str) -> str:
    """Return the jq program that keeps a key; '' if its value is neither objects nor their JSON."""
    value = document[key]
    if isinstance(value, str):
        return f'{key}: (if .{key} == "" then null else .{key} end)'
    is_objects = value is None or (
        isinstance(value, list) and all(isinstance(each, Mapping) for each in value)
    )
    return key if is_objects else ''


def _text(document: Mapping[str, Any], names: tuple[str, ...]) -> str:
    return next((name for name in names if isinstance(document.get(name), str)), '')
