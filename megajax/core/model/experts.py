"""A mixture of experts: each token is sent to a few MLPs, and their results are added with weights.

The experts' hidden dim A is sharded over `model`, like the hidden dim of an MLP (Megatron's f and
g). The experts X are sharded over `expert`, an axis of data shards. One all-to-all sends each token
to the devices of its experts, and a second one returns the results; the backward pass has two as
well. All of it runs in one `shard_map` (`expert_passes.py`), because where a token goes depends on
the data.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import P

from megajax.core.config import ModelConfig
from megajax.core.model import expert_passes
from megajax.core.model.expert_passes import Arrays, Saved, Settings
from megajax.core.model.fp32_gradients import Slotted
from megajax.core.model.norm import make_norm
from megajax.core.model.parameters import Parameters
from megajax.core.model.per_device import Specs, per_device
from megajax.core.model.rows import NO_ROWS, Rows
from megajax.core.model.sublayer import Sublayer
from megajax.core.model.zero_sharding import gather
from megajax.core.parallel.layout import EXPERT, UNSHARDED

MATRICES = 'up', 'down', 'shared_up', 'shared_down'


class Router(nnx.Module):
    """The parameters that choose experts."""

    load: nnx.Param[Any] | None = None  # only in a step that counts how often each expert is chosen

    def __init__(self, parameters: Parameters, *, key: jax.Array):
        self.weight = parameters.make('weight', key)
        self.bias = parameters.maybe('bias')
        self.selection_bias = parameters.maybe('selection_bias')


class ExpertLinear(nnx.Module):
    """A weight for each expert, and a bias if one is declared."""

    def __init__(self, parameters: Parameters, *, key: jax.Array):
        self.weight = parameters.make('weight', key)
        self.bias = parameters.maybe('bias')


class Experts(Sublayer):
    """The router and the experts of a layer."""

    SCOPE, LINEARS, KEY, MIXES_TOKENS = 'experts', ('up', 'down'), 2, False

    def __init__(self, config: ModelConfig, parameters: Parameters, *, key: jax.Array):
        self.config, self.layout = config, parameters.layout
        router_key, up_key, down_key = jax.random.split(key, 3)
        shared_keys = jax.random.split(jax.random.fold_in(key, 3))
        self.norm = make_norm(config, parameters['norm'])
        has_both = 'output_norm' in parameters
        self.output_norm = make_norm(config, parameters['output_norm']) if has_both else None
        self.router = Router(parameters['router'], key=router_key)
        self.up = ExpertLinear(parameters['up'], key=up_key)
        self.down = ExpertLinear(parameters['down'], key=down_key)
        self.shared_up, self.shared_down = (
            ExpertLinear(parameters[name], key=key) if name in parameters else None
            for name, key in zip(('shared_up', 'shared_down'), shared_keys, strict=True)
        )

    def update(
        self, x_BTD: jax.Array, core: Any = None, rows: Rows = NO_ROWS
    ) -> tuple[jax.Array, Any]:
        """Return the sublayer's addition to the residual stream, and None."""
        experts = self.config.experts
        assert experts is not None
        if self.router.load is None:  # outside a training step, no token is dropped
            experts = experts.model_copy(update={'capacity': None})
        given = {
            'router': self.router.weight,
            'router_bias': self.router.bias,
            'selection_bias': self.router.selection_bias,
            'load': self.router.load,
            'up': self.up.weight,
            'up_bias': self.up.bias,
            'down': self.down.weight,
            'down_bias': self.down.bias,
            'shared_up': None if self.shared_up is None else self.shared_up.weight,
            'shared_down': None if self.shared_down is None else self.shared_down.weight,
        }
        parameters = [(name, x) for name, x in given.items() if x is not None]
        values: Arrays = {name: x.get_value() for name, x in parameters}
        if 'load' in values:
            values['real'] = rows.real_BS
        slotted = {name: x for name, x in values.items() if isinstance(x, Slotted)}
        how = Settings(
            experts,
            self.config.activation,
            self.layout,
            tuple((name, x.declared.dims_of_layer) for name, x in parameters if name != 'load'),
            at_rest='up' in slotted and slotted['up'].at_rest,
            is_frozen='up' in slotted and slotted['up'].slot is None,
        )
        weights = {name: x.weight for name, x in slotted.items()}
        slots = {name: x.slot for name, x in slotted.items() if x.slot is not None}
        return self.finished(mix(self.enter(x_BTD), values | weights, slots, how), rows.key_B), None


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def mix(x_BTD: jax.Array, arrays: Arrays, slots: Arrays, how: Settings) -> jax.Array:
    """Return, for each token, the weighted sum of its experts' results; sharded like x.

    `slots` are differentiated in place of the arrays of the same name.
    """
    return _forward(x_BTD, arrays, slots, how)[0]


Kept = tuple[jax.Array, Arrays, Arrays, Saved]


def _forward(
    x_BTD: jax.Array, arrays: Arrays, slots: Arrays, how: Settings
) -> tuple[jax.Array, Kept]:
    read, kept = _read(arrays, x_BTD, how), _dims_saved(how)

    def run(how: Settings, x_BTD: jax.Array, *given: jax.Array) -> tuple[jax.Array, ...]:
        y_BTD, saved = expert_passes.forward(x_BTD, dict(zip(read, given, strict=True)), how)
        return y_BTD, *(getattr(saved, name) for name in kept)

    def out(specs: Specs) -> Specs:
        of_saved = (how.layout.like(specs[0], f'*BTD->*{dims}') for dims in kept.values())
        return specs[0], *of_saved

    y_BTD, *saved = _on_devices(run, out, how)(x_BTD, *read.values())
    return y_BTD, (x_BTD, arrays, slots, Saved(**dict(zip(kept, saved, strict=True))))


def _backward(how: Settings, kept: Kept, dy_BTD: jax.Array) -> tuple[jax.Array, Arrays, Arrays]:
    x_BTD, arrays, slots, saved = kept
    read, names = _read(arrays, x_BTD, how), [*_dims_saved(how)]
    given = [getattr(saved, name) for name in names]
    learned = [name for name in arrays if _has_gradient(name, how)]

    def run(
        how: Settings, dy_BTD: jax.Array, x_BTD: jax.Array, *rest: jax.Array
    ) -> tuple[jax.Array, ...]:
        local = dict(zip(read, rest[len(given) :], strict=True))
        saved = Saved(**dict(zip(names, rest[: len(names)], strict=True)))
        dx_BTD, gradients = expert_passes.backward(dy_BTD, x_BTD, local, saved, how)
        return dx_BTD, *(gradients[name] for name in learned)

    def out(specs: Specs) -> Specs:
        return specs[0], *(_spec_gradient(name, arrays, specs[0], how) for name in learned)

    dx_BTD, *found = _on_devices(run, out, how)(dy_BTD, x_BTD, *given, *read.values())
    gradients = dict(zip(learned, found, strict=True))
    of_slots = {name: gradients[name] for name in slots}
    of_arrays = {name: None if name in slots else gradients.get(name) for name in arrays}
    return dx_BTD, of_arrays, of_slots


mix.defvjp(_forward, _backward)


def _on_devices(
    run: Callable[..., tuple[jax.Array, ...]], out: Callable[[Specs], Specs], how: Settings
) -> Callable[..., tuple[jax.Array, ...]]:
    abstract = partial(run, how._replace(is_abstract=True)) if how.is_mapped else None
    return per_device(partial(run, how), out, abstract)


def _read(arrays: Arrays, x_BTD: jax.Array, how: Settings) -> Arrays:
    """Return the arrays of a data shard's experts, with the matrices ready to be multiplied."""
    layout, read = how.layout, dict(arrays)
    for name, dims in how.dims:
        if name in MATRICES:
            read[name] = read[name].astype(x_BTD.dtype)
            if how.at_rest:
                read[name] = gather(read[name], dims, layout)  # ZeRO-3: all-gather over data
        if 'X' in dims and how.is_mapped and read[name].shape[0] > how.num_own:
            read[name] = _own(x_BTD, read[name])
    return read


@jax.custom_batching.custom_vmap
def _own(x_BTD: jax.Array, w: jax.Array) -> jax.Array:
    """Return the experts [x, ...] of each data shard, given all [X, ...].

    Each device already has its experts. x is only an argument because it is mapped.
    """
    spec = jax.typeof(w).sharding.spec
    size = len(w) // jax.typeof(w).sharding.mesh.shape[EXPERT]
    return jnp.zeros((size, *w.shape[1:]), w.dtype, out_sharding=UNSHARDED.like(spec, 'X*->x*'))


@_own.def_vmap
def _own_of_shards(
    size: int, batched: list[bool], x_BTD: jax.Array, w: jax.Array
) -> tuple[jax.Array, bool]:
    assert batched == [True, False]
    spec, of_x = jax.typeof(w).sharding.spec, jax.typeof(x_BTD).sharding.spec
    out = UNSHARDED.like((of_x[0], *spec), 'BX*->Bx*')
    each = jax.shard_map(lambda w: w[None], in_specs=spec, out_specs=out, check_vma=False)
    return each(w), True


def _has_gradient(name: str, how: Settings) -> bool:
    is_of_expert = name in MATRICES or name in ('up_bias', 'down_bias')
    return name not in ('selection_bias', 'real') and not (how.is_frozen and is_of_expert)


def _dims_saved(how: Settings) -> dict[str, str]:
    """Return the dims of each array in `Saved`.

    The first dim joins the tokens of all devices. If an array has partial sums, its last dim joins
    the shards of A.
    """
    has_capacity = '-' if how.experts.capacity is not None else ''
    dims = {'logit_Tx': 'B-', 'expert_TY': 'B-', 'up': f'B{has_capacity}A', 'y_nD': 'BA'}
    if how.layout.mesh_axes('X'):
        dims['rows'] = f'B{has_capacity}-'
    return dims | ({'shared_up': 'BM'} if how.experts.shared_ffn_size else {})


def _spec_gradient(name: str, arrays: Arrays, x: P, how: Settings) -> P:
    """Return the sharding of an array's gradient, given the sharding x of x_BTD.

    If a step maps its data shards, each data shard has the gradients of its own experts.
    """
    dims = '--' if name == 'load' else dict(how.dims)[name]
    if arrays[name].ndim > len(dims):
        dims = f'{dims[:-1]}A{dims[-1]}'
    dims = dims.replace('X', 'x') if how.is_mapped else dims
    return how.layout.like(x, f'*BTD->*{dims}')
