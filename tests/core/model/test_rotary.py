"""Rotary embeddings, against the modules of transformers."""

import importlib
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.core.config import ModelConfig, RopeScaling
from megajax.core.model.rotary import frequencies, rotate


def make_model(head_dim: int, **keys: Any) -> ModelConfig:
    sizes = {'num_layers': 1, 'hidden_size': 64, 'num_heads': 2, 'vocab_size': 8, 'max_seq_len': 64}
    return ModelConfig(**sizes, head_dim=head_dim, position='rope', **keys)


def heads_of(head_dim: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (1, 40, 2, head_dim))


@settings(max_examples=20, deadline=None)
@given(
    half=st.sampled_from([1, 6, 35]),  # each size compiles anew
    theta=st.floats(2, 1e7),
    share=st.floats(0, 1, exclude_min=True),
)
def test_a_fraction_of_the_head_dim_is_rotated_as_in_transformers(half, theta, share) -> None:
    torch = pytest.importorskip('torch')
    pytest.importorskip('transformers')
    phi3 = importlib.import_module('transformers.models.phi3.modeling_phi3')
    head_dim = 2 * half
    fraction = 2 * max(1, int(share * half)) / head_dim
    if int(head_dim * fraction) % 2:  # the division was rounded down
        return
    config = phi3.Phi3Config(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        rope_parameters={
            'rope_type': 'default',
            'rope_theta': theta,
            'partial_rotary_factor': fraction,
        },
    )
    x = heads_of(head_dim)
    theirs = torch.tensor(np.asarray(x)).transpose(1, 2)
    angles = phi3.Phi3RotaryEmbedding(config)(theirs, torch.arange(40)[None])
    expected = phi3.apply_rotary_pos_emb(theirs, theirs, *angles)[0].transpose(1, 2).numpy()

    model = make_model(head_dim, rope_theta=theta, rotary_fraction=fraction)
    for actual in rotate(x, x, None, model):
        np.testing.assert_allclose(actual, expected, atol=2e-5)
        passed = actual[..., model.rotary_dim :], x[..., model.rotary_dim :]
        np.testing.assert_array_equal(*passed)


def from_transformers(
    kind: str, dim: int, theta: float, scaling: dict[str, Any], length: int
) -> Any:
    """Return the inverse frequencies and the attention factor."""
    pytest.importorskip('torch')
    pytest.importorskip('transformers')
    rope = importlib.import_module('transformers.modeling_rope_utils')
    llama = importlib.import_module('transformers.models.llama.configuration_llama')
    parameters = {'rope_type': kind, 'rope_theta': theta, **scaling}
    parameters['original_max_position_embeddings'] = length
    config = llama.LlamaConfig(
        hidden_size=2 * dim, num_attention_heads=2, head_dim=dim, rope_parameters=parameters
    )
    return rope.ROPE_INIT_FUNCTIONS[kind](config)


@settings(max_examples=40, deadline=None)
@given(
    half=st.integers(1, 128),
    theta=st.floats(1.5, 1e7),
    length=st.integers(1, 2**20),
    scaling=st.fixed_dictionaries(
        {'factor': st.floats(1, 64)},
        optional={
            'beta_fast': st.floats(1.01, 100),
            'beta_slow': st.floats(0.01, 1),
            'attention_factor': st.floats(0.5, 2),
            'truncate': st.booleans(),
        },
    ),
)
def test_yarn_has_the_frequencies_and_the_attention_factor_of_transformers(
    half, theta, length, scaling
) -> None:
    ours = RopeScaling(type='yarn', original_max_seq_len=length, **scaling)
    expected, attention_factor = from_transformers('yarn', 2 * half, theta, scaling, length)
    np.testing.assert_allclose(frequencies(2 * half, theta, ours), expected.numpy(), rtol=1e-5)
    assert ours.attention_factor == attention_factor


@settings(max_examples=20, deadline=None)
@given(
    short=st.lists(st.floats(0.5, 64), min_size=1, max_size=64),
    theta=st.floats(1, 1e7),
    factor=st.floats(1, 64),
    length=st.integers(2, 2**20),
)
def test_longrope_divides_each_frequency_as_transformers_does(short, theta, factor, length) -> None:
    scaling = {'factor': factor, 'short_factor': short, 'long_factor': short[::-1]}
    ours = RopeScaling(type='longrope', original_max_seq_len=length, **scaling)
    dim = 2 * len(short)
    expected, attention_factor = from_transformers('longrope', dim, theta, scaling, length)
    np.testing.assert_allclose(frequencies(dim, theta, ours), expected.numpy(), rtol=1e-5)
    assert ours.attention_factor == attention_factor


LONGROPE = {'type': 'longrope', 'short_factor': [1, 2, 4, 8], 'long_factor': [1, 3, 9, 27]}


def test_longrope_divides_each_frequency_by_its_short_factor() -> None:
    scaling = RopeScaling(**LONGROPE, factor=4.0, original_max_seq_len=64)
    expected = 1e4 ** (-np.arange(4) / 4) / [1, 2, 4, 8]
    np.testing.assert_allclose(frequencies(8, 1e4, scaling), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ('kind', 'factor'),
    [({'type': 'yarn'}, 1 + 0.1 * np.log(4)), (LONGROPE, np.sqrt(1 + np.log(4) / np.log(64)))],
)
def test_the_attention_factor_multiplies_what_is_rotated_alone(
    kind: dict[str, Any], factor: float
) -> None:
    scaling = {'factor': 4.0, 'original_max_seq_len': 64} | kind
    x, rotated = heads_of(16), jax.jit(rotate, static_argnums=3)
    plain, scaled = (
        make_model(16, rotary_fraction=0.5, rope_scaling=RopeScaling(**scaling, **more))
        for more in ({'attention_factor': 1.0}, {})
    )
    expected = np.array(rotated(x, x, None, plain)[0])
    expected[..., :8] *= factor
    np.testing.assert_allclose(rotated(x, x, None, scaled)[0], expected, atol=1e-6)
