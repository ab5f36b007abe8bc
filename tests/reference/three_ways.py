"""The same loss and gradients three ways, and what each sends: megajax, XLA left to itself,
Megatron by hand.

Each way takes the parameters of megajax on the current mesh and a batch of numpy arrays, see
`make_train_step`.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax import P
from reference import auto_model
from reference import megatron_by_hand as by_hand

from megajax.core.config import Config
from megajax.core.train.feed import place_batch
from megajax.core.train.gradients import make_loss_and_gradients
from megajax.interop.megatron.weights import to_megatron
from megajax.xla.hlo.collectives import Collective, collectives
from megajax.xla.hlo.program import Program


class Way(NamedTuple):
    """A loss, its gradients by Megatron's names as whole arrays, and the collectives of the program
    that made both.
    """

    loss: float
    gradients: dict[str, np.ndarray]
    collectives: list[Collective]


def explicit_way(config: Config, params: nnx.State, batch: Mapping[str, np.ndarray]) -> Way:
    """megajax: axes are Explicit, and where something is sent a line says so."""
    ((loss, _), gradients), sent = _run(
        make_loss_and_gradients(config), params, place_batch(batch), jax.random.key(0)
    )
    return Way(float(loss), to_megatron(config, gradients), sent)


def auto_way(
    config: Config, params: nnx.State, batch: Mapping[str, np.ndarray], residual: P | None = None
) -> Way:
    """`auto_model`: axes are Auto, and XLA decides.

    Weights and their gradients have places, and with `residual` the residual stream.
    """
    mesh = auto_model.auto_mesh(jax.sharding.get_mesh())
    flat = nnx.to_flat_state(params)
    with jax.set_mesh(mesh):
        weights = auto_model.place(
            {'.'.join(path): param.get_value() for path, param in flat}, mesh
        )
        placed = auto_model.place(place_batch(batch), mesh)
        gpt_loss = functools.partial(auto_model.gpt_loss, config=config.model)
        if residual is not None:
            gpt_loss = functools.partial(
                gpt_loss, residual=lambda x_BSD: jax.lax.with_sharding_constraint(x_BSD, residual)
            )
        places = None, jax.tree.map(lambda weight: weight.sharding, weights)
        (loss, gradients), sent = _run(
            jax.value_and_grad(gpt_loss),
            weights,
            placed['tokens'],
            placed['labels'],
            placed['loss_mask'],
            out_shardings=places,
        )
    state = nnx.from_flat_state(
        [(path, param.replace(gradients['.'.join(path)])) for path, param in flat]
    )
    return Way(float(loss), to_megatron(config, state), sent)


def by_hand_way(config: Config, params: nnx.State, batch: Mapping[str, np.ndarray]) -> Way:
    """`megatron_by_hand`: every collective is written where Megatron places it."""
    arrays = to_megatron(config, params)
    specs = {name: by_hand.spec(name) for name in arrays}
    weights = {name: jax.device_put(x, specs[name]) for name, x in arrays.items()}
    gpt_loss = functools.partial(
        by_hand.gpt_loss, config=config.model, sp=config.mesh.sequence_parallel
    )
    on_shards = jax.shard_map(
        gpt_loss, in_specs=(specs, P('data'), P('data'), P('data')), out_specs=P()
    )
    placed = place_batch(batch)
    (loss, gradients), sent = _run(
        jax.value_and_grad(on_shards),
        weights,
        placed['tokens'],
        placed['labels'],
        placed['loss_mask'],
    )
    return Way(float(loss), {name: np.asarray(x) for name, x in gradients.items()}, sent)


def _run(function: Any, *args: Any, **options: Any) -> tuple[Any, list[Collective]]:
    compiled = jax.jit(function, **options).lower(*args).compile()
    text = compiled.as_text()
    assert text is not None
    return compiled(*args), collectives(Program(text), dict(jax.sharding.get_mesh().shape))
