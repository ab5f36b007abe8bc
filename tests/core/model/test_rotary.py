"""Rotary embeddings, against the modules of transformers."""

import importlib
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.core.config import ModelConfig
from megajax.core.model.rotary import rotate


def make_model(head_dim: int, **keys: Any) -> ModelConfig:
    sizes = {'num_layers': 1, 'hidden_size': 64, 'num_heads': 2, 'vocab_size': 8, 'max_seq_len': 64}
    return ModelConfig(**sizes, head_dim=head_dim, position='rope', **keys)


def heads_of(head_dim: int) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (1, 40, 2, head_dim))


@settings(max_examples=20, deadline=None)
@given(
    half=st.integers(1, 40),
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
