"""No collective instruction of a compiled text is missing from the JSON of an inspection."""

import dataclasses
import functools
import json
import re

import jax
import pytest
from support import exhaustive, make_config, slow
from xla.hlo.executed_programs import PROGRAMS

import megajax
from megajax.analysis.inspect.audit import audit
from megajax.analysis.inspect.child import compile_in_child
from megajax.analysis.inspect.compile import CompiledStep, compile_step
from megajax.core.config import Config
from megajax.core.hardware.targets import has_compiler
from megajax.core.parallel.mesh import make_mesh
from megajax.xla.hlo.text import program_text

CONFIGS = {
    'gpt': make_config('gpt', 2, 4, model={'num_layers': 1}),
    'llama with sequence parallelism and ZeRO-1': make_config(
        'llama',
        2,
        4,
        sequence_parallel=True,
        model={'num_layers': 1},
        optim={'shard': True},
        train={'microbatches': 2},
    ),
    'bert over data': make_config(
        'bert', 8, 1, model={'num_layers': 1}, train={'recompute': 'full'}
    ),
}
OTHERS = (
    'moe dispatch', 'unequal groups', 'convolution placed by xla', 'every second step of a scan',
    'switch by a table', 'scans in scans', 'sent in bfloat16', 'permutes that send nothing',
    exhaustive('gpipe of four stages'), slow('block on three explicit axes'),
)  # fmt: skip


@functools.cache
def step(name: str) -> CompiledStep:
    mesh = CONFIGS[name].mesh
    return compile_step(CONFIGS[name], make_mesh(mesh.data, mesh.model), 8)


def other(name: str) -> CompiledStep:
    """Another project's program as if it were a step."""
    function, *arguments = PROGRAMS[name]()
    mesh = next(leaf.sharding.mesh for leaf in jax.tree.leaves(arguments))
    with jax.set_mesh(mesh):
        text = program_text(function.lower(*arguments).compile())
    memory = {'arguments': 0, 'temporaries': 0, 'outputs': 0, 'parameters': [], 'optimizer': []}
    sizes = {'data': 1, 'model': 1} | dict(mesh.shape)
    return CompiledStep(
        text=text,
        mesh=sizes,
        devices_per_host=8,
        jax_version=jax.__version__,
        seconds=0.0,
        **memory,
    )


def written(config: Config, compiled: CompiledStep, target: str) -> list[dict]:
    return json.loads(audit(config, compiled, target).model_dump_json())['collectives']


def in_the_text(text: str) -> list[str]:
    kinds = (
        'all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|'
        'collective-broadcast'
    )
    return sorted(
        re.findall(rf'^ +(?:ROOT )?%([\w.\-]+) = .*? (?:{kinds})(?:-start)?\(%', text, re.MULTILINE)
    )


def check(found: list[dict], text: str) -> None:
    expected = in_the_text(text)
    assert expected
    assert sorted(one['instruction'] for one in found) == expected
    for one in found:
        assert one['groups'] in text
        assert one['groups'].startswith(('{', '[', 'mesh'))
        assert (one['axis'] == '') == (one['wire_bytes'] == 0) or one['times'] == 0


@pytest.mark.parametrize('name', [slow('gpt'), *map(exhaustive, [*CONFIGS][1:])])
def test_every_collective_of_a_step_is_in_the_json(name):
    compiled = step(name)
    found = written(CONFIGS[name], compiled, 'cpu')
    check(found, compiled.text)
    rows = audit(CONFIGS[name], compiled, 'cpu').rows
    assert sum(one['wire_bytes'] for one in found) == pytest.approx(
        sum(row.wire_bytes for row in rows)
    )


@pytest.mark.parametrize('name', OTHERS)
def test_every_collective_of_another_program_is_in_the_json(name):
    compiled = other(name)
    check(written(CONFIGS['gpt'], compiled, 'cpu'), compiled.text)


def test_what_no_step_runs_is_in_the_json_with_zero_times():
    compiled = other('every second step of a scan')
    once = compiled.text.replace('"known_trip_count":{"n":"7"}', '"known_trip_count":{"n":"1"}')
    times = {
        one['kind']: one['times']
        for one in written(CONFIGS['gpt'], dataclasses.replace(compiled, text=once), 'cpu')
    }
    assert times == {'all-reduce': 1, 'all-gather': 0}


@pytest.mark.slow
@pytest.mark.skipif(
    not has_compiler(), reason="needs XLA's GPU compiler: pip install 'megajax[gpu-compile]'"
)
@pytest.mark.parametrize(
    'overrides', [(), ('mesh.sequence_parallel=true', 'optim.shard=true', 'train.recompute=full')]
)
def test_every_collective_of_a_gpus_step_is_in_the_json(overrides):
    config = megajax.load(
        'tiny', ['model.num_layers=1', 'model.vocab_size=1000', 'train.batch_size=8', *overrides]
    )
    compiled = compile_in_child(config, 'h100', 1)
    check(written(config, compiled, 'h100'), compiled.text)
