"""Faults that are planted into megajax are found by random steps, and minimized."""

import json
from typing import Any

import pytest
from jax.sharding import get_abstract_mesh
from support import exhaustive, load_script, slow

from megajax.analysis.fuzz.case import Case
from megajax.analysis.fuzz.draw import draw
from megajax.analysis.fuzz.execute import case
from megajax.analysis.fuzz.explain import explained
from megajax.analysis.inspect import emulated_step
from megajax.analysis.inspect.minimize import smallest
from megajax.core.config import Config, load
from megajax.core.hardware.targets import has_compiler
from megajax.core.model import linear
from megajax.core.model.arr_coc import relevance
from megajax.core.train import step
from megajax.xla.miscompiles import ask
from megajax.xla.miscompiles.scaled_bias import SCALED_BIAS

emulated = load_script('test_emulated_step', 'tests/analysis/inspect')
of_experts = load_script('test_expert_faults', 'tests/analysis/inspect')
# Programs that compile quickly and round little.
PLAIN = 'train.dtype=float32', 'train.overlap=none', 'train.unroll=false', 'train.microbatches=2'
TRIES = 3
EXPERTS = 'mesh.data=2', 'model.experts={count: 4, active: 2, ffn_size: 64}'
# A bias moves by the sign of its expert's load, which differs between shards of few tokens only.
BIASES = (
    'mesh.data=2',
    'train.seq_len=16',
    'train.batch_size=8',
    'model.experts={count: 8, active: 1, ffn_size: 64, selection_bias: true}',
)
STAGES = 'mesh.stages=2', 'mesh.virtual_stages=2', 'model.num_layers=4'
RELEVANCE = (
    *('mesh.data=1', 'mesh.model=2', 'model.num_layers=1', 'train.batch_size=4'),
    *('relevance.regions=[2, 1]', 'relevance.total_tokens=208'),
)


def scorers_in_reverse(patch: Any) -> None:
    """The shards of `model` have each other's scorers."""
    usual = relevance._slots
    patch(relevance, '_slots', lambda copies, layout: usual(
        copies if len(copies) == 1 else copies[:, ::-1], layout
    ))  # fmt: skip


def gates_of_ones(patch: Any) -> None:
    """On a mesh, the detail of each region counts in full, whatever its relevance."""
    usual = relevance.assess

    def assess(*arguments: Any, **options: Any) -> relevance.Relevance:
        found = usual(*arguments, **options)
        return found if get_abstract_mesh().size == 1 else found._replace(gate=found.gate * 0 + 1)

    patch(relevance, 'assess', assess)


def tried(config: Config) -> Case:
    return case(config, {'seed': 0, 'number': 0, 'fixed': []}, 'h100')


@pytest.mark.parametrize(
    ('worsen', 'fixed'),
    [
        exhaustive(emulated.next_stages_layers, STAGES),
        exhaustive(emulated.other_chunks_first, STAGES),
        slow(emulated.tokens_in_order, ('mesh.context=2', 'model.num_layers=1')),
        exhaustive(of_experts.router_gradients_not_summed, EXPERTS),
        exhaustive(of_experts.load_of_own_tokens, BIASES),
        slow(scorers_in_reverse, RELEVANCE),
        exhaustive(gates_of_ones, RELEVANCE),
    ],
)
def test_a_planted_fault_is_found_by_few_random_steps(
    worsen: Any, fixed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_compiler():
        pytest.skip("needs XLA's GPU compiler")
    worsen(monkeypatch.setattr)
    configs = (draw(0, number, (*PLAIN, *fixed)) for number in range(TRIES))
    assert any(tried(config).verdict == 'wrong' for config in configs)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_finding_gets_a_folder_with_its_smallest_config_and_programs(tmp_path, monkeypatch):
    if not has_compiler():
        pytest.skip("needs XLA's GPU compiler")
    emulated.tokens_in_order(monkeypatch.setattr)
    config = draw(0, 0, (*PLAIN, 'mesh.context=2', 'model.num_layers=1', 'model.norm=rmsnorm'))
    found = explained(tried(config), tried, tmp_path)
    small = load(tmp_path / 'smallest.yaml')
    assert (small.mesh.num_devices, small.mesh.context) == (2, 2)
    assert small.model.norm == 'layernorm'
    assert found.culprit.startswith('spmd-partitioning')  # the fault is before XLA's passes
    assert 'ENTRY' in (tmp_path / 'before_optimizations.txt').read_text()
    assert 'ENTRY' in (tmp_path / 'first_wrong_module.txt').read_text()
    assert 'jax' in json.loads((tmp_path / 'versions.json').read_text())
    assert (tmp_path / 'results.csv').read_text().count('False') >= 1


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_step_that_the_compiler_breaks_is_reduced_to_few_instructions(tmp_path, monkeypatch):
    if not has_compiler():
        pytest.skip("needs XLA's GPU compiler")
    if not ask(SCALED_BIAS, 'h100').is_faulty:
        pytest.skip('this XLA does not have the bug')
    monkeypatch.setattr(linear, 'add_bias', lambda y, bias: 1.5 * (y + bias))
    options = {'xla_gpu_enable_triton_gemm': False}
    for module in (emulated_step, step):
        monkeypatch.setattr(module, 'step_options', lambda config: options)
    config = emulated.step('gpt', 2, 1, model={'dropout': 0.1}, train={'recompute': 'full'})
    found = tried(config)
    assert found.verdict == 'wrong'
    kept = found.model_copy(update={'verdict': 'right'})  # of every simpler config
    explained(found, lambda simpler: kept, tmp_path)
    summary = json.loads((tmp_path / 'hlo/reduced.json').read_text())
    assert summary['original_instructions'] > 5000
    assert summary['instructions'] <= 20
    assert summary['pass'].startswith('cublas-gemm-rewriter')
    assert 'hlo/reduced.hlo' in (tmp_path / 'README.md').read_text()


def test_a_minimized_config_keeps_no_key_that_the_finding_does_not_need():
    """Keys that no list names are dropped, also those inside a group, and whole groups."""
    experts = 'model.experts={count: 8, active: 2, ffn_size: 64, scores: sigmoid, scale: 2.5}'
    lora = 'model.attention_sinks=true', 'lora.rank=4', 'lora.targets=[qkv]'
    config = draw(0, 0, (experts, *lora, 'mesh.model=2', 'mesh.data=1'))

    def is_wrong(tried: Config) -> bool:
        return tried.model.experts is not None and tried.model.experts.scores == 'sigmoid'

    given = smallest(config, is_wrong).model_dump(exclude_unset=True)
    assert given['model']['experts'] == {
        'count': 8, 'active': 2, 'ffn_size': 64, 'scores': 'sigmoid'
    }  # fmt: skip
    assert 'lora' not in given
    assert 'attention_sinks' not in given['model']
    assert not given['mesh'].get('sequence_parallel')
