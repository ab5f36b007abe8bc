"""Throughputs that were published in 2025 and 2026, with their configs and programs.

The comparison uses the sources' tokens/s per GPU, because the sources count TFLOP/s differently.
"""

import dataclasses
import re
from collections.abc import Iterator

from megajax.analysis.plan.layouts import changed
from megajax.analysis.plan.programs import FSDP, FSDP_IN_JAX, MEGATRON, TORCHTITAN, Software
from megajax.analysis.plan.published.programs import MEGATRON_FSDP, TORCHTITAN_ASYNC
from megajax.analysis.plan.published.rates import (
    PublishedRate,
    Values,
    config_of,
    llama_of,
    of_model_flops,
)
from megajax.core.config.lora import LoraConfig

# Dense models by the beginning of their name: layers, hidden size, heads, key/value heads, FFN size
# and vocabulary.
ARCHITECTURES = {
    'Llama2 7B (MaxText)': (32, 4096, 32, 32, 11008, 32000),
    'Llama3.1 8B': (32, 4096, 32, 8, 14336, 128256),
    'Llama3 8B': (32, 4096, 32, 8, 14336, 128256),
    'LLAMA3_8B': (32, 4096, 32, 8, 14336, 128256),
    'Llama3.1 70B': (80, 8192, 64, 8, 28672, 128256),
    'Llama3 70B': (80, 8192, 64, 8, 28672, 128256),
    'LLAMA3_70B': (80, 8192, 64, 8, 28672, 128256),
    'Llama3.1 405B': (126, 16384, 128, 8, 53248, 128256),
    'LLAMA3.1_405B': (126, 16384, 128, 8, 53248, 128256),
    'Qwen2.5 7B': (28, 3584, 28, 4, 18944, 152064),
    'Qwen2.5 32B': (64, 5120, 40, 8, 27648, 152064),
    'Qwen3 8B': (36, 4096, 32, 8, 12288, 151936),
}
SIZES = 'layers', 'hidden', 'heads', 'kv_heads', 'ffn'
GPUS = {
    'H100': 'h100',
    'H100 (500 W HBM2e)': 'h100_96gb',
    'B200': 'b200',
    'GB200': 'gb200',
    'GB300': 'gb300',
}
CURRENT, BLOCKS = ('FP8', 'FP8-CS', 'FP8-CS (FP8-MX)'), ('MXFP8', 'FP8-MX')
DTYPES = {'BF16': 'bfloat16', **dict.fromkeys((*CURRENT, *BLOCKS), 'fp8')}
NEEDED = 'gpus', 'tp', 'pp', 'cp', 'seq', 'gbs', 'mbs', 'tok_per_s_per_gpu'
RANK = 16  # rank of adapters, which has little effect on the step time


def field(lines: Iterator[Values]) -> Iterator[PublishedRate]:
    """Yield the rows of dense models with a complete layout."""
    for values in lines:
        if is_complete(values):
            yield _row(values)


def is_complete(values: Values) -> bool:
    """Return whether a row is complete, and megajax supports its model and dtype."""
    return (
        _architecture(values) is not None
        and values['gpu'] in GPUS
        and values['dtype'] in DTYPES
        and all(values[name] for name in NEEDED)
        and (values['pp'] == '1' or bool(values['vp']))
    )


def program_of(values: Values) -> Software:
    """Return the program of a row, judged by its source."""
    source, is_fsdp = values['source'], values['dp_or_fsdp'].startswith('fsdp')
    if 'JAX-Toolbox' in source:
        return FSDP_IN_JAX
    if 'torchtitan' in source:
        return TORCHTITAN_ASYNC if 'async TP' in values['model'] else TORCHTITAN
    if 'Automodel' in source:
        return FSDP if values['gpus'] == '1' else TORCHTITAN_ASYNC
    return MEGATRON_FSDP if is_fsdp else MEGATRON


def _architecture(values: Values) -> tuple[int, ...] | None:
    names = (name for name in ARCHITECTURES if values['model'].startswith(name))
    return next((ARCHITECTURES[name] for name in names), None)


def _row(values: Values) -> PublishedRate:
    *sizes, vocabulary = _architecture(values) or ()
    model = llama_of(
        dict(zip(SIZES, map(str, sizes), strict=True)),
        vocab_size=vocabulary,
        seq_len=int(values['seq']),
    )
    gpus, tp, pp, cp, batch, rows = (
        int(values[name]) for name in ('gpus', 'tp', 'pp', 'cp', 'gbs', 'mbs')
    )
    data, program = gpus // (tp * pp * cp), program_of(values)
    if values['dtype'] in BLOCKS:  # which are not gathered after rounding
        program = dataclasses.replace(program, rounding='blocks', rounds_shards=False)
    if 'torchtitan' in values['source'] and pp > 1:
        rows //= pp  # `mbs` is the local batch, and a pipeline has as many microbatches as stages
    config = config_of(model, data, tp, batch=batch, rows=rows, sequence_parallel=tp > 1)
    config = changed(
        config,
        mesh__stages=pp,
        mesh__virtual_stages=int(values['vp'] or 1),
        mesh__context=cp,
        mesh__context_exchange='ring' if cp > 1 else 'gather',
        train__dtype=DTYPES[values['dtype']],
        train__fp8_scaling='current' if DTYPES[values['dtype']] == 'fp8' else 'delayed',
        train__recompute=_recompute(values),
        optim__shard='optimizer' if 'none' in program.zero else 'weights',
    )
    if values['kind'] == 'LoRA':
        config = config.model_copy(update={'lora': LoraConfig(rank=RANK)})
    rate = float(re.split(r'[ (]', values['tok_per_s_per_gpu'])[0])
    name = f'{values["model"]} {values["dtype"]} {values["kind"]}'
    gpu, seconds = _gpu(values), batch * int(values['seq']) / (rate * gpus)
    row = of_model_flops(values, name, gpu, config, program, seconds)
    return dataclasses.replace(row, held_out=values['held_out'] == 'yes')


def _gpu(values: Values) -> str:
    """Return the GPU; torchtitan's H100s have 500 W and HBM2e, whether or not the row says so."""
    is_grand_teton = 'torchtitan' in values['source'] and values['gpu'].startswith('H100')
    return 'h100_96gb' if is_grand_teton else GPUS[values['gpu']]


def _recompute(values: Values) -> str:
    """Return the activation recomputation of a row, which the sources give in their configs."""
    if 'torchtitan' in values['source']:
        return 'selective' if '8B' in values['model'] else 'full'
    # Automodel's recipes for several GPUs recompute, compile, and overlap tensor parallelism.
    return 'full' if 'Automodel' in values['source'] and values['gpus'] != '1' else 'none'
