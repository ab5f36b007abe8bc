"""Tables of published training rates, and functions that read the lines of each."""

import csv
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from importlib import resources

from megajax.analysis.plan.layouts import changed
from megajax.analysis.plan.programs import FSDP, MEGAJAX
from megajax.analysis.plan.published.field import field
from megajax.analysis.plan.published.programs import (
    FSDP_2023,
    FSDP_IN_JAX_2024,
    MEGATRON_2022,
    MEGATRON_2024,
    MEGATRON_WITHOUT_OVERLAP,
)
from megajax.analysis.plan.published.rates import (
    PublishedRate,
    Values,
    config_of,
    llama_of,
    model_of,
    of_2021,
    of_model_flops,
    sharded,
    sizes_of,
    with_best_schedule,
    with_largest_microbatch,
)
from megajax.core.config import load
from megajax.core.config.overlap_rules import resolved
from megajax.core.hardware.records import hardware

BASELINE = 39.0  # TFLOP/s of one V100, of which the tables of 2019 give percentages
ROWS_2019 = 8  # sequences per model-parallel group


def rows(table: str) -> list[PublishedRate]:
    """Return the rows of a table whose layouts are supported.

    Of the tables until 2025 these are without context parallelism, and not in fp8.
    """
    file, read = TABLES[table]
    return list(read(csv.DictReader(_lines(file)[1:])))


def source(table: str) -> str:
    """Return the source of a table."""
    return _lines(TABLES[table][0])[0].removeprefix('# ')


def _lines(file: str) -> list[str]:
    return (
        (resources.files('megajax.analysis.plan.published') / 'papers' / f'{file}.csv')
        .read_text(encoding='utf-8')
        .splitlines()
    )


def _megatron_2019(lines: Iterator[Values]) -> Iterator[PublishedRate]:
    """Yield rows whose rates are relative to the 39 TFLOP/s of one GPU.

    The PyTorch of 2020 reached 72 TFLOP/s on the same GPU, so the 39 TFLOP/s are specific to the
    software of 2019.
    """
    one_gpu = {
        'params_b': '1.2',
        'hidden': '1536',
        'heads': '16',
        'layers': '40',
        'tensor_parallel': '1',
        'held_out': 'no',
    }
    baseline = of_2021(one_gpu, 'v100', BASELINE, ROWS_2019, 1, 1024)
    for values in lines:
        data = int(values['data_parallel'])
        row = of_2021(
            values, 'v100', BASELINE * float(values['percent']) / 100, ROWS_2019 * data, data, 1024
        )
        yield dataclasses.replace(row, baseline=baseline)


def _megatron_2020(lines: Iterator[Values]) -> Iterator[PublishedRate]:
    for values in lines:
        data = int(values['gpus']) // int(values['tensor_parallel'])
        row = of_2021(
            values, values['gpu'], float(values['tflops']), int(values['batch']), data, 1024
        )
        yield dataclasses.replace(
            row, config=with_largest_microbatch(row.config, hardware(row.gpu))
        )


def _narayanan(lines: Iterator[Values]) -> Iterator[PublishedRate]:
    for values in lines:
        row = of_2021(
            values,
            'a100',
            float(values['tflops']),
            int(values['batch']),
            int(values['data_parallel']),
            2048,
        )
        yield dataclasses.replace(
            row, config=with_largest_microbatch(row.config, hardware(row.gpu))
        )


def _narayanan_pipeline(lines: Iterator[Values]) -> Iterator[PublishedRate]:
    for values in lines:
        batch, data = int(values['batch']), int(values['data_parallel'])
        row = of_2021(values, 'a100', float(values['tflops']), batch, data, 2048)
        yield with_best_schedule(row, int(values['pipeline_parallel']))


def _korthikanti(lines: Iterator[Values]) -> Iterator[PublishedRate]:
    """Yield two rows for each model; in larger models, a stage has three chunks of layers."""
    for values in lines:
        model = model_of(values, vocab_size=51200, seq_len=2048, dropout=0.1)
        tensor, batch, rows = (
            int(values[name]) for name in ('tensor_parallel', 'batch', 'microbatch')
        )
        for recompute, column in (
            ('full', 'seconds_full'),
            ('selective', 'seconds_sequence_selective'),
        ):
            keys = {
                'dtype': 'float16',
                'recompute': recompute,
                'sequence_parallel': recompute == 'selective',
            }
            config = config_of(model, 1, tensor, batch=batch, rows=rows, **keys)
            if (stages := int(values['pipeline_parallel'])) > 1:
                config = changed(config, mesh__stages=stages, mesh__virtual_stages=3)
            name, seconds = f'{values["params_b"]}B {recompute}', float(values[column])
            yield of_model_flops(values, name, 'a100', config, MEGATRON_2022, seconds)


def _megatron_core(lines: Iterator[Values]) -> Iterator[PublishedRate]:
    """Yield rows with microbatches of one sequence, which fit for every config.

    The source gives neither the microbatch nor, for pipelines, the number of virtual stages.
    """
    for values in lines:
        model = model_of(values, vocab_size=131072, seq_len=4096, tie_embeddings=False)
        data, tensor = int(values['data_parallel']), int(values['tensor_parallel'])
        config = sharded(
            config_of(
                model,
                data,
                tensor,
                batch=int(values['batch']),
                rows=1,
                sequence_parallel=tensor > 1,
            )
        )
        name = f'{values["params_b"]}B'
        row = of_model_flops(values, name, 'h100', config, MEGATRON_2024, 1.0)
        row = dataclasses.replace(row, published=float(values['tflops']))
        stages = int(values['pipeline_parallel'])
        yield with_best_schedule(row, stages) if stages > 1 else row


def _llm_foundry(lines: Iterator[Values], *, gpu: str, peak: float) -> Iterator[PublishedRate]:
    for values in lines:
        rate = float(values['tflops'])
        # Otherwise the MFU is relative to the FP8 peak.
        is_bf16 = abs(rate / peak / (float(values['mfu_percent']) / 100) - 1) < 0.05
        if values['gpu'] != gpu or not is_bf16:
            continue
        length = int(values['seq_len'])
        model = model_of(values, vocab_size=50368, seq_len=length, bias=False)
        recompute = 'full' if values['checkpointing'] == 'True' else 'none'
        batch, rows = int(values['global_batch']), int(values['microbatch'])
        config = sharded(
            config_of(model, int(values['gpus']), 1, batch=batch, rows=rows, recompute=recompute)
        )
        program = FSDP_2023 if gpu == 'h100_80gb' else FSDP
        name = f'{values["model"]} x {length}'
        row = of_model_flops(values, name, gpu.removesuffix('_80gb'), config, program, 1.0)
        yield dataclasses.replace(row, published=rate)


def _nvidia(lines: Iterator[Values]) -> Iterator[PublishedRate]:
    for values in lines:
        if values['context_parallel'] != '1':
            continue
        tensor = int(values['tensor_parallel'])
        sizes = {'vocab_size': int(values['vocabulary']), 'seq_len': int(values['seq_len'])}
        if 'llama' in values['model']:
            model = llama_of(values, **sizes)
        else:
            model = model_of(values, **sizes, tie_embeddings=values['program'] == 'pax')
        data = int(values['gpus']) // tensor
        batch, rows = int(values['batch']), int(values['rows'])
        config = sharded(
            config_of(model, data, tensor, batch=batch, rows=rows, sequence_parallel=tensor > 1)
        )
        program = MEGATRON_2024 if values['program'] == 'megatron' else FSDP_IN_JAX_2024
        yield of_model_flops(
            values, values['model'], 'h100', config, program, float(values['seconds'])
        )


def _simumax(lines: Iterator[Values]) -> Iterator[PublishedRate]:
    for values in lines:
        model = llama_of(values, vocab_size=128256, seq_len=4096)
        tensor, microbatches = int(values['tensor_parallel']), int(values['microbatches'])
        data = int(values['gpus']) // tensor
        config = sharded(
            config_of(
                model, data, tensor, batch=data * microbatches, rows=1, sequence_parallel=True
            )
        )
        seconds = float(values['milliseconds']) / 1e3
        yield of_model_flops(
            values,
            f'{values["model"]} x {microbatches}',
            'b200',
            config,
            MEGATRON_WITHOUT_OVERLAP,
            seconds,
        )


def _megajax(lines: Iterator[Values]) -> Iterator[PublishedRate]:
    for values in lines:
        rows, microbatches = values['rows'], values['microbatches']
        overrides = (
            *('mesh.data=1', 'mesh.model=1', 'optim.shard=none'),
            *(f'model.{key}={size}' for key, size in sizes_of(values).items()),
            'model.dropout=0',
            *(f'train.batch_size={rows}', f'train.microbatches={microbatches}'),
            *('train.dtype=bfloat16', 'train.recompute=none'),
        )
        config = resolved(load(values['preset'], overrides), on_gpu=True)
        name = f'{values["preset"]} of {values["layers"]} layers, {rows} rows in {microbatches}'
        seconds = float(values['milliseconds']) / 1e3
        yield of_model_flops(values, name, 'h200', config, MEGAJAX, seconds)


TABLES: dict[str, tuple[str, Callable[..., Iterator[PublishedRate]]]] = {
    'scaling': ('megatron_2019_scaling', _megatron_2019),
    'heads': ('megatron_2019_heads', _megatron_2019),
    'strong': ('megatron_2019_strong', _megatron_2019),
    'megatron': ('megatron_2020', _megatron_2020),
    'narayanan-pipeline': ('narayanan_2021_pipeline', _narayanan_pipeline),
    'narayanan': ('narayanan_2021_table1', _narayanan),
    'korthikanti': ('korthikanti_2022', _korthikanti),
    'foundry-a100': ('llm_foundry', partial(_llm_foundry, gpu='a100_80gb', peak=312.0)),
    'foundry-a100-40': ('llm_foundry', partial(_llm_foundry, gpu='a100_40gb', peak=312.0)),
    'foundry-h100': ('llm_foundry', partial(_llm_foundry, gpu='h100_80gb', peak=989.4)),
    'nvidia': ('nvidia_dgxc_h100', _nvidia),
    'simumax': ('simumax_b200', _simumax),
    'core': ('megatron_core_h100', _megatron_core),
    'megajax': ('megajax_h200', _megajax),
    'field': ('field_2026', field),
}
OF_2026 = 'simumax', 'megajax', 'field'  # the tables that were published, or measured, in 2026
