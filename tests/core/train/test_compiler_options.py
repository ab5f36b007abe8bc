"""Options that a step asks of XLA, in the programs that it compiles for an H100."""

from typing import Any

import pytest
from support import on_mesh

import megajax
from megajax.analysis.inspect.compile import compile_for
from megajax.core.config import Config, ConfigError
from megajax.core.config.overlap_rules import resolved
from megajax.core.counts.flash import HOPPER
from megajax.core.hardware.targets import has_compiler
from megajax.core.train import compiler_options
from megajax.xla.hlo.program import Program


@pytest.mark.skipif(
    not has_compiler(), reason="needs XLA's GPU compiler: pip install 'megajax[gpu-compile]'"
)
@pytest.mark.slow
@pytest.mark.parametrize('deterministic', [False, True])
def test_a_deterministic_step_sorts_the_gradients_of_the_embedding(deterministic: bool) -> None:
    """Otherwise they are added in the order in which they come."""
    size = 'model.num_layers=1', 'model.vocab_size=1000', 'mesh.data=1', 'mesh.model=1'
    keys = 'train.dtype=bfloat16', f'train.deterministic={str(deterministic).lower()}'
    config = resolved(megajax.load('tiny', [*size, *keys]), on_gpu=True)
    program = Program(compile_for(config, 'h100', 1).text)
    opcodes = {
        one.opcode
        for computation in program.computations.values()
        for one in computation.instructions
    }
    assert 'scatter' in opcodes
    assert ('sort' in opcodes) == deterministic


def options_of(config: Config) -> dict[str, Any]:
    with on_mesh(config):
        return compiler_options.step_options(config)


def test_a_deterministic_step_never_has_cudnns_attention_in_several_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On an H100 its first step ended with an IndexError, and that of a loop over layers ran."""
    unrolled = 'train.deterministic=true', 'train.unroll=true', 'train.dtype=bfloat16'
    config = megajax.load('tiny', [*unrolled, 'model.attention_dropout=0'])
    options_of(config)  # a CPU has no cuDNN
    monkeypatch.setattr(compiler_options, 'mesh_target', lambda: 'h100')
    monkeypatch.setattr(compiler_options, 'capability_of', lambda device: HOPPER)
    with pytest.raises(ConfigError, match=r'train\.unroll: .* use train\.unroll=false'):
        options_of(config)
    for others in (
        ('train.deterministic=false',),
        ('train.unroll=false',),
        ('train.dtype=float32',),
        ('model.attention_dropout=0.1',),
    ):
        sound = megajax.load('tiny', [*unrolled, 'model.attention_dropout=0', *others])
        options_of(sound)


def test_a_custom_loop_gets_the_options_of_the_training_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both resolve `auto` in the same way; the overlap schedule needs its options."""
    keys = 'mesh.data=2', 'mesh.model=2', 'optim.shard=weights', 'train.dtype=bfloat16'
    config = megajax.load('tiny', [*keys, 'model.attention_dropout=0'])
    monkeypatch.setattr(compiler_options, 'mesh_target', lambda: 'h100')
    monkeypatch.setattr(compiler_options, 'capability_of', lambda device: HOPPER)
    chosen = resolved(config, on_gpu=True)
    assert chosen.overlap.in_order
    assert options_of(config) == options_of(chosen)
