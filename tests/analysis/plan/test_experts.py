"""What experts add to a plan: memory and bytes beside compiled steps, and the time of a load."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from support import load_script, make_config

from megajax.analysis.inspect.products import of_unused_blocks
from megajax.analysis.plan.communication import over_data_shards, wire_bytes
from megajax.analysis.plan.experts import imbalance_of_run
from megajax.analysis.plan.launches import num_launches
from megajax.analysis.plan.layouts import Mesh, changed, layouts
from megajax.analysis.plan.memory import memory
from megajax.analysis.plan.memory_traffic import traffic_of_layers
from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.overlap import HiddenBy
from megajax.analysis.plan.planning import plan
from megajax.analysis.plan.programs import FSDP, MEGAJAX, MEGATRON
from megajax.analysis.plan.sizes import Sizes
from megajax.analysis.plan.time import StepTime, step_time
from megajax.analysis.plan.transfers import Waiting, transfers
from megajax.core.config import Config, ConfigError, load
from megajax.core.config.layer import LayerConfig
from megajax.core.counts.collective import GATHER, Expected, Site
from megajax.core.counts.flash import uses_flash
from megajax.core.counts.flops import step_flops
from megajax.core.counts.parameters import num_parameters
from megajax.core.counts.products import products
from megajax.core.hardware.records import hardware
from megajax.xla.hlo.program import Array

RESULTS = Path(__file__).parents[3] / 'benchmarks/results'
LINES = [*csv.DictReader((RESULTS / '2026-11-30_plan_experts.csv').open(newline=''))]
ON_8 = Cluster.of(hardware('h100'), 8)


def name(line: dict[str, str]) -> str:
    return f'{line["preset"]} {line["mesh"]} {line["recompute"]} {line["overrides"]}'


def numbers(text: str) -> dict[str, float]:
    return {axis: float(figure) for axis, figure in (pair.split('=') for pair in text.split())}


@pytest.mark.parametrize('line', LINES, ids=name)
def test_a_step_with_experts_for_h100s_is_predicted(line: dict[str, str]) -> None:
    config = load_script('plan_memory').load(line)
    needed = memory(config, capacity_bytes=hardware('h100').memory)
    assert needed.total == int(line['predicted_bytes']), (
        'python benchmarks/plan_memory.py --experts writes the file anew'
    )
    assert needed.total == pytest.approx(int(line['compiled_bytes']), rel=0.10)
    # A step also keeps each expert's share of the assignments.
    assert needed.state + needed.batch == pytest.approx(int(line['arguments']), abs=100_000)
    sent = {axis: count for axis, count in wire_bytes(config).items() if count}
    assert numbers(line['compiled_wire']) == pytest.approx(sent, rel=1e-12)
    work = products(config, flash=uses_flash(config))
    flops = sum(product.times * product.flops for product in work) + of_unused_blocks(config)
    assert flops / 1e9 == pytest.approx(float(line['compiled_gflops']), rel=1e-5)
    assert num_launches(config) == pytest.approx(int(line['compiled_launches']), rel=0.15)


def config(**changes: object) -> Config:
    """Mixtral of two layers on eight GPUs, with four experts on each pair of neighbors."""
    mesh = {'mesh__data': 8, 'mesh__experts': 2, 'train__microbatches': 1}
    small = {'model__num_layers': 2, 'train__batch_size': 16, 'model__max_seq_len': 4096}
    return changed(load('mixtral_8x7b'), **(mesh | small | changes))


def timed(config: Config, imbalance: float = 1.0) -> StepTime:
    return step_time(config, ON_8, replace(MEGAJAX, imbalance=imbalance))


def test_a_step_waits_for_the_busiest_device_of_a_group() -> None:
    balanced, uneven = timed(config()), timed(config(), 1.5)
    experts = config().model.experts
    assert balanced.products * 1.2 < uneven.products < balanced.products * 1.5
    assert balanced.flops == uneven.flops
    alone, even = config(mesh__experts=1), experts.model_copy(update={'capacity': 1.0})
    for each in (alone, config(model__experts=even)):
        assert timed(each) == timed(each, 1.5)


def test_no_device_gets_more_than_all_tokens() -> None:
    assert timed(config(), 2.0) == timed(config(), 3.0)


def test_experts_with_few_rows_each_are_slower() -> None:
    experts = config().model.experts
    many = experts.model_copy(update={'count': 128, 'active': 8, 'ffn_size': 3584})
    few_rows = config(model__experts=many)
    flops = [timed(each).flops.layers for each in (config(), few_rows)]
    assert flops[1] == pytest.approx(flops[0], rel=0.01)  # the router's
    assert timed(few_rows).products > 1.05 * timed(config()).products


def sent_to_experts(config: Config, program=MEGAJAX) -> float:
    return sum(
        x.wire_bytes * x.times
        for x in program.sent_in_passes(config)
        if x.site.name == 'experts' and x.kind == 'all-to-all'
    )


def test_buffers_have_room_for_more_and_later_rounds_send_halves() -> None:
    assert sent_to_experts(config()) == 1.25 * sent_to_experts(config(), MEGATRON)
    for imbalance, rounds in ((1.25, 0), (1.3, 1), (1.875, 1), (2.0, 2)):
        program = replace(MEGAJAX, imbalance=imbalance)
        assert sent_to_experts(config(), program) == (1 + rounds / 2) * sent_to_experts(config())
    uneven = replace(MEGATRON, imbalance=1.5)
    assert sent_to_experts(config(), uneven) == 1.5 * sent_to_experts(config(), MEGATRON)
    even = config().model.experts.model_copy(update={'capacity': 1.0})
    exact = config(model__experts=even)
    assert sent_to_experts(exact) == sent_to_experts(exact, MEGATRON)


def test_gradients_of_frozen_parameters_are_not_summed() -> None:
    experts = config().model.experts.model_copy(update={'selection_bias': True})
    biased = config(model__experts=experts, mesh__experts=1)
    assert over_data_shards(biased) == over_data_shards(config(mesh__experts=1))
    adapters = load('llama3_8b', ['lora.rank=8', 'mesh.data=8', 'mesh.model=1', 'optim.shard=none'])
    (sent,) = over_data_shards(adapters)
    assert sent.array.dims == (num_parameters(adapters.model, padded=True, trained=True),)


def test_a_group_of_experts_over_hosts_waits_for_the_network() -> None:
    cluster = Cluster.of(hardware('h100'), 8, 2)
    inside, across = (
        sum(x.seconds for x in step_time(each, cluster).transfers if x.kind == 'all-to-all')
        for each in (config(), config(mesh__experts=4))
    )
    # Of twice the devices each sends half more, and over slower links.
    assert across > 1.5 * 2 * inside


def test_fully_sharded_experts_are_gathered_by_the_devices_that_have_the_same() -> None:
    weights = [x for x in FSDP.over_data(config()) if x.site.name == 'parameters']
    elements = {x.site.axis: x.array.dims[0] for x in weights}
    assert set(elements) == {'data', 'data+expert'}
    of_experts = 2 * 4 * 3 * 4096 * 14336  # layers, own experts, matrices
    assert elements['data'] == of_experts


def moved_by_dispatch(config: Config, *, in_buffers: bool = False) -> float:
    moves = traffic_of_layers(config, flash=True, in_buffers=in_buffers)
    return sum(one.bytes for one in moves if one.name == 'dispatch')


@pytest.mark.parametrize(('degree', 'copies'), [(1, 0), (2, 1)])
def test_megatron_reads_a_token_once_and_sorts_the_rows_that_it_receives(
    degree: int, copies: int
) -> None:
    in_16_bits = config(mesh__experts=degree, train__recompute='none')
    tokens, size, active, count = 2 * 4096, 2 * 4096, 2, 8  # of a device; bytes; experts
    routing = 4 * 4 * tokens * (count + active)
    of_pass = 2 * tokens * size * (1 + active) + copies * 4 * tokens * size * active + routing
    assert moved_by_dispatch(in_16_bits) == 2 * of_pass
    in_8_bits, padding = changed(in_16_bits, train__dtype='fp8'), 4 * tokens * size * active
    assert moved_by_dispatch(in_8_bits) == 2 * (of_pass + padding)
    buffers = [moved_by_dispatch(one, in_buffers=True) for one in (in_16_bits, in_8_bits)]
    assert buffers[0] == buffers[1]


def test_experts_without_tensor_parallelism_have_the_same_flops_and_fewer_rows() -> None:
    whole = replace(MEGATRON, has_whole_experts=True)
    sharded = config(mesh__data=4, mesh__model=2, mesh__sequence_parallel=True, mesh__experts=4)
    there = whole.at_experts(sharded)
    assert there.mesh.num_devices == sharded.mesh.num_devices
    flops = [
        sum(x.times * x.flops for x in products(one, flash=True) if x.of_experts)
        for one in (sharded, there)
    ]
    assert flops[0] == flops[1]
    # Each of two GPUs sends 7/8 of its own rows, not 3/4 of the rows of both.
    ratio = sent_to_experts(sharded, whole) / sent_to_experts(sharded, MEGATRON)
    assert ratio == pytest.approx((7 / 8) / (2 * 3 / 4))
    assert step_time(sharded, ON_8, whole).total < step_time(sharded, ON_8, MEGATRON).total


def test_a_search_compares_the_largest_degrees_inside_a_host_and_of_all() -> None:
    on_64 = changed(load('qwen3_30b_a3b'), train__batch_size=64)
    for mesh, degrees in (
        (Mesh(64, 1, 1), {1, 8, 64}),
        (Mesh(16, 1, 4), {1, 2, 16}),
        (Mesh(8, 1, 4, 2, 1), {1, 2}),
    ):
        found = {layout.mesh.experts for layout in layouts(on_64, mesh, 8)}
        assert found == degrees
    assert all(x.mesh.experts == 1 for x in layouts(load('llama3_8b'), Mesh(64, 1, 1), 8))


def test_a_plan_says_which_load_it_assumes() -> None:
    small = changed(load('tiny_moe'), train__dtype='bfloat16', train__batch_size=8)
    balanced, uneven = (plan(small, gpu='h100', gpus=2, imbalance=x) for x in (1.0, 1.25))
    assert 'experts in balance: every device gets equally many tokens' in str(balanced)
    assert 'the busiest device gets 1.25 times the mean tokens' in str(uneven)
    assert 'expert parallelism      ' in str(balanced)
    assert {layout.experts for layout in balanced.layouts} == {1, 2}
    assert plan(make_config('gpt', 1, 1), gpu='h100').imbalance is None


@pytest.mark.parametrize(
    ('preset', 'imbalance', 'message'),
    [
        ('tiny_moe', 0.5, '--imbalance 0.5: the busiest device gets at least the mean'),
        ('gpt2_124m', 1.5, '--imbalance 1.5 needs model.experts, which is null'),
    ],
)
def test_a_load_that_cannot_be_is_rejected(preset: str, imbalance: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(load(preset), gpu='h100', imbalance=imbalance)


def with_mlps(**changes: object) -> dict[str, Config]:
    """Four layers with an MLP as wide as an expert, with experts, and with one or the other."""
    experts = config().model.experts
    kinds = {
        'dense': {'model__experts': None, 'mesh__experts': 1},
        'first dense': {'model__experts': experts.model_copy(update={'first_dense': 1})},
        'alternating': {'model__layers': (LayerConfig(experts=None), LayerConfig())},
        'experts': {},
    }
    return {
        kind: config(**({'model__num_layers': 4} | changes | each)) for kind, each in kinds.items()
    }


@pytest.mark.parametrize('recompute', ['none', 'full'])
@pytest.mark.parametrize('shard', ['none', 'weights'])
@pytest.mark.parametrize('mesh', [(8, 1), (2, 4)])
def test_a_model_with_both_kinds_of_layers_lies_between_the_others(
    mesh: tuple[int, int], shard: str, recompute: str
) -> None:
    data, model = mesh
    dense, first, mixed, experts = with_mlps(
        mesh__data=data, mesh__model=model, optim__shard=shard, train__recompute=recompute
    ).values()
    assert memory(dense).total < memory(first).total < memory(experts).total
    assert timed(dense).products < timed(mixed).products < timed(first).products
    assert timed(first).products < timed(experts).products
    for count in (
        lambda x: timed(x).memory_bound,
        lambda x: memory(x).state,
        lambda x: num_launches(x),
        lambda x: step_flops(x).hardware,
    ):
        assert count(dense) < count(mixed) < count(first) < count(experts)


def test_layers_of_both_kinds_save_the_mean_of_what_each_saves() -> None:
    dense, first, mixed, experts = map(Sizes, with_mlps().values())
    assert 4 * first.kept == dense.kept + 3 * experts.kept
    assert 2 * mixed.kept == dense.kept + experts.kept
    assert mixed.kept_by_layer == experts.kept_by_layer > dense.kept_by_layer


def test_a_chunk_of_a_pipeline_stage_has_layers_of_both_kinds() -> None:
    dense, _, mixed, experts = map(
        Sizes,
        with_mlps(mesh__data=4, mesh__stages=2, mesh__experts=1, train__microbatches=4).values(),
    )
    assert [kind.count for kind in mixed.kinds] == [1, 1]
    assert 2 * mixed.kept_by_chunk == dense.kept_by_chunk + experts.kept_by_chunk
    assert (
        2 * memory(mixed.config).state == memory(dense.config).state + memory(experts.config).state
    )


@pytest.mark.parametrize(
    ('site', 'used'),
    [('mlp', {'dense up'}), ('attention', {'up', 'dense up'}), ('experts', {'up'})],
)
def test_an_mlp_that_is_next_to_experts_overlaps_its_own_matmuls(site: str, used: set[str]) -> None:
    mixed = with_mlps()['alternating']
    wire = Expected.over(mixed, Site(site, 'forward', 'data'), GATHER, Array('bf16', (2**40,)), 1)
    matmuls = Waiting.of({(name, 'forward'): 1.0 for name in ('up', 'dense up')})
    program = replace(MEGAJAX, hidden_by=lambda *_: HiddenBy(1.0, ('up',)))
    (sent,) = transfers([wire], mixed, ON_8, program, matmuls)
    assert {name for (name, _), left in matmuls.left.items() if left == 0} == used
    assert sent.hidden == len(used)


def test_a_load_slows_only_the_layers_with_experts() -> None:
    slower = {
        kind: timed(each, 1.5).products - timed(each).products for kind, each in with_mlps().items()
    }
    assert slower['dense'] == 0
    assert slower['first dense'] == pytest.approx(0.75 * slower['experts'])
    assert slower['alternating'] == pytest.approx(0.5 * slower['experts'])


def test_all_layouts_of_a_model_with_both_kinds_of_layers_are_compared() -> None:
    small = load('tiny_moe', ['model.experts.first_dense=1', 'train.dtype=bfloat16'])
    found = plan(small, gpu='h100', gpus=2, imbalance=1.25)
    assert {layout.experts for layout in found.layouts} == {1, 2}
    assert found.largest_microbatch > small.microbatch_rows
    assert found.imbalance == 1.25


def test_a_run_gives_the_load_of_its_last_steps(tmp_path: Path) -> None:
    config = tmp_path / 'config.yaml'
    assert imbalance_of_run(config) == 1
    steps = [{'step': n, 'expert_load': 3.0 if n < 50 else 1.5} for n in range(150)]
    lines = [*map(json.dumps, steps), json.dumps({'step': 149, 'eval_loss': 1.0})]
    (tmp_path / 'metrics.jsonl').write_text('\n'.join(lines))
    assert imbalance_of_run(config) == 1.5
    with (tmp_path / 'metrics.jsonl').open('a') as file:  # not finite, and cut by a kill
        file.write('\n{"step": 150, "expert_load": null}\n{"step": 151, "expert_l')
    assert imbalance_of_run(config) == 1.5
    assert imbalance_of_run(tmp_path / 'other.yaml') == 1


def test_the_published_rows_are_those_of_today() -> None:
    script = load_script('plan_experts')
    assert script.table(script.rows()) in (RESULTS / '2026-11-29_plan_experts.md').read_text()


@pytest.mark.parametrize(('capability', 'block'), [((9, 0), 64), ((10, 0), 16), (None, 16)])
def test_the_kernels_of_hopper_have_rows_for_larger_blocks(
    capability: tuple[int, int] | None, block: int
) -> None:
    """1024 tokens, of which each of 128 experts gets 64 rows on average."""
    mesh = ['mesh.data=1', 'mesh.model=1', 'mesh.experts=1', 'train.microbatches=1']
    short = ['train.seq_len=1024', 'train.batch_size=1']
    experts = Sizes(load('qwen3_30b_a3b', [*mesh, *short]), capability).experts
    assert experts is not None
    rows = (1024 * 8 // block + 128) * block
    assert rows == {64: 16384, 16: 10240}[block]
    assert experts.rows == rows * 2048 * 2
