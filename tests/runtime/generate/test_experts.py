"""Generation with experts: the same tokens on every mesh, whatever capacity training has."""

from typing import Any

import numpy as np
import pytest
from support import exhaustive, make_config, on_mesh, random_params, slow

from megajax.runtime.generate import Generator, Request, Sampling

REQUEST = Request(max_tokens=6, sampling=Sampling(temperature=0))


def generated(name: str, **mesh: Any) -> list[list[int]]:
    random = np.random.default_rng(7)
    prompts = [random.integers(1, 1000, length).tolist() for length in (3, 9, 14)]
    config = make_config(name, model={'num_layers': 2}, mesh=mesh)
    with on_mesh(config):
        *_, rows = Generator(config, random_params(config, std=0.3)).stream(prompts, REQUEST)
    return [row.ids for row in rows if row]


@pytest.mark.parametrize(
    'name', ['half_dense', slow('capacity'), *map(exhaustive, ('experts', 'first_dense'))]
)
def test_experts_on_several_devices_generate_the_tokens_of_one(name: str) -> None:
    mesh = {'data': 4, 'experts': 2, 'model': 2, 'sequence_parallel': True}
    assert generated(name, **mesh) == generated(name)
