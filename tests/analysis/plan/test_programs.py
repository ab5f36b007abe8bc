"""Steps of other software: no rule of megajax applies to them."""

import pytest
from typer.testing import CliRunner

from megajax.analysis.plan.layouts import changed
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.planning import plan
from megajax.analysis.plan.programs import FSDP_IN_JAX, MEGATRON, TORCHTITAN
from megajax.analysis.plan.published.programs import TORCHTITAN_ASYNC
from megajax.analysis.plan.search import memory_on, search
from megajax.analysis.plan.time import step_time
from megajax.analysis.plan.verdicts import on_sharding
from megajax.commands.main import app
from megajax.core.config import Config, ConfigError, load
from megajax.core.hardware.records import hardware

IN_CHUNKS = (
    *('model.num_layers=14', 'mesh.model=1', 'mesh.data=1', 'mesh.stages=4'),
    *('mesh.virtual_stages=2', 'train.batch_size=16', 'train.microbatches=16'),
    *('train.dtype=bfloat16', 'train.recompute=none', 'optim.shard=none'),
)


def in_chunks(layers: int) -> Config:
    """A pipeline of 8 chunks."""
    return load('llama3_8b', (*IN_CHUNKS, f'model.num_layers={layers}'), own=False)


def seconds(config: Config, program=MEGATRON) -> float:
    cluster = Cluster.of(hardware('h100'), config.mesh.num_devices)
    return step_time(config, cluster, program).total


def test_a_config_that_megajax_rejects_is_planned_for_megatron() -> None:
    with pytest.raises(ConfigError, match='14 is not a multiple of'):
        load('llama3_8b', IN_CHUNKS)
    run = CliRunner().invoke(app, ['plan', 'llama3_8b', *IN_CHUNKS, '--program', 'megatron'])
    assert 'timed for megatron: stages=4x2' in run.stdout
    assert run.exit_code in (0, 1)  # by megajax's memory


def test_chunks_are_as_slow_as_the_largest_and_the_head_takes_the_place_of_a_layer() -> None:
    assert seconds(in_chunks(8)) < seconds(in_chunks(14)) < seconds(in_chunks(16))
    assert seconds(in_chunks(14)) == seconds(in_chunks(13))


def test_flops_are_those_of_the_layers_that_there_are() -> None:
    cluster = Cluster.of(hardware('h100'), 4)
    uneven, even = (step_time(in_chunks(n), cluster, MEGATRON).flops.model for n in (14, 16))
    assert uneven < even


def test_experts_in_fp8_are_planned_for_megatron() -> None:
    overrides = 'train.dtype=fp8', 'mesh.data=8', 'train.batch_size=8', 'train.microbatches=1'
    with pytest.raises(ConfigError, match='fp8'):
        load('qwen3_30b_a3b', overrides)
    found = plan(load('qwen3_30b_a3b', overrides, own=False), gpu='h100', program='megatron')
    assert found.planned().train.dtype == 'fp8'


def test_fsdp_has_no_other_zero_stage() -> None:
    config = load(
        'llama3_8b', ('mesh.data=8', 'mesh.model=1', 'train.batch_size=8', 'train.microbatches=1')
    )
    cluster = Cluster.of(hardware('h200'), 8)
    for program in TORCHTITAN, FSDP_IN_JAX:
        found = search(config, cluster, program)
        assert {x.config.optim.shard for x in found.all if x.config.mesh.data > 1} == {'weights'}
        (problem,) = program.problems(changed(config, optim__shard='optimizer'))
        assert 'use weights' in str(problem)


def test_pipelines_of_fsdp_shard_weights_over_data() -> None:
    found = search(load('llama3_8b'), Cluster.of(hardware('h100'), 8), TORCHTITAN)
    layouts = [x.config for x in found.all if x.config.mesh.stages > 1 and x.config.mesh.data > 1]
    assert layouts
    assert {layout.optim.shard for layout in layouts} == {'weights'}
    assert not any('512 is not a multiple' in reason for reason in found.impossible.values())
    assert on_sharding(found) == 'ZeRO-3'


def test_weights_of_a_stage_stay_gathered() -> None:
    layout = changed(in_chunks(8), mesh__data=2, train__batch_size=32)
    cluster = Cluster.of(hardware('h100'), 8)
    needed = [
        memory_on(changed(layout, optim__shard=shard), cluster).gathered_weights
        for shard in ('optimizer', 'weights')
    ]
    assert needed[0] == needed[1]


@pytest.mark.parametrize('name', ['megatron', 'torchtitan', 'maxtext'])
def test_no_other_program_has_grids(name) -> None:
    on_grid = ('mesh.model_rows=2', 'mesh.model=2', 'mesh.data=2', 'mesh.sequence_parallel=true')
    run = CliRunner().invoke(app, ['plan', 'llama3_8b', *on_grid, '--program', name])
    assert isinstance(run.exception, ConfigError)
    assert f'which --program {name} does not have; use 1' in str(run.exception)


def test_selective_recomputation_of_torchtitan_repeats_a_third_of_the_forward_pass() -> None:
    config = load(
        'llama3_8b', ('mesh.data=1', 'mesh.model=1', 'train.batch_size=1', 'train.microbatches=1')
    )
    none, selective, full = (
        seconds(changed(config, train__recompute=name), TORCHTITAN)
        for name in ('none', 'selective', 'full')
    )
    assert 0.25 < (selective - none) / (full - none) < 0.4


def test_asynchronous_tensor_parallelism_hides_most_of_its_collectives() -> None:
    config = load(
        'llama3_8b', ('mesh.data=1', 'mesh.model=8', 'train.batch_size=8', 'train.microbatches=1')
    )
    config = changed(config, mesh__sequence_parallel=True)
    cluster = Cluster.of(hardware('h100'), 8)
    plain, hidden = (step_time(config, cluster, x) for x in (TORCHTITAN, TORCHTITAN_ASYNC))
    assert plain.waits('model') > 0
    assert hidden.waits('model') < 0.5 * plain.waits('model')
