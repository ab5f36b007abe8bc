"""Inspect and execute MaxText's own training step: `python benchmarks/maxtext_step.py [KEY=VALUE]`.

It needs MaxText (`pip install maxtext`, Python 3.12) and XLA's GPU compiler, and prints the
collectives of the step compiled for H100, and its results compared with one device. The settings
are MaxText's. The state and the batch are random.
"""

import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {'JAX_PLATFORMS': 'cpu', 'TF_CPP_MIN_LOG_LEVEL': '3', 'DECOUPLE_GCLOUD': 'TRUE'}

import jax
import jax.numpy as jnp
import numpy as np

import megajax

SETTINGS = (
    'run_name=step base_output_directory=unused hardware=cpu skip_jax_distributed_system=true '
    'dataset_type=synthetic enable_checkpointing=false base_emb_dim=64 base_num_query_heads=4 '
    'base_num_kv_heads=4 head_dim=16 base_mlp_dim=128 base_num_decoder_layers=2 vocab_size=512 '
    'max_target_length=64 per_device_batch_size=2 attention=dot_product dtype=float32 '
    'weight_dtype=float32 ici_fsdp_parallelism=4 ici_tensor_parallelism=2'
)


def drawn(x: Any) -> jax.Array:
    """Return an array of this shape and sharding; second moments have to be positive."""
    random = np.random.default_rng(x.size)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        bits = jax.eval_shape(jax.random.key_data, x)
        return jax.device_put(
            jax.random.wrap_key_data(jnp.zeros(bits.shape, bits.dtype)), x.sharding
        )
    if jnp.issubdtype(x.dtype, jnp.inexact):
        value = np.abs(0.05 * random.normal(size=x.shape))
    else:  # tokens, positions and segments; counters are scalars
        value = random.integers(2, size=x.shape) if x.ndim > 1 else np.zeros(x.shape)
    return jax.device_put(value.astype(x.dtype), x.sharding)


def main() -> None:
    jax.config.update('jax_num_cpu_devices', 8)
    import maxtext
    from flax.core.spmd import logical_axis_rules
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train import train, train_compile
    from maxtext.utils import maxtext_utils, sharding

    base = Path(maxtext.__file__).parent / 'configs' / 'base.yml'
    config = pyconfig.initialize(['', str(base), *SETTINGS.split(), *sys.argv[1:]])
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    abstract, _, state, _, model = train_compile.get_shaped_inputs(mesh, config)
    params, state = sharding.maybe_update_params_sharding_with_opt(config, state)
    batch = sharding.get_input_data_sharding(config, mesh)
    function, inputs, outputs, static, _ = maxtext_utils.get_functional_train_with_signature(
        train.train_step, batch, state, model, config, params
    )
    step = jax.jit(function, in_shardings=inputs, out_shardings=outputs, static_argnums=static)
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        print(megajax.inspect(step, *abstract, target='h100'))
        print(megajax.inspect.run(step, *jax.tree.map(drawn, abstract), target='h100'))


if __name__ == '__main__':
    main()
