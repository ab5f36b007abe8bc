"""Mixtral: Llama with a mixture of experts in place of each MLP. Imports no jax."""

from collections.abc import Callable
from functools import partial
from typing import Any

from megajax.core.config import ModelConfig
from megajax.interop.huggingface.families import llama
from megajax.interop.huggingface.family import GATE, UP, There
from megajax.interop.huggingface.reader import Keys, Reader
from megajax.interop.huggingface.rope import read_rope

LAYER = 'model.layers.{}.'
COUNTS = 'num_local_experts', 'num_experts'  # two names of the same key in transformers 5
# The tensors outside experts and routers.
AROUND = {path: rows for path, rows in llama.TENSORS.items() if not path.startswith('layers.mlp.')}
AROUND |= {'layers.experts.norm.weight': llama.TENSORS['layers.mlp.norm.weight']}


def tensors(
    module: str, gate: str, up: str, down: str, *, dense: bool = False
) -> dict[str, list[There]]:
    """Return the tensors of a family that stores each expert separately, under these names.

    With `dense`, some layers of the family may have an MLP.
    """
    expert = f'{LAYER}{module}.experts.{{}}'
    return (AROUND | llama.TENSORS if dense else AROUND) | {
        'layers.experts.router.weight': [There(f'{LAYER}{module}.gate.weight', 'XD')],
        'layers.experts.up.weight': [
            There(f'{expert}.{gate}.weight', '(UA)D', GATE),
            There(f'{expert}.{up}.weight', '(UA)D', UP),
        ],
        'layers.experts.down.weight': [There(f'{expert}.{down}.weight', 'DA')],
    }


def read_config(
    read: Reader,
    own: Callable[[Reader], Keys],
    *,
    count: int | None = None,
    active: int,
    **of_llama: Any,
) -> Keys:
    """Read the config.json of a family like Llama with experts.

    `count` and `active` are the family's default numbers of experts, per layer and per token. `own`
    also returns the keys of `experts` that differ from Mixtral's; if `count` is None, `own` must
    return that key too. If `own` returns no ffn_size, the experts' width is intermediate_size.
    `of_llama` has the defaults that `llama.read_config` takes.
    """
    # transformers adds its balance loss, computed over all layers together, only if it outputs the
    # router's logits.
    read.only('output_router_logits', False, default=False)
    read.get('router_aux_loss_coef', None)
    keys = llama.read_config(read, own, **of_llama)
    own_keys = keys.pop('experts', {})
    if 'ffn_size' not in own_keys:
        own_keys['ffn_size'] = keys.pop('ffn_size')
    if count is not None:
        own_keys['count'] = _read_count(read, count)
    keys['experts'] = {
        'active': read.take('num_experts_per_tok', 'experts.active', active),
        **own_keys,
    }
    return keys


def _read_count(read: Reader, default: int) -> int | None:
    name, other = COUNTS if COUNTS[0] in read.keys else COUNTS[::-1]
    count: int | None = read.take(name, 'experts.count', default)
    read.only(other, count, default=count)
    return count


def write_config(
    model: ModelConfig, count: str = 'num_experts', width: str = 'intermediate_size'
) -> Keys:
    """Return the keys of config.json that all families like Llama with experts have.

    `count` and `width` are the family's keys for the number and the width of the experts.
    """
    keys, experts = llama.write_config(model), model.experts
    if experts is None:
        return keys
    return {
        **keys,
        count: experts.count,
        'num_experts_per_tok': experts.active,
        width: experts.ffn_size,
        'output_router_logits': False,
    }


def _own(read: Reader) -> Keys:
    read.only('router_jitter_noise', 0, default=0)
    return {'window': read.take('sliding_window', 'model.window', None)}


def _write_config(model: ModelConfig) -> Keys:
    own = {'sliding_window': model.window, 'router_jitter_noise': 0.0}
    return write_config(model, 'num_local_experts') | own


FAMILIES = (
    llama.LIKE_LLAMA(
        name='mixtral',
        architecture='MixtralForCausalLM',
        read_config=partial(
            read_config,
            own=_own,
            count=8,
            active=2,
            norm_eps=1e-5,
            rope=partial(read_rope, theta=1e6),
        ),
        write_config=_write_config,
        tensors=tensors('block_sparse_moe', 'w1', 'w3', 'w2'),
    ),
)
