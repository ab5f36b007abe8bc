"""The max-reductions of FP8 current scaling, in Transformer Engine and in a step."""

import megajax
from megajax.core.config import Config
from megajax.core.counts.collective import Expected
from megajax.core.counts.current_scaling import of_step, of_transformer_engine
from megajax.core.counts.megatron import expected, stated

SIZE = 'model.num_layers=4', 'mesh.model=2', 'train.dtype=fp8', 'train.fp8_scaling=current'


def config_of(*overrides: str) -> Config:
    """A model of four layers on two tensor-parallel shards."""
    return megajax.load('tiny', [*SIZE, *overrides])


def records(found: list[Expected]) -> list[tuple[str, str, tuple[int, ...], int]]:
    """Each reduction's phase, axes, array and number in a step."""
    return [(one.site.phase, one.site.axis, one.array.shape, one.times) for one in found]


def test_transformer_engine_reduces_the_operands_that_are_gathered() -> None:
    assert not [*of_transformer_engine(config_of())]
    found = [*of_transformer_engine(config_of('mesh.sequence_parallel=true', 'mesh.data=2'))]
    assert records(found) == [('forward', 'model', (), 8), ('backward', 'model', (), 8)]
    (of_weights,) = of_transformer_engine(config_of('mesh.data=2', 'optim.shard=optimizer'))
    assert records([of_weights]) == [('step', 'data', (16,), 1)]


def test_a_step_reduces_every_sharded_operand_and_each_weight() -> None:
    sharded = 'mesh.data=2', 'optim.shard=weights', 'train.microbatches=2'
    for count, axes, overrides in ((2, 'model', ()), (4, 'data+model', (*sharded, 'SP'))):
        given = ('mesh.sequence_parallel=true' if x == 'SP' else x for x in overrides)
        config = config_of(*given)
        times = count * 4 * config.train.microbatches
        assert records([*of_step(config)]) == [
            ('forward', 'model', (), times),
            ('backward', 'model', (), times),
            ('step', axes, (16,), 1),
        ]


def test_delayed_scaling_has_none_of_them() -> None:
    delayed = config_of('mesh.sequence_parallel=true', 'train.fp8_scaling=delayed')
    assert not [one for one in (*expected(delayed), *stated(delayed)) if one.site.name == 'amax']
