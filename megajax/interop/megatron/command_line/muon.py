"""Muon in Megatron-LM's arguments, from megatron-core 0.15 to 0.19. Imports no jax."""

from collections.abc import Iterator, Mapping
from typing import Any

from megajax.interop.megatron.command_line.experts import Only

KINDS = 'muon', 'dist_muon'  # values of --optimizer; the second is a distributed optimizer
# The names of coefficients in emerging_optimizers, with the names in `optim.ns_coefficients`.
COEFFICIENTS = {'simple': 'quintic', 'quintic': 'dion', 'polar_express': 'polar_express'}
DEFAULTS: Mapping[str, Any] = {
    'muon_momentum': 0.9,
    'muon_split_qkv': True,
    'muon_nesterov': False,
    'muon_scale_mode': 'spectral',
    'muon_fp32_matmul_prec': 'medium',
    'muon_coefficient_type': 'quintic',
    'muon_num_ns_steps': 5,
    'muon_tp_mode': 'blockwise',
    'muon_extra_scale_factor': 1.0,
    'muon_scalar_optimizer': 'adam',
}
ONLY: Mapping[str, Only] = {
    'muon_split_qkv': Only((True,), 'query, key and value are separate matrices: leave it out'),
    'muon_scale_mode': Only(('spectral',), 'give spectral'),
    'muon_fp32_matmul_prec': Only(('medium',), 'iterations compute in bf16: give medium'),
    'muon_coefficient_type': Only(tuple(COEFFICIENTS), f'give {", ".join(COEFFICIENTS)}'),
    'muon_extra_scale_factor': Only(
        (0.2,), 'updates are multiplied by 0.2 sqrt(max(m, n)): give 0.2, and scale --lr'
    ),
    'muon_scalar_optimizer': Only(('adam',), 'give adam'),
}
WHOLE = Only(
    ('duplicated', 'distributed'), 'each matrix is orthogonalized as a whole: give duplicated'
)


def unsupported(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield the name, the value and an alternative for each unsupported argument of Muon.

    An absent argument has Megatron-LM's default as its value.
    """
    if arguments.get('optimizer') not in KINDS:
        return
    is_sharded = (arguments.get('tensor_model_parallel_size') or 1) > 1
    for name, only in {**ONLY, **({'muon_tp_mode': WHOLE} if is_sharded else {})}.items():
        value = arguments.get(name, DEFAULTS[name])
        if value not in only.allowed:
            yield name, value, only.instead


def muon_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of `optim` that select and configure Muon; none for other optimizers."""
    if arguments.get('optimizer') not in KINDS:
        return {}

    def get(name: str) -> Any:
        return arguments.get(name, DEFAULTS[name])

    return {
        'kind': 'muon',
        'momentum': get('muon_momentum'),
        'nesterov': get('muon_nesterov'),
        'ns_steps': get('muon_num_ns_steps'),
        'ns_coefficients': COEFFICIENTS[get('muon_coefficient_type')],
    }


def differences(arguments: Mapping[str, Any], *, is_bert: bool) -> Iterator[str]:
    """Yield a sentence for each way in which Megatron-LM's Muon differs for this model."""
    if arguments.get('swiglu'):
        yield 'Gate and up are separate matrices in megajax, but one matrix in Megatron-LM.'
    others = {
        'position embeddings': arguments.get('position_embedding_type') != 'rope',
        'routers': arguments.get('num_experts'),
        "BERT's heads and types of tokens": is_bert,
    }
    if names := [name for name, is_there in others.items() if is_there]:
        yield f'AdamW updates {" and ".join(names)} here, and Muon in Megatron-LM.'
    if arguments.get('muon_nesterov'):
        yield (
            "Nesterov's momentum is corrected for its start at zero here, which weighs the newest "
            'gradient more in about the first 20 steps.'
        )
