"""The overlap schedule uses every parameter of a layer, or tracing it fails."""

from collections.abc import Callable

import jax
import pytest
from support import exhaustive, make_batch, make_config, on_mesh

from megajax.core.config import Config
from megajax.core.model.block import Block
from megajax.core.train.feed import place_batch
from megajax.core.train.gradients import make_loss_and_gradients
from megajax.core.train.step import init_state


def trace(**train: object) -> None:
    """Trace a step's loss and gradients; nothing is compiled."""
    sizes = {'num_layers': 1, 'hidden_size': 32, 'head_dim': 8, 'ffn_size': 64, 'num_heads': 4}
    config: Config = make_config(
        'gpt',
        model={**sizes, 'dropout': 0.0},
        mesh={'data': 1, 'model': 2},
        train={'batch_size': 4, 'seq_len': 16, 'overlap': 'none', **train},
    )
    with on_mesh(config):
        params = jax.eval_shape(lambda: init_state(config).params)
        function = jax.jit(make_loss_and_gradients(config))
        function.trace(params, place_batch(make_batch(config)), jax.random.key(0))


def add_parameter(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Give each block one more parameter, a copy of another one, which nothing applies."""
    init: Callable[..., None] = Block.__init__

    def with_another(self: Block, *args: object, **keys: object) -> None:
        init(self, *args, **keys)
        *path, last = name.split('.')
        module = getattr(self, path[0]) if path else self
        source = self.attention.qkv if last.endswith('matrix') else self.attention.norm
        setattr(module, last, source.weight.copy())

    monkeypatch.setattr(Block, '__init__', with_another)


PARTS, SEPARATE = {'overlap': 'sequence_split'}, {'overlap': 'none', 'unroll': True}
NAMES = 'gain', 'attention.gain', 'mlp.gain', 'mlp.matrix'


@pytest.mark.parametrize(
    ('name', 'train'),
    [
        *((name, PARTS) for name in NAMES),
        *(exhaustive(name, SEPARATE) for name in NAMES[:-1]),
        (NAMES[-1], SEPARATE),
    ],
)
def test_a_parameter_that_no_step_of_the_schedule_reads_is_an_error_that_names_it(
    name: str, train: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_parameter(monkeypatch, name)
    with pytest.raises(AssertionError, match=rf'does not use layers\.{name}: make it'):
        trace(**train)


def test_the_loop_over_layers_traces_a_parameter_that_it_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_parameter(monkeypatch, 'attention.gain')
    trace()
