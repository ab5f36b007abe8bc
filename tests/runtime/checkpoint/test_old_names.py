"""Checkpoints and recordings with the names of an earlier version are read by today's names."""

import hashlib
import json
from pathlib import Path

import numpy as np
from support import MODELS, by_name, make_config

from megajax.core.counts.parameters import parameters
from megajax.runtime.checkpoint import old_names
from megajax.runtime.checkpoint.compare import (
    parameter_differences,
    parameter_shapes,
    read_parameter,
)
from megajax.runtime.checkpoint.open import open_model

FIRST = Path(__file__).parents[2] / 'runtime/run/data/first_release'
STEP = FIRST / 'run/checkpoints/3'
DIGESTS: dict[str, str] = json.loads((FIRST / 'expected.json').read_text())['params']
NORM = 'layers.attention.norm.weight'


def digest(x: object) -> str:
    return hashlib.sha256(np.asarray(x).tobytes()).hexdigest()


def test_old_and_current_names_are_each_others_inverses() -> None:
    for model in MODELS:
        for name, _ in parameters(make_config(model).model):
            for each in (name, f'params/{name.replace(".", "/")}/value'):
                assert old_names.current(old_names.old(each)) == each
                assert old_names.current(each) == each
    assert old_names.old(NORM) == 'layers.attention_norm.weight'
    assert old_names.old('layers.attention.query_norm.weight') == (
        'layers.attention.query_norm.weight'
    )


def test_a_model_opens_from_a_checkpoint_with_old_names_bit_for_bit() -> None:
    params = by_name(open_model(STEP, ['mesh.data=1', 'mesh.model=1']).params)
    expected = {old_names.current(name): sha256 for name, sha256 in DIGESTS.items()}
    assert NORM in expected
    assert {name: digest(x) for name, x in params.items()} == expected


def test_the_arrays_of_a_checkpoint_with_old_names_are_listed_read_and_compared() -> None:
    assert NORM in parameter_shapes(STEP)
    assert digest(read_parameter(STEP, NORM)) == DIGESTS[old_names.old(NORM)]
    assert dict(parameter_differences(STEP, STEP))[NORM] == 0
