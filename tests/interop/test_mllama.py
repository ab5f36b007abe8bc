"""Layers that attend to images give what those of Llama 3.2 Vision do.

`mllama.npz` holds two random layers and what transformers made of them (`make_mllama.py`).
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from support import exhaustive, make_config, on_mesh, relative_error, slow
from vlm import CROSS_VISION, SP

from megajax.core.config import Config
from megajax.core.model.computation import IN_FP32
from megajax.core.model.cross_attention import CrossAttention
from megajax.core.model.parameters import Parameters
from megajax.core.parallel.layout import Layout

FILE = Path(__file__).parent / 'mllama.npz'
LIMIT = 1e-5
MODEL = {
    'num_layers': 2,
    'hidden_size': 16,
    'num_heads': 4,
    'num_kv_heads': 2,
    'head_dim': 4,
    'ffn_size': 24,
    'qk_norm': False,
}


def weights_of(stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Mllama's weights by megajax's names, [layers, input dims, output dims]."""
    there = {name: np.swapaxes(x, 1, -1) for name, x in stored.items()}
    keys, values = (there[f'cross_attn.{name}_proj.weight'] for name in 'kv')
    key_value = np.stack([keys, values]).reshape(2, 2, 16, 2, 4)  # U, J, D, K, H
    up = np.stack([there['mlp.gate_proj.weight'], there['mlp.up_proj.weight']], axis=2)
    gates = stored['cross_attn_attn_gate'], stored['cross_attn_mlp_gate']
    return {
        'key_value.weight': key_value.transpose(2, 1, 3, 0, 4),
        'key_norm.weight': stored['cross_attn.k_norm.weight'],
        'layers.attention.norm.weight': stored['input_layernorm.weight'],
        'layers.attention.query.weight': there['cross_attn.q_proj.weight'].reshape(2, 16, 4, 4),
        'layers.attention.query_norm.weight': stored['cross_attn.q_norm.weight'],
        'layers.attention.out.weight': there['cross_attn.o_proj.weight'].reshape(2, 4, 4, 16),
        'layers.mlp.norm.weight': stored['post_attention_layernorm.weight'],
        'layers.mlp.up.weight': up,
        'layers.mlp.down.weight': there['mlp.down_proj.weight'],
        'layers.gates': np.concatenate(gates, axis=1),
    }


def load(module: CrossAttention, weights: dict[str, np.ndarray]) -> None:
    params = nnx.to_flat_state(nnx.state(module))
    assert {'.'.join(path) for path, _ in params} == weights.keys()
    for path, param in params:
        x = weights['.'.join(path)]
        assert x.shape == param.shape
        param[...] = jax.device_put(x, param[...].sharding)
    nnx.update(module, nnx.from_flat_state(params))


@pytest.mark.parametrize(
    'mesh',
    [exhaustive((1, 1)), slow((1, 2)), (1, 4)],
    ids=['alone', 'heads sharded', 'fewer key/value heads'],
)
def test_the_layers_are_those_of_transformers(mesh: tuple[int, int]) -> None:
    vision = CROSS_VISION | {'cross_every': 1}
    config: Config = make_config('llama', *mesh, **SP, model=MODEL, vision=vision)
    with np.load(FILE) as arrays:
        stored = dict(arrays)
    layout = Layout.of(config).per_shard
    with on_mesh(config):
        parameters = Parameters.of(config.model, layout)['cross']
        make = jax.jit(lambda key: CrossAttention(config.model, parameters, key=key))
        module = make(jax.random.key(0))
        load(module, weights_of(stored))
        rows, count, _ = stored['vectors'].shape

        @jax.jit
        def layers(module: CrossAttention, vectors: Any, seen: Any, x_BTD: Any) -> jax.Array:
            kv_YJNUH = module.key_value(vectors.reshape(rows * count, -1))
            kv_BYJNUH = kv_YJNUH.reshape(
                rows, count, *kv_YJNUH.shape[1:], out_sharding=layout('BYJNUh')
            )
            run, arrays = module.after_groups(module.split(kv_BYJNUH, seen), None, IN_FP32, None)
            ((y_BTD,), _) = jax.lax.scan(lambda x, layer: (run(x, layer), None), (x_BTD,), arrays)
            return y_BTD

        placed = jax.device_put(stored['x'], layout('BTD'))
        y_BTD = layers(module, stored['vectors'], stored['seen'], placed)
    y_BTD, sees = np.asarray(y_BTD), stored['seen'].any(-1)
    assert relative_error(y_BTD[sees], stored['y'][sees]) <= LIMIT
    # Where transformers attends to all vectors alike, a token without an image stays what it is.
    np.testing.assert_array_equal(y_BTD[~sees], stored['x'][~sees])
    assert not sees.all()
