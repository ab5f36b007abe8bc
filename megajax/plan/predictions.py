"""Published rates of training, and the predictions of them.

A GPU's efficiencies are fitted on the rates that are not held out.
"""

import csv
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import resources

from megajax.config import Config, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from megajax.counts.flops import narayanan_flops, step_flops
from megajax.hardware.records import Hardware, hardware
from megajax.plan.memory import largest_microbatch
from megajax.plan.network import Cluster
from megajax.plan.programs import (
    FSDP,
    FSDP_IN_JAX,
    MEGATRON,
    MEGATRON_2021,
    MEGATRON_WITHOUT_OVERLAP,
    Program,
)
from megajax.plan.time import StepTime, step_time

BASELINE = 39.0  # TFLOP/s of one V100, of which the tables of 2019 give percentages
ROWS_2019 = 8  # sequences per model-parallel group
Values = Mapping[str, str]  # the values of a line, by column


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One published rate: the config, program and GPU, and the TFLOP/s per GPU."""

    name: str
    gpu: str
    config: Config
    program: Program
    published: float  # TFLOP/s per GPU, as the source counts them
    flops: int  # FLOPs of a step, as the source counts them
    held_out: bool
    # The row that the source gives rates relative to; then only the relative rate is predicted.
    baseline: 'Row | None' = None

    @property
    def num_gpus(self) -> int:
        """The number of GPUs of the run."""
        return self.config.mesh.data * self.config.mesh.model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """A row and its predicted time."""

    row: Row
    time: StepTime
    baseline: 'Prediction | None'

    @property
    def tflops(self) -> float:
        """The predicted TFLOP/s per GPU, as the source counts them."""
        rate = self.row.flops / self.time.total / self.row.num_gpus / 1e12
        return rate * self.baseline.row.published / self.baseline.tflops if self.baseline else rate

    @property
    def error(self) -> float:
        """The relative error of the predicted rate against the published."""
        return self.tflops / self.row.published - 1


def rows(table: str) -> list[Row]:
    """Return the rows of a table whose layouts are supported.

    These are without pipeline or context parallelism, and not in fp8.
    """
    file, read = TABLES[table]
    return list(read(csv.DictReader(_lines(file)[1:])))


def source(table: str) -> str:
    """Return the source of a table."""
    return _lines(TABLES[table][0])[0].removeprefix('# ')


def predict(table: str, gpus: Mapping[str, Hardware] = {}) -> list[Prediction]:
    """Return the prediction of every row of a table.

    `gpus` has records of GPUs that replace the stored ones.
    """
    return [predicted(row, gpus.get(row.gpu) or hardware(row.gpu)) for row in rows(table)]


def predicted(row: Row, gpu: Hardware) -> Prediction:
    """Return the prediction of a row on GPUs of the record `gpu`."""
    time = step_time(row.config, Cluster.of(gpu, row.num_gpus), row.program)
    return Prediction(
        row=row, time=time, baseline=predicted(row.baseline, gpu) if row.baseline else None
    )


def rows_to_fit(gpu: str) -> list[Row]:
    """Return the rows of all tables with this GPU that are not held out."""
    return [row for table in TABLES for row in rows(table) if row.gpu == gpu and not row.held_out]


def _lines(file: str) -> list[str]:
    return (
        (resources.files('megajax') / 'plan' / 'papers' / f'{file}.csv')
        .read_text(encoding='utf-8')
        .splitlines()
    )


def _model(values: Values, *, vocab_size: int, seq_len: int, **keys: object) -> ModelConfig:
    return ModelConfig.model_validate(
        {
            'num_layers': int(values['layers']),
            'hidden_size': int(values['hidden']),
            'num_heads': int(values['heads']),
            'vocab_size': vocab_size,
            'max_seq_len': seq_len,
            'dropout': 0.0,
            **keys,
        }
    )


def _llama(values: Values, *, vocab_size: int, seq_len: int) -> ModelConfig:
    return _model(
        values,
        vocab_size=vocab_size,
        seq_len=seq_len,
        num_kv_heads=int(values['kv_heads']),
        ffn_size=int(values['ffn']),
        activation='swiglu',
        norm='rmsnorm',
        position='rope',
        bias=False,
        tie_embeddings=False,
    )


def _config(
    model: ModelConfig,
    data: int,
    tensor: int,
    *,
    batch: int,
    rows: int | None = None,
    **keys: object,
) -> Config:
    """Return a config on a mesh, with microbatches of `rows` rows, else one microbatch."""
    microbatches = batch // data // rows if rows else 1
    mesh = MeshConfig(
        data=data, model=tensor, sequence_parallel=bool(keys.pop('sequence_parallel', False))
    )
    train = {
        'batch_size': batch,
        'seq_len': model.max_seq_len,
        'microbatches': microbatches,
        **keys,
    }
    return Config(model=model, mesh=mesh, train=TrainConfig.model_validate(train))


def _sharded(config: Config) -> Config:
    """Return the config with the optimizer's state sharded over `data`, padded if necessary."""
    return config.model_copy(update={'optim': OptimConfig(shard=True)})


def _of_2021(
    values: Values, gpu: str, published: float, batch: int, data: int, seq_len: int
) -> Row:
    """Return a row as the papers until 2021 ran it: in fp16, with dropout and full recomputation.

    The papers count the FLOPs of recomputation.
    """
    model = _model(values, vocab_size=51200, seq_len=seq_len, dropout=0.1)
    config = _config(
        model, data, int(values['tensor_parallel']), batch=batch, dtype='float16', recompute='full'
    )
    return Row(
        name=f'{values["params_b"]}B',
        gpu=gpu,
        config=config,
        program=MEGATRON_2021,
        published=published,
        flops=narayanan_flops(model, batch_size=batch, seq_len=seq_len, recompute=True),
        held_out=values['held_out'] == 'yes',
    )


def _megatron_2019(lines: Iterator[Values]) -> Iterator[Row]:
    """Yield rows with rates relative to one GPU's 39 TFLOP/s.

    The PyTorch of 2020 reached 72 TFLOP/s on the same GPU, so this rate belongs to its time.
    """
    one_gpu = {
        'params_b': '1.2',
        'hidden': '1536',
        'heads': '16',
        'layers': '40',
        'tensor_parallel': '1',
        'held_out': 'no',
    }
    baseline = _of_2021(one_gpu, 'v100', BASELINE, ROWS_2019, 1, 1024)
    for values in lines:
        data = int(values['data_parallel'])
        row = _of_2021(
            values, 'v100', BASELINE * float(values['percent']) / 100, ROWS_2019 * data, data, 1024
        )
        yield dataclasses.replace(row, baseline=baseline)


def _megatron_2020(lines: Iterator[Values]) -> Iterator[Row]:
    for values in lines:
        data = int(values['gpus']) // int(values['tensor_parallel'])
        row = _of_2021(
            values, values['gpu'], float(values['tflops']), int(values['batch']), data, 1024
        )
        yield dataclasses.replace(
            row, config=_with_largest_microbatch(row.config, hardware(row.gpu))
        )


def _narayanan(lines: Iterator[Values]) -> Iterator[Row]:
    for values in lines:
        row = _of_2021(
            values,
            'a100',
            float(values['tflops']),
            int(values['batch']),
            int(values['data_parallel']),
            2048,
        )
        yield dataclasses.replace(
            row, config=_with_largest_microbatch(row.config, hardware(row.gpu))
        )


def _with_largest_microbatch(config: Config, gpu: Hardware) -> Config:
    """Return the config with the largest microbatch that fits and divides the batch.

    It is for sources that do not give the microbatch.
    """
    limit = largest_microbatch(config, gpu.memory)
    each = config.train.batch_size // config.mesh.data
    microbatches = next(
        count for count in range(1, each + 1) if each % count == 0 and each // count <= limit
    )
    return config.model_copy(
        update={'train': config.train.model_copy(update={'microbatches': microbatches})}
    )


def _korthikanti(lines: Iterator[Values]) -> Iterator[Row]:
    for values in lines:
        if values['pipeline_parallel'] != '1':
            continue
        model = _model(values, vocab_size=51200, seq_len=2048, dropout=0.1)
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
            config = _config(model, 1, tensor, batch=batch, rows=rows, **keys)
            name, seconds = f'{values["params_b"]}B {recompute}', float(values[column])
            yield _of_model_flops(values, name, 'a100', config, MEGATRON_2021, seconds)


def _megatron_core(lines: Iterator[Values]) -> Iterator[Row]:
    """Yield rows with microbatches of one row, which fit for every config.

    The source does not give the microbatch.
    """
    for values in lines:
        if values['pipeline_parallel'] != '1':
            continue
        model = _model(values, vocab_size=131072, seq_len=4096, tie_embeddings=False)
        data, tensor = int(values['data_parallel']), int(values['tensor_parallel'])
        config = _sharded(
            _config(
                model,
                data,
                tensor,
                batch=int(values['batch']),
                rows=1,
                sequence_parallel=tensor > 1,
            )
        )
        row = _of_model_flops(values, f'{values["params_b"]}B', 'h100', config, MEGATRON, 1.0)
        yield dataclasses.replace(row, published=float(values['tflops']))


def _llm_foundry(lines: Iterator[Values], *, gpu: str, peak: float) -> Iterator[Row]:
    for values in lines:
        rate = float(values['tflops'])
        # Otherwise the MFU is relative to the peak of fp8.
        is_bf16 = abs(rate / peak / (float(values['mfu_percent']) / 100) - 1) < 0.05
        if values['gpu'] != gpu or not is_bf16:
            continue
        length = int(values['seq_len'])
        model = _model(values, vocab_size=50368, seq_len=length, bias=False)
        recompute = 'full' if values['checkpointing'] == 'True' else 'none'
        batch, rows = int(values['global_batch']), int(values['microbatch'])
        config = _sharded(
            _config(model, int(values['gpus']), 1, batch=batch, rows=rows, recompute=recompute)
        )
        row = _of_model_flops(
            values, f'{values["model"]} x {length}', gpu.removesuffix('_80gb'), config, FSDP, 1.0
        )
        yield dataclasses.replace(row, published=rate)


def _nvidia(lines: Iterator[Values]) -> Iterator[Row]:
    for values in lines:
        if values['context_parallel'] != '1':
            continue
        tensor = int(values['tensor_parallel'])
        sizes = {'vocab_size': int(values['vocabulary']), 'seq_len': int(values['seq_len'])}
        if 'llama' in values['model']:
            model = _llama(values, **sizes)
        else:
            heads, ffn = int(values['kv_heads']), int(values['ffn'])
            model = _model(
                values,
                **sizes,
                num_kv_heads=heads,
                ffn_size=ffn,
                tie_embeddings=values['program'] == 'pax',
            )
        data = int(values['gpus']) // tensor
        batch, rows = int(values['batch']), int(values['rows'])
        config = _sharded(
            _config(model, data, tensor, batch=batch, rows=rows, sequence_parallel=tensor > 1)
        )
        program = MEGATRON if values['program'] == 'megatron' else FSDP_IN_JAX
        yield _of_model_flops(
            values, values['model'], 'h100', config, program, float(values['seconds'])
        )


def _simumax(lines: Iterator[Values]) -> Iterator[Row]:
    for values in lines:
        model = _llama(values, vocab_size=128256, seq_len=4096)
        tensor, microbatches = int(values['tensor_parallel']), int(values['microbatches'])
        data = int(values['gpus']) // tensor
        config = _sharded(
            _config(model, data, tensor, batch=data * microbatches, rows=1, sequence_parallel=True)
        )
        seconds = float(values['milliseconds']) / 1e3
        yield _of_model_flops(
            values,
            f'{values["model"]} x {microbatches}',
            'b200',
            config,
            MEGATRON_WITHOUT_OVERLAP,
            seconds,
        )


def _of_model_flops(
    values: Values, name: str, gpu: str, config: Config, program: Program, seconds: float
) -> Row:
    flops = step_flops(config).model
    return Row(
        name=name,
        gpu=gpu,
        config=config,
        program=program,
        published=flops / seconds / config.mesh.data / config.mesh.model / 1e12,
        flops=flops,
        held_out=values['held_out'] == 'yes',
    )


TABLES: dict[str, tuple[str, Callable[..., Iterator[Row]]]] = {
    'scaling': ('megatron_2019_scaling', _megatron_2019),
    'heads': ('megatron_2019_heads', _megatron_2019),
    'strong': ('megatron_2019_strong', _megatron_2019),
    'megatron': ('megatron_2020', _megatron_2020),
    'narayanan': ('narayanan_2021_table1', _narayanan),
    'korthikanti': ('korthikanti_2022', _korthikanti),
    'foundry-a100': ('llm_foundry', partial(_llm_foundry, gpu='a100_80gb', peak=312.0)),
    'foundry-a100-40': ('llm_foundry', partial(_llm_foundry, gpu='a100_40gb', peak=312.0)),
    'foundry-h100': ('llm_foundry', partial(_llm_foundry, gpu='h100_80gb', peak=989.4)),
    'nvidia': ('nvidia_dgxc_h100', _nvidia),
    'simumax': ('simumax_b200', _simumax),
    'core': ('megatron_core_h100', _megatron_core),
}
