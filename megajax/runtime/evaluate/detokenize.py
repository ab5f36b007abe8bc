"""Convert WikiText's tokens back to text, by the rules of Megatron's evaluation.

lm-evaluation-harness has the same rules, in the same order. WikiText puts spaces around punctuation
and writes `@-@` for a hyphen inside a word; a language model's tokenizer knows neither.
"""

import re

_CLOSED_UP = {f' {mark} ': f'{mark} ' for mark in ':;.!?,'}
_INSIDE_WORDS = {f' @{mark}@ ': mark for mark in '-,.'}
_BRACKETED = [
    (rf'{opening}\s*([^{closing}]*?)\s*{closing}', rf'{plain_opening}\1{plain_closing}')
    for opening, closing, plain_opening, plain_closing in (
        (r'\(', r'\)', '(', ')'),
        (r'\[', r'\]', '[', ']'),
        ('{', '}', '{', '}'),
        ('"', '"', '"', '"'),
        ("'", "'", "'", "'"),
    )
]
_REST = {
    '= = = =': '====',
    '= = =': '===',
    '= =': '==',
    ' \N{DEGREE SIGN} ': '\N{DEGREE SIGN}',
    ' \n': '\n',
    '\n ': '\n',
    ' N ': ' 1 ',
    " 's": "'s",
}


def detokenize_wikitext(text: str) -> str:
    """Return the text without the spaces that WikiText inserted."""
    for tokens, plain in {"s '": "s'", **_INSIDE_WORDS, **_CLOSED_UP}.items():
        text = text.replace(tokens, plain)
    for pattern, plain in _BRACKETED:
        text = re.sub(pattern, plain, text)
    for tokens, plain in _REST.items():
        text = text.replace(tokens, plain)
    return text
