"""The papers' tables, as published and as predicted, and the efficiencies of a GPU fitted on half of their rows."""

import csv
import dataclasses
from importlib import resources
from math import log

from megajax.config import Config, MeshConfig, ModelConfig, TrainConfig
from megajax.config.flops import narayanan_flops
from megajax.config.hardware import Efficiency, Hardware, hardware
from megajax.plan.memory import largest_microbatch
from megajax.plan.network import Cluster
from megajax.plan.time import MEGATRON, StepTime, step_time

TABLES = {
    'scaling': ('megatron_2019_scaling', 'v100'),
    'narayanan': ('narayanan_2021_table1', 'a100'),
    'heads': ('megatron_2019_heads', 'v100'),
    'strong': ('megatron_2019_strong', 'v100'),
}
BASELINE = 39.0  # TFLOP/s of one V100, of which the tables of 2019 give percentages
ROWS_2019 = 8  # sequences of each model-parallel group
VOCABULARY = 51200


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a paper: what was run, the TFLOP/s of a GPU that were published, and whether the efficiencies were fitted on it."""

    params_b: float
    config: Config
    published: float
    fitted: bool

    @property
    def num_gpus(self) -> int:
        """Of the whole run."""
        return self.config.mesh.data * self.config.mesh.model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """A row, and what the model of time says of it."""

    row: Row
    time: StepTime
    tflops: float

    @property
    def error(self) -> float:
        """Of the predicted over the published."""
        return self.tflops / self.row.published - 1


def rows(table: str) -> list[Row]:
    """The rows of a table without pipeline parallelism."""
    name, gpu = TABLES[table]
    lines = (resources.files('megajax') / 'plan' / 'papers' / f'{name}.csv').read_text(encoding='utf-8').splitlines()
    return [_row(values, hardware(gpu)) for values in csv.DictReader(line for line in lines if not line.startswith('#'))]


def source(table: str) -> str:
    """Where a table is from."""
    text = (resources.files('megajax') / 'plan' / 'papers' / f'{TABLES[table][0]}.csv').read_text(encoding='utf-8')
    return text.splitlines()[0].removeprefix('# ')


def predict(table: str, efficiency: Efficiency | None = None) -> list[Prediction]:
    """Every row of a table, with the efficiencies of its GPU unless others are given."""
    gpu = hardware(TABLES[table][1])
    if efficiency:
        gpu = gpu.model_copy(update={'efficiency': efficiency})
    return [_predict(row, gpu) for row in rows(table)]


def fit(table: str, *, on_fitted: bool = True) -> Efficiency:
    """The `matmul` and `half_size` of least squared logarithmic error on the rows that are marked, or on the others.

    The share of the memory's bandwidth stays as the hardware's file has it: a few rows cannot tell it from the others.
    """
    gpu = hardware(TABLES[table][1])
    chosen = [row for row in rows(table) if row.fitted == on_fitted]

    def loss(efficiency: Efficiency) -> float:
        with_it = gpu.model_copy(update={'efficiency': efficiency})
        return sum(log(_predict(row, with_it).tflops / row.published) ** 2 for row in chosen)

    grid = (
        gpu.efficiency.model_copy(update={'matmul': percent / 100, 'half_size': float(half_size)})
        for percent in range(20, 101)
        for half_size in range(0, 257, 32)
    )
    return min(grid, key=loss)


def _row(values: dict[str, str], gpu: Hardware) -> Row:
    model = ModelConfig(
        num_layers=int(values['layers']),
        hidden_size=int(values['hidden']),
        num_heads=int(values['heads']),
        vocab_size=VOCABULARY,
        max_seq_len=2048 if 'batch' in values else 1024,
        dropout=0.1,
    )
    mesh = MeshConfig(data=int(values['data_parallel']), model=int(values['tensor_parallel']))
    batch = int(values.get('batch') or ROWS_2019 * mesh.data)
    train = TrainConfig(batch_size=batch, seq_len=model.max_seq_len, dtype='float16', recompute='full')
    config = Config(model=model, mesh=mesh, train=train)
    if 'batch' in values:
        config = _with_largest_microbatch(config, gpu)
    published = float(values['tflops']) if 'tflops' in values else BASELINE * float(values['percent']) / 100
    return Row(params_b=float(values['params_b']), config=config, published=published, fitted=values['fitted'] == 'yes')


def _with_largest_microbatch(config: Config, gpu: Hardware) -> Config:
    """Narayanan et al. do not give the microbatch of these rows: the largest that fits and divides the batch."""
    limit = largest_microbatch(config, gpu.memory)
    each = config.train.batch_size // config.mesh.data
    microbatches = next(count for count in range(1, each + 1) if each % count == 0 and each // count <= limit)
    return config.model_copy(update={'train': config.train.model_copy(update={'microbatches': microbatches})})


def _predict(row: Row, gpu: Hardware) -> Prediction:
    config = row.config
    time = step_time(config, Cluster.of(gpu, row.num_gpus), MEGATRON)
    flops = narayanan_flops(config.model, batch_size=config.train.batch_size, seq_len=config.train.seq_len, recompute=True)
    return Prediction(row=row, time=time, tflops=flops / time.total / row.num_gpus / 1e12)
