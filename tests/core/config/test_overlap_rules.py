"""What `auto` stands for in `train.overlap` and `train.unroll`, on CPUs and on GPUs."""

import pytest

from megajax.core.config import Config, load
from megajax.core.config.overlap_rules import in_a_loop, length_multiple, resolved, resolved_for
from megajax.core.config.rules import incompatibilities
from megajax.core.train.overlap import overlap_options


def llama(*overrides: str) -> Config:
    fixed = 'train.seq_len=1024', 'train.microbatches=1', 'mesh.data=1', 'mesh.model=1'
    return load('llama3_8b', [*fixed, 'train.batch_size=4', 'optim.shard=none', *overrides])


def chosen(config: Config) -> tuple[str, bool]:
    """The overlap on GPUs, and whether layers are compiled on their own."""
    config = resolved(config, on_gpu=True)
    assert config.train.unroll in (True, False)
    assert not incompatibilities(config)
    return config.train.overlap, config.train.unroll


SP = 'mesh.model=2', 'mesh.sequence_parallel=true'


@pytest.mark.parametrize(
    ('overrides', 'expected'),
    [
        ((), ('none', True)),  # nothing is sent
        (('mesh.data=4',), ('none', True)),  # gradients are sent once, after the last layer
        (('mesh.data=4', 'optim.shard=weights'), ('batch_split', True)),
        (('mesh.model=2',), ('batch_split', True)),
        ((*SP, 'train.batch_size=3'), ('sequence_split', True)),
        ((*SP, 'train.batch_size=3', 'train.seq_len=1022'), ('none', False)),
        (('mesh.model=2', 'model.dropout=0.1'), ('none', False)),
        (('mesh.model=2', 'mesh.stages=2', 'train.microbatches=4'), ('none', False)),
        ((*SP, 'mesh.model_rows=2'), ('none', False)),
        (('mesh.model=2', 'train.overlap=none'), ('none', False)),
        (('mesh.model=2', 'train.unroll=false'), ('none', False)),
        (('mesh.model=2', 'train.overlap=sequence_split'), ('sequence_split', True)),
        (('mesh.model=2', 'model.norm_position=after'), ('batch_split', True)),
        (('mesh.model=2', 'model.qk_norm=all'), ('batch_split', True)),
        (('train.deterministic=true',), ('none', False)),
        (('mesh.model=2', 'train.deterministic=true'), ('batch_split', False)),
        (('mesh.model=2', 'lora.rank=8'), ('batch_split', True)),
        (('mesh.model=2', 'lora.rank=8', 'train.dtype=fp8'), ('none', False)),
    ],
    ids=lambda value: ' '.join(map(str, value)) or 'one GPU',
)
def test_on_gpus_it_is_what_hides_something_and_fits(
    overrides: tuple[str, ...], expected: tuple[str, bool]
) -> None:
    assert chosen(llama(*overrides)) == expected


@pytest.mark.parametrize(
    ('overrides', 'shape', 'expected'),
    [
        ((), (8, 1024), 'batch_split'),
        ((), (3, 1024), 'sequence_split'),
        ((), (3, 1022), 'none'),
        (('train.batch_size=3',), (4, 1024), 'sequence_split'),
        (('train.batch_size=3',), (4, 1022), 'batch_split'),
        (('train.batch_size=3', 'model.dropout=0.1'), (4, 1024), 'none'),
    ],
    ids=str,
)
def test_another_batch_is_split_as_that_of_the_config_if_it_can_be(
    overrides: tuple[str, ...], shape: tuple[int, int], expected: str
) -> None:
    """The options for XLA are chosen for the batch of the config, before another one is known."""
    config = llama(*SP, *overrides)
    actual = resolved_for(config, *shape, on_gpu=True)
    assert actual.train.overlap == expected
    given = overlap_options(resolved(config, on_gpu=True))
    assert overlap_options(actual).items() <= given.items()


def test_on_cpus_the_layers_are_plain_and_in_a_loop() -> None:
    config = resolved(llama('mesh.model=2', 'optim.shard=weights', 'mesh.data=2'), on_gpu=False)
    assert (config.train.overlap, config.train.unroll) == ('none', False)
    assert not config.overlap.in_order


def test_what_is_said_stays_as_it_is() -> None:
    config = llama('mesh.model=2', 'train.overlap=batch_split', 'train.unroll=false')
    assert resolved(config, on_gpu=True) == resolved(config, on_gpu=False) == config


def test_a_quick_look_has_the_same_overlap_in_a_loop() -> None:
    config = in_a_loop(llama('mesh.model=2'), on_gpu=True)
    assert (config.train.overlap, config.train.unroll) == ('batch_split', False)


def test_rows_are_cut_only_where_the_layers_send_something_over_model() -> None:
    over_data = resolved(llama('mesh.data=4', 'optim.shard=weights'), on_gpu=True)
    over_model = resolved(llama('mesh.model=2'), on_gpu=True)
    assert (over_data.overlap.num_parts, over_model.overlap.num_parts) == (1, 2)


def test_one_microbatch_of_zero_1_is_summed_layer_by_layer() -> None:
    for microbatches, expected in ((1, 'gradients'), (2, 'optimizer')):
        config = resolved(
            llama('mesh.data=2', 'optim.shard=optimizer', f'train.microbatches={microbatches}'),
            on_gpu=True,
        )
        assert config.overlap.shard == expected
        assert config.overlap.gathers_ahead is (microbatches == 1)


@pytest.mark.parametrize(
    'overrides',
    [
        ('mesh.stages=2', 'train.microbatches=4'),
        ('mesh.context=2',),
        (*SP, 'mesh.model_rows=2'),
        ('lora.rank=8', 'train.dtype=fp8'),
    ],
    ids=str,
)
def test_layers_without_an_overlap_schedule_can_be_compiled_separately(
    overrides: tuple[str, ...],
) -> None:
    overlap = llama(*overrides, 'train.unroll=true').overlap
    assert (overlap.unroll, overlap.in_order) == (True, False)


def test_adapters_in_fp8_have_no_order_of_layers() -> None:
    lora = 'mesh.model=2', 'lora.rank=8', 'train.overlap=sequence_split'
    assert llama(*lora).overlap.in_order
    fix = 'is not supported with LoRA in fp8; use train.overlap=batch_split'
    with pytest.raises(ValueError, match=fix):
        llama(*lora, 'train.dtype=fp8')


def test_tokens_that_cannot_be_halved_on_each_shard_are_refused_with_lengths_that_can() -> None:
    fix = r'1022 is not a multiple of 4.*; use 1020 or 1024, or train\.overlap=batch_split'
    with pytest.raises(ValueError, match=fix):
        llama(*SP, 'train.overlap=sequence_split', 'train.seq_len=1022')


@pytest.mark.parametrize(
    ('overrides', 'expected'),
    [
        (('mesh.model=2',), 1),
        (SP, 2),
        ((*SP, 'train.overlap=sequence_split'), 4),
        (('mesh.context=4',), 8),
        (('mesh.context=4', 'mesh.model=4'), 8),
        (('mesh.context=2', 'mesh.model=4', 'mesh.sequence_parallel=true'), 8),
    ],
)
def test_a_length_is_accepted_if_it_is_a_multiple_of_what_the_mesh_needs(
    overrides: tuple[str, ...], expected: int
) -> None:
    config = llama(*overrides)
    assert length_multiple(config) == expected
    for length in range(1000, 1033):
        train = config.train.model_copy(update={'seq_len': length})
        problems = incompatibilities(config.model_copy(update={'train': train}))
        is_refused = any(problem.path == 'train.seq_len' for problem in problems)
        assert is_refused == (length % expected > 0)
