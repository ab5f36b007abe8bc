"""Published training rates, with the configs and programs that they belong to."""

import dataclasses
from collections.abc import Iterator, Mapping
from itertools import product

from megajax.analysis.plan.layouts import changed
from megajax.analysis.plan.megatron_memory import megatron_memory
from megajax.analysis.plan.memory import largest_microbatch
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.programs import Software
from megajax.analysis.plan.published.programs import MEGATRON_2021
from megajax.analysis.plan.time import Timer
from megajax.core.config import Config, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from megajax.core.config.divisors import divisors
from megajax.core.config.rules import incompatibilities
from megajax.core.counts.flops import narayanan_flops, step_flops
from megajax.core.counts.runs import layers_of_chunk
from megajax.core.hardware.records import Hardware, hardware

Values = Mapping[str, str]  # the values of a line, by column
COLUMNS = {
    'layers': 'num_layers',
    'hidden': 'hidden_size',
    'heads': 'num_heads',
    'kv_heads': 'num_kv_heads',
    'ffn': 'ffn_size',
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedRate:
    """One published rate: the config, program and GPU, and the TFLOP/s per GPU."""

    name: str
    gpu: str
    config: Config
    program: Software
    published: float  # TFLOP/s per GPU, as the source counts them
    flops: int  # FLOPs of a step, as the source counts them
    held_out: bool
    # If the source gives rates relative to one row: that row. Only the relative rate is then
    # predicted.
    baseline: 'PublishedRate | None' = None

    @property
    def num_gpus(self) -> int:
        """The number of GPUs of the run."""
        return self.config.mesh.num_devices


def of_2021(
    values: Values, gpu: str, published: float, batch: int, data: int, seq_len: int
) -> PublishedRate:
    """Return a row as run in papers up to 2021: in fp16, with dropout and full recomputation.

    The papers count the FLOPs of recomputation.
    """
    model = model_of(values, vocab_size=51200, seq_len=seq_len, dropout=0.1)
    config = config_of(
        model, data, int(values['tensor_parallel']), batch=batch, dtype='float16', recompute='full'
    )
    return PublishedRate(
        name=f'{values["params_b"]}B',
        gpu=gpu,
        config=config,
        program=MEGATRON_2021,
        published=published,
        flops=narayanan_flops(model, batch_size=batch, seq_len=seq_len, recompute=True),
        held_out=values['held_out'] == 'yes',
    )


def of_model_flops(
    values: Values, name: str, gpu: str, config: Config, program: Software, seconds: float
) -> PublishedRate:
    """Return a row whose FLOPs are the model's only, from the seconds of a step."""
    flops = step_flops(config).model
    return PublishedRate(
        name=name,
        gpu=gpu,
        config=config,
        program=program,
        published=flops / seconds / config.mesh.num_devices / 1e12,
        flops=flops,
        held_out=values['held_out'] == 'yes',
    )


def sizes_of(values: Values) -> dict[str, int]:
    """Return the layer sizes that a line lists, under their keys in `model`."""
    return {key: int(values[column]) for column, key in COLUMNS.items() if column in values}


def model_of(values: Values, *, vocab_size: int, seq_len: int, **keys: object) -> ModelConfig:
    """Return the model of a line, without dropout unless `keys` have it."""
    return ModelConfig.model_validate(
        {
            **sizes_of(values),
            'vocab_size': vocab_size,
            'max_seq_len': seq_len,
            'dropout': 0.0,
            **keys,
        }
    )


def llama_of(values: Values, *, vocab_size: int, seq_len: int) -> ModelConfig:
    """Return the model of a line with the architecture of Llama."""
    return model_of(
        values,
        vocab_size=vocab_size,
        seq_len=seq_len,
        activation='swiglu',
        norm='rmsnorm',
        position='rope',
        bias=False,
        tie_embeddings=False,
    )


def config_of(
    model: ModelConfig,
    data: int,
    tensor: int,
    *,
    batch: int,
    rows: int | None = None,
    **keys: object,
) -> Config:
    """Return a config on a mesh, with microbatches of `rows` sequences, or one microbatch."""
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


def sharded(config: Config) -> Config:
    """Return the config with the optimizer's state sharded over `data`, padded if necessary."""
    return config.model_copy(update={'optim': OptimConfig(shard='optimizer')})


def with_largest_microbatch(config: Config, gpu: Hardware) -> Config:
    """Return the config with the largest microbatch that fits and divides the batch.

    Use it for sources that do not give the microbatch.
    """
    limit = largest_microbatch(config, gpu.memory, gpu.compute_capability)
    each = config.train.batch_size // config.mesh.data
    microbatches = next(
        count for count in range(1, each + 1) if each % count == 0 and each // count <= limit
    )
    return changed(config, train__microbatches=microbatches)


def with_best_schedule(row: PublishedRate, stages: int) -> PublishedRate:
    """Return the row with `stages` and the plan's choice of microbatch and virtual stages.

    Use it for sources that do not give these. A microbatch has one, two or four sequences.
    """
    cluster = Cluster.of(hardware(row.gpu), stages * row.num_gpus)
    timer = Timer(cluster, row.program)
    each = row.config.train.batch_size // row.config.mesh.data
    flash = row.program.uses_flash(row.config, cluster.hardware.compute_capability)

    def possible() -> Iterator[Config]:
        on_stages = changed(row.config, mesh__stages=stages)
        for rows, chunks in product((1, 2, 4), divisors(layers_of_chunk(on_stages))):
            config = changed(
                on_stages,
                mesh__virtual_stages=chunks,
                train__microbatches=max(1, each // rows),
            )
            needed = megatron_memory(config, flash=flash)
            fits = needed <= cluster.hardware.memory
            if each % rows == 0 and fits and not incompatibilities(config):
                yield config

    fastest = min(possible(), key=lambda config: timer.step(config).total)
    return dataclasses.replace(row, config=fastest)
