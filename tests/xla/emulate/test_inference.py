"""The H100's programs of evaluation and of generation compute what one device computes."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from support import exhaustive, make_batch, make_config, on_mesh

import megajax
from megajax.core.config import Config
from megajax.core.hardware.targets import has_compiler
from megajax.core.train.evaluation import make_eval_step
from megajax.core.train.feed import place_batch
from megajax.core.train.step import init_state
from megajax.runtime.generate.engine import Engine
from megajax.runtime.generate.prompt_images import PromptBatch
from megajax.runtime.generate.sampling import Sampling
from megajax.runtime.generate.weights import make_weights
from megajax.xla.emulate.result import GpuRun

needs_compiler = pytest.mark.skipif(
    not has_compiler(), reason="needs XLA's GPU compiler: pip install 'megajax[gpu-compile]'"
)
NUM_ROWS, NUM_SLOTS, NUM_TOKENS = 4, 48, 4
SAMPLINGS = Sampling(temperature=0), Sampling(top_k=40, top_p=0.9)


def step(name: str, data: int, model: int, **sections: dict) -> Config:
    # XLA's Triton cannot tile every product of smaller heads.
    sections['model'] = {'head_dim': 64, 'dropout': 0.0}
    return make_config(name, data, model, **sections)


def noisy_params(config: Config):
    """Parameters of which none is zero: a fault in a bias would not show."""
    random = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: jax.device_put(
            x + 0.05 * random.normal(size=x.shape).astype(x.dtype), x.sharding
        ),
        init_state(config).params,
    )


def prompts() -> dict[str, Any]:
    """Prompts of several lengths, one row of which nothing is wanted."""
    random = np.random.default_rng(0)
    return {
        'batch': PromptBatch(
            random.integers(1000, size=(NUM_ROWS, 16), dtype=np.int32),
            np.array([16, 3, 9, 1], np.int32),
        ),
        'left_B': np.array([20, 20, 0, 20], np.int32),
        'number_B': np.arange(NUM_ROWS, dtype=np.int32),
        'seed': np.uint32(7),
        'end_ids': np.array([-1], np.int32),
    }


def run_prefill_and_decode(config: Config, sampling: Sampling, **options: bool) -> list[GpuRun]:
    with on_mesh(config):
        engine, weights = Engine(config, 'cpu'), make_weights(config, noisy_params(config))
        given = prompts()
        read = functools.partial(engine._read, num_slots=NUM_SLOTS, sampling=sampling)
        make = functools.partial(engine._make, num_tokens=NUM_TOKENS, sampling=sampling)
        rows, *_ = jax.jit(read)(weights, *given.values())
        wanted_B = np.ones(NUM_ROWS, bool)
        run = functools.partial(megajax.inspect.run, compiler_options=options)
        return [
            run(read, weights, *given.values()),
            run(make, weights, rows, wanted_B, given['seed'], given['end_ids']),
        ]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'data', 'model'), [('gpt', 2, 4), exhaustive('llama', 1, 4), exhaustive('bert', 2, 4)]
)
def test_evaluation(name, data, model):
    config = step(name, data, model, train={'microbatches': 2})
    with on_mesh(config):
        batch = place_batch(make_batch(config))
        megajax.inspect.run(make_eval_step(config), noisy_params(config), batch).raise_if_wrong()


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize('sampling', SAMPLINGS, ids=['greedy', 'sampled'])
@pytest.mark.parametrize(('name', 'data', 'model'), [exhaustive('gpt', 1, 4), ('llama', 2, 4)])
def test_prefill_and_decode_make_the_same_tokens_and_caches(name, data, model, sampling):
    for found in run_prefill_and_decode(step(name, data, model), sampling):
        found.raise_if_wrong()


@needs_compiler
@pytest.mark.slow
def test_generation_with_the_products_of_cublas():
    options = {'xla_gpu_enable_triton_gemm': False}
    for found in run_prefill_and_decode(step('gpt', 1, 4), SAMPLINGS[0], **options):
        found.raise_if_wrong()
