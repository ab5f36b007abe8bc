"""The words of a shell script that starts Megatron-LM, without running anything of it.

Assignments and arrays that are written in the script are put in where they are used, as in
`ARGS=( --num-layers 24 )` and `pretrain_gpt.py ${ARGS[@]}`. Imports no jax.
"""

import re
import shlex

from megajax.config import ConfigError

MAX_CHARACTERS = 2**20  # of all words, when the variables are put in
VARIABLE = re.compile(r'\$(?:\{(\w+)(?:\[[@*]\])?\}|(\w+))')


def split_script(text: str, source: str) -> list[str]:
    """Return the words of a script, which is `source` in messages, without its arrays."""
    try:
        words = shlex.split(text.replace('\\\n', ' '), comments=True)
    except ValueError as error:
        raise ConfigError(f'{source}: is not the text of a command: {error}') from error
    variables: dict[str, list[str]] = {}
    left: list[str] = []
    array: str | None = None
    for word in words:
        if match := re.fullmatch(r'(\w+)=\((.*)', word, re.DOTALL):
            array, word = match.groups()
            variables[array] = []
        if array is not None:
            if element := word.removesuffix(')'):
                variables[array] += _expand(element, variables, source)
            array = array if element == word else None
        elif match := re.fullmatch(r'(\w+)=(.*?);?', word, re.DOTALL):
            value = ' '.join(_expand(match[2], variables, source))
            variables[match[1]] = [value]
            left.append(f'{match[1]}={value}')
        else:
            left += _expand(word, variables, source)
    return left


def _expand(word: str, variables: dict[str, list[str]], source: str) -> list[str]:
    """Return a word with the values of its variables; one that is a variable may be several."""
    if match := VARIABLE.fullmatch(word):
        name = match[1] or match[2]
        words = [part for value in variables.get(name, [word]) for part in value.split()]
    else:
        words = [
            VARIABLE.sub(
                lambda match: ' '.join(variables.get(match[1] or match[2], [match[0]])), word
            )
        ]
    if sum(map(len, words)) > MAX_CHARACTERS:
        raise ConfigError(f'{source}: its variables make more than {MAX_CHARACTERS:,} characters')
    return words
