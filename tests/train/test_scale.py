"""The largest preset of the Megatron paper compiles on a laptop: abstract arguments, eight simulated devices, nothing allocated."""

import time

import jax
import jax.numpy as jnp

import megajax
from megajax.parallel.layout import BATCH
from megajax.parallel.mesh import concrete


def test_8b_parameters_compile_for_eight_devices() -> None:
    config = megajax.load('megatron_8.3b', ['mesh.data=1', 'mesh.model=8', 'train.batch_size=8'])
    with jax.set_mesh(megajax.make_mesh(1, 8)):
        start = time.perf_counter()
        state = concrete(jax.eval_shape(lambda: megajax.init_state(config)))
        sharding = jax.NamedSharding(jax.sharding.get_mesh(), BATCH)
        dtypes = {'tokens': jnp.int32, 'labels': jnp.int32, 'loss_mask': jnp.float32}
        batch = {name: jax.ShapeDtypeStruct((8, 1024), dtype, sharding=sharding) for name, dtype in dtypes.items()}
        compiled = megajax.make_train_step(config).lower(state, batch).compile()
        seconds = time.perf_counter() - start
    parameters_and_adam = 3 * 4 * sum(x.size for x in jax.tree.leaves(state.params))
    assert compiled.memory_analysis().argument_size_in_bytes < 1.01 * parameters_and_adam / 8
    assert seconds < 30
