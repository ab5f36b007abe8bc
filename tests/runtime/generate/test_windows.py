"""Generation with windows: a cache of a window's length gives the tokens of a run without one."""

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from support import graph_of, make_config, on_mesh, random_params

from megajax.analysis.plan.generation import plan_generation
from megajax.core.config import Config
from megajax.core.model.computation import Computation
from megajax.runtime.generate import Generator, Request, Sampling
from megajax.runtime.generate.engine import engine
from megajax.runtime.generate.prompt_images import PromptBatch
from megajax.runtime.generate.weights import make_weights

MAX_TOKENS = 12
REQUEST = Request(max_tokens=MAX_TOKENS, sampling=Sampling(temperature=0))
# Windows of one token, shorter and longer than a prompt, and longer than the cache.
KINDS = [
    {'window': 1},
    {'window': 5, 'position': 'none'},
    {'window': 9, 'rope_theta': 1e6},
    {'rope_scaling': {'type': 'linear', 'factor': 4}},
    {'window': 100},
]


def windows(*mesh: int, **model: Any) -> Config:
    """Return a config whose five layers are of all kinds, or as `model` says."""
    keys = {'num_layers': 5, 'layers': KINDS, 'query_scale': 0.6, 'attention_sinks': True} | model
    return make_config('llama', *mesh, sequence_parallel=True, model=keys)


def random_prompts(count: int) -> list[list[int]]:
    """Return prompts of 1 to 20 tokens."""
    random = np.random.default_rng(7)
    lengths = random.integers(1, 21, count)
    return [random.integers(1, 1000, length).tolist() for length in lengths]


def without_a_cache(config: Config, prompts: list[list[int]]) -> list[list[int]]:
    """Return the most probable tokens after each prompt, by a forward pass of the text for each."""
    with on_mesh(config):
        params, graph, computation = (
            random_params(config, std=0.3),
            graph_of(config),
            Computation.of(config),
        )
        logits = jax.jit(lambda params, token_BS: nnx.merge(graph, params)(token_BS, computation))
        token_BS = np.zeros((len(prompts), config.model.max_seq_len), np.int32)
        ends, row = np.array([len(prompt) for prompt in prompts]), np.arange(len(prompts))
        for i, prompt in enumerate(prompts):
            token_BS[i, : len(prompt)] = prompt
        for end in ends + np.arange(MAX_TOKENS)[:, None]:
            token_BS[row, end] = np.asarray(logits(params, token_BS))[row, end - 1].argmax(-1)
    return [
        tokens[end : end + MAX_TOKENS].tolist() for tokens, end in zip(token_BS, ends, strict=True)
    ]


def with_a_cache(config: Config, prompts: list[list[int]]) -> list[list[int]]:
    with on_mesh(config):
        *_, rows = Generator(config, random_params(config, std=0.3)).stream(prompts, REQUEST)
    return [row.ids for row in rows if row]


def test_a_cache_of_windows_gives_the_tokens_of_a_run_without_one() -> None:
    prompts = [[5], [7, 8, 9], list(range(40, 60))]
    expected = without_a_cache(windows(), prompts)
    assert len({tuple(ids) for ids in expected}) == len(prompts)
    assert with_a_cache(windows(2, 2), prompts) == expected


@pytest.mark.slow
@pytest.mark.parametrize('mesh', [(1, 1), (2, 2), (1, 4)])
def test_80_prompts_of_many_lengths_get_the_tokens_of_a_run_without_a_cache(
    mesh: tuple[int, int],
) -> None:
    prompts = random_prompts(80)
    assert with_a_cache(windows(*mesh), prompts) == without_a_cache(windows(), prompts)


def test_a_layer_with_a_window_caches_a_window_as_planned() -> None:
    config = windows(1, 2, max_seq_len=64)
    zeros = np.zeros(2, np.int32)
    with on_mesh(config):
        weights = make_weights(config, random_params(config, std=0.3))
        prompts = PromptBatch(np.zeros((2, 16), np.int32), zeros + 16)
        ends = np.array([-1], np.int32)

        def read(weights: Any) -> Any:
            return engine(config).read(
                weights,
                *(prompts, zeros + 9, zeros, np.uint32(0), ends),
                num_slots=64,
                sampling=REQUEST.sampling,
            )

        state, *_ = jax.eval_shape(read, weights)
    assert [cache.k_BKYH.shape[2] for cache in state.caches] == [1, 5, 9, 64, 64]
    plan = plan_generation(config, gpu='h100', gpus=2, prompt=16, tokens=48, batch=2)
    (planned,) = (line.cache for line in plan.lines if line.model == 2)
    assert planned == sum(4 * x.size for x in jax.tree.leaves(state.caches)) // 2
