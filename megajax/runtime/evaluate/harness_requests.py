"""Translate the `generation_kwargs` of lm-evaluation-harness tasks into a generator's requests."""

from collections.abc import Iterable, Mapping
from typing import Any

from lm_eval.models.utils import normalize_gen_kwargs

from megajax.core.config import ConfigError
from megajax.runtime.generate import Request, Sampling

TOP_K = 50  # default of transformers' `generate`; the task or generation_config.json may set it
READ = {'until', 'max_gen_toks', 'do_sample', 'temperature', 'top_k', 'top_p'}
NO_EFFECT = {'num_beams': 1, 'repetition_penalty': 1}
OWN_TASK = 'in a copy of the task, and evaluate it as FOLDER/NAME'


def requests_of(asked: Iterable[tuple[str, Mapping[str, Any]]], limit: int) -> list[Request]:
    """Return the request of each task's `generation_kwargs`.

    Raises one ConfigError with everything that `request_of` rejects.
    """
    requests: list[Request] = []
    problems: list[str] = []
    for task, given in asked:
        try:
            requests.append(request_of(given, limit))
        except ConfigError as error:
            problems += [f'generation_kwargs of {task}: {line}' for line in error.problems]
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    return requests


def request_of(given: Mapping[str, Any], limit: int) -> Request:
    """Return the request that `HFLM` makes of `generation_kwargs`, for a model of `limit` tokens.

    Raises ConfigError for values at which `HFLM` or transformers' `generate` would fail, and for
    keys that are not in `READ`.
    """
    kwargs = {key: value for key, value in given.items() if value is not None}
    kwargs = normalize_gen_kwargs(kwargs)
    max_tokens, temperature = kwargs['max_gen_toks'], float(kwargs.get('temperature', 0))
    problems = []
    if not 0 < max_tokens < limit:
        problems.append(
            f'max_gen_toks={max_tokens} must be at least 1 and less than '
            f'model.max_seq_len={limit}, which context and continuation share: '
            f'set max_gen_toks to at most {limit - 1} {OWN_TASK}'
        )
    if kwargs['do_sample'] and not temperature:
        problems.append(
            'do_sample=true needs a temperature above 0: '
            f'set temperature=1.0, or do_sample=false, {OWN_TASK}'
        )
    if '' in kwargs['until']:
        problems.append(
            f'until has an empty string, which every text contains: leave it out {OWN_TASK}'
        )
    if 'max_length' in kwargs:
        problems.append(
            f'max_length={kwargs.pop("max_length")} counts the context and its padding, too: '
            f'set max_gen_toks instead {OWN_TASK}'
        )
    problems += [
        f'{key}={value} is not supported (the keys are {", ".join(sorted(READ))}): '
        f'leave it out {OWN_TASK}'
        for key, value in kwargs.items()
        if key not in READ and NO_EFFECT.get(key) != value
    ]
    if problems:
        raise ConfigError(*problems)
    sampling = Sampling(temperature=0)
    if kwargs['do_sample']:
        top_k = kwargs.get('top_k', TOP_K) or None
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=kwargs.get('top_p'))
    return Request(max_tokens=max_tokens, sampling=sampling, stops=tuple(kwargs['until']))
