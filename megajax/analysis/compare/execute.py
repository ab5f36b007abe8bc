"""Run one forward and one backward pass of a config on its mesh, and record its numbers."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import megajax
from megajax.analysis.compare.forward import layer_by_layer, make_forward, on_host
from megajax.analysis.compare.parameters import by_layer, digests
from megajax.analysis.compare.recording import About, Arrays, Recording
from megajax.analysis.compare.site_names import site_names
from megajax.core.config import Config
from megajax.core.parallel.mesh import mesh_for
from megajax.core.train.compiler_options import evaluation_options, step_options
from megajax.core.train.feed import Batch, place_batch
from megajax.core.train.gradients import make_gradients
from megajax.core.train.loss_scale import init_loss_scale
from megajax.core.train.scaling import scales_of
from megajax.core.train.step import dropout_key, make_calibration
from megajax.runtime.run.host_memory import check_host_memory

LOSS_SCALE = 64.0  # for fp16: small enough that no gradient overflows
# Returns the parameters for a config on the current mesh, sharded as between steps.
Load = Callable[[Config], nnx.State]


def execute(
    config: Config, load: Load, batch: Mapping[str, np.ndarray], *, source: str
) -> Recording:
    """Return the numbers of a training step's forward and backward pass over a batch.

    The step itself computes loss and gradients. `source` names the origin of the parameters.
    """
    mesh = mesh_for(config)
    check_host_memory(config, mesh)
    # On GPUs, the default for fp32 is TF32, whose rounding is larger than the differences sought.
    is_fp32 = config.train.dtype == 'float32'
    in_full = jax.default_matmul_precision('highest') if is_fp32 else nullcontext()
    with in_full, jax.set_mesh(mesh):
        params, placed = load(config), place_batch(batch)
        key, weights = dropout_key(config.train.seed, 0), digests(params, config)
        scales = _scales(config, params, placed)
        loss, gradients = _loss_and_gradients(config, params, placed, key, scales)
        plain = layer_by_layer(config)
        if config.mesh.stages > 1:
            params = load(plain)
        forward_pass = jax.jit(make_forward(plain), compiler_options=evaluation_options())
        sites = forward_pass(params, placed, key, scales)
        forward = {name: on_host(sites[name], plain) for name in site_names(config.model)}
    forward['logits'] = forward['logits'][..., : config.model.vocab_size]
    about = About(
        source=source,
        config=config.model_dump(mode='json'),
        executed_with=f'jax {jax.__version__}',
        megajax=megajax.__version__,
        platform=mesh.devices.flat[0].device_kind,
        weights=weights,
    )
    return Recording(about=about, batch=dict(batch), forward=forward | loss, gradients=gradients)


def _scales(config: Config, params: nnx.State, batch: Batch) -> jax.Array | None:
    """Return the delayed FP8 scales that a run begins with; None without delayed scaling."""
    if not config.train.has_delayed_scales:
        return None
    return scales_of(make_calibration(config)(params, jnp.int32(0), batch))


def _loss_and_gradients(
    config: Config, params: nnx.State, batch: Batch, key: jax.Array, scales: jax.Array | None
) -> tuple[Arrays, Arrays]:
    loss_scale = init_loss_scale(config)
    if loss_scale is not None:
        loss_scale = loss_scale._replace(value=jnp.float32(LOSS_SCALE))
    step = jax.jit(make_gradients(config), compiler_options=step_options(config))
    (loss, _), gradients, _ = step(params, batch, key, loss_scale, scales)
    return {'loss': np.asarray(loss, np.float32)}, by_layer(gradients, config)
