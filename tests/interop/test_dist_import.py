"""Checkpoints in the format torch_dist, which megatron-core wrote, give megatron-core's logits."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from interop.dist_writer import ITERATION, Part, write_checkpoint
from interop.oracles import Arrays, arguments_of, logits, oracle_of, shard, weights_of
from support import by_name, exhaustive, on_mesh, relative_error, slow

from megajax.core.config import Config, ConfigError
from megajax.interop.megatron.command_line.arguments import read_arguments
from megajax.interop.megatron.dist_checkpoint import open_checkpoint, open_chunks
from megajax.interop.megatron.dist_import import _blocks, merge_chunks
from megajax.interop.megatron.dist_metadata import _overlapping
from megajax.interop.megatron.export import export_megatron
from megajax.interop.megatron.rank_files import FILE, local_name, read_rank
from megajax.interop.megatron.ranks import import_megatron
from megajax.interop.megatron.weights import HEAD, from_megatron
from megajax.runtime.checkpoint.compare import parameter_shapes, read_parameter

STORED = Path(__file__).parent / 'torch_dist'  # see make_torch_dist.py
TABLE = 'embedding.word_embeddings.weight'
LIMIT = 2e-5  # relative, see support.relative_error


@pytest.fixture(params=['gpt2', 'llama', 'experts', 'experts_of_layers'])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    shutil.unpack_archive(
        STORED / f'{request.param}.tar.xz', tmp_path / request.param, filter='data'
    )
    return tmp_path / request.param


def test_a_checkpoint_of_megatron_core_gives_its_logits(
    stored: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = stored.parent / 'run'
    import_megatron(stored, run, ['train.dtype=float32', 'mesh.model=2'])
    with np.load(STORED / f'{stored.name}.npz') as oracle:
        error = relative_error(logits(run, oracle['tokens'], model=2), oracle['logits'])
    assert error < LIMIT
    said = 'left out: the state of the optimizer (32 entries)'
    assert (said in caplog.text) == (stored.name == 'gpt2')


def cut(
    name: str, x: np.ndarray, random: np.random.Generator, origin: tuple[int, ...] = ()
) -> Iterator[Part]:
    """Cut a tensor into chunks, which end where chance has it."""
    origin = origin or (0,) * x.ndim
    dim = int(random.integers(x.ndim))
    if x.shape[dim] < 2 or random.random() < 0.3:
        yield Part(name, origin, np.ascontiguousarray(x))
        return
    at = int(random.integers(1, x.shape[dim]))
    moved = tuple(start + at * (dim == index) for index, start in enumerate(origin))
    first, second = np.split(x, [at], axis=dim)
    yield from cut(name, first, random, origin)
    yield from cut(name, second, random, moved)


def stacked(weights: Arrays) -> Arrays:
    """The weights of all layers in one tensor, with the names of Transformer Engine."""
    layers = max(int(name.split('.')[2]) for name in weights if 'layers.' in name) + 1
    result = {}
    for name, x in weights.items():
        if 'layers.0.' in name:
            each = [weights[name.replace('layers.0.', f'layers.{n}.')] for n in range(layers)]
            of_all = name.replace('layers.0.', 'layers.')
            of_all = of_all.replace('input_layernorm.', 'self_attention.linear_qkv.layer_norm_')
            of_all = of_all.replace('pre_mlp_layernorm.', 'mlp.linear_fc1.layer_norm_')
            result[of_all] = np.stack(each)
        elif 'layers.' not in name:
            result[name] = x
    return result


@pytest.mark.parametrize('seed', [0, exhaustive(1), exhaustive(2), slow(3)])
@pytest.mark.parametrize('name', ['gpt2', 'llama'])
def test_parameters_do_not_depend_on_the_chunks(name: str, seed: int, tmp_path: Path) -> None:
    oracle, random = oracle_of(name), np.random.default_rng(seed)
    weights = weights_of(oracle)
    if seed % 2:
        weights = {key: x.astype(ml_dtypes.bfloat16) for key, x in weights.items()}
    tensors = dict(stacked(weights) if seed < 2 else weights)
    for key in tensors.keys() & {'embedding.word_embeddings.weight', 'output_layer.weight'}:
        tensors[key] = np.pad(tensors[key], [(0, 50), (0, 0)])  # as for more ranks
    parts = [part for key, x in tensors.items() for part in cut(key, x, random)]
    assert len(parts) > 2 * len(tensors)
    folder = write_checkpoint(tmp_path, parts, {key: x.shape for key, x in tensors.items()})
    config = Config(
        model=read_arguments(arguments_of(oracle), ''), mesh={'model': 2}, train={'seq_len': 16}
    )
    with on_mesh(config):
        merged = by_name(merge_chunks(config, open_checkpoint(folder)))
        expected = by_name(from_megatron(config, weights))
    for key, x in expected.items():
        np.testing.assert_array_equal(merged[key], x, err_msg=key)


@pytest.mark.parametrize('sizes', [(7,), (3, 4), (2, 3, 4), (2, 1, 5)])
def test_blocks_cover_a_range_once(sizes: tuple[int, ...]) -> None:
    places = np.arange(np.prod(sizes)).reshape(sizes)
    for start in range(places.size):
        for stop in range(start + 1, places.size + 1):
            blocks = list(_blocks(sizes, start, stop))
            found = np.concatenate([places[block].ravel() for block, _ in blocks])
            np.testing.assert_array_equal(found, np.arange(start, stop))
            rows = [np.arange(stop - start)[part] for _, part in blocks]
            np.testing.assert_array_equal(np.concatenate(rows), np.arange(stop - start))
            assert len(blocks) < 2 * len(sizes)


SMALL = {
    'num_layers': 1,
    'hidden_size': 4,
    'num_attention_heads': 1,
    'max_position_embeddings': 8,
    'vocab_size': 8,
    'normalization': 'RMSNorm',
    'add_bias_linear': False,
    'untie_embeddings_and_output_weights': True,
    'position_embedding_type': 'rope',
}


def small_parts() -> list[Part]:
    shapes = {
        'embedding.word_embeddings.weight': (8, 4),
        'decoder.layers.0.input_layernorm.weight': (4,),
        'decoder.layers.0.self_attention.linear_qkv.weight': (12, 4),
        'decoder.layers.0.self_attention.linear_proj.weight': (4, 4),
        'decoder.layers.0.pre_mlp_layernorm.weight': (4,),
        'decoder.layers.0.mlp.linear_fc1.weight': (16, 4),
        'decoder.layers.0.mlp.linear_fc2.weight': (4, 16),
        'decoder.final_layernorm.weight': (4,),
        'output_layer.weight': (8, 4),
    }
    return [
        Part(name, (0,) * len(shape), np.ones(shape, np.float32)) for name, shape in shapes.items()
    ]


def write_small(folder: Path, parts: list[Part], **shapes: tuple[int, ...]) -> Path:
    sizes = {part.name: part.x.shape for part in small_parts()} | shapes
    return write_checkpoint(folder, parts, sizes, args=SMALL)


def refused(folder: Path, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        import_megatron(folder, folder.parent / 'run')
    assert not (folder.parent / 'run').exists()


def test_a_vocabulary_with_more_tokens_than_rows_is_refused_with_the_limit(tmp_path: Path) -> None:
    folder = write_small(tmp_path / 'in', small_parts())
    said = 'embedding has 8 rows, but model.vocab_size is 9; set model.vocab_size .* at most 8'
    with pytest.raises(ConfigError, match=said):
        import_megatron(folder, tmp_path / 'run', ['model.vocab_size=9'])


@pytest.mark.parametrize('name', ['experts', 'experts_of_layers'])
def test_experts_are_separate_tensors_whatever_way_megatron_core_stacks_them(
    name: str, tmp_path: Path
) -> None:
    shutil.unpack_archive(STORED / f'{name}.tar.xz', tmp_path, filter='data')
    checkpoint = open_checkpoint(tmp_path / ITERATION)
    assert checkpoint.arguments['num_experts'] == 4  # in the entry common_state
    assert checkpoint.progress.iteration == 5
    mlp, expert = 'decoder.layers.{}.mlp', 'experts.local_experts.{}.linear_fc'
    shapes = {f'{expert}1.weight': (16, 16), f'{expert}2.weight': (16, 8)}
    shapes |= {'router.weight': (4, 16), 'router.expert_bias': (4,)}
    assert {key: x.shape for key, x in checkpoint.tensors.items() if '.mlp.' in key} == {
        f'{mlp}.{key}'.format(layer, index): shape
        for key, shape in shapes.items()
        for layer in range(2)
        for index in range(4)
    }


def assembled(folder: Path) -> Arrays:
    """The whole tensors of a checkpoint, by the names of the local layer specification."""
    checkpoint = open_checkpoint(folder / ITERATION)
    arrays = {key: np.full(x.shape, np.nan, x.dtype) for key, x in checkpoint.tensors.items()}
    for key, chunk, x in open_chunks(checkpoint.folder, checkpoint.tensors):
        ends = zip(chunk.offsets, chunk.sizes, strict=True)
        arrays[key][tuple(slice(start, start + size) for start, size in ends)] = x
    return arrays


def test_stacked_and_separate_experts_hold_the_same_elements(tmp_path: Path) -> None:
    for name in ('experts', 'experts_of_layers'):
        shutil.unpack_archive(STORED / f'{name}.tar.xz', tmp_path / name, filter='data')
    separate = assembled(tmp_path / 'experts_of_layers')
    for key, x in assembled(tmp_path / 'experts').items():
        assert np.isfinite(x).all()
        np.testing.assert_array_equal(x, separate[key], err_msg=key)


def test_experts_are_exported_bit_for_bit(tmp_path: Path) -> None:
    shutil.unpack_archive(STORED / 'experts.tar.xz', tmp_path / 'in', filter='data')
    whole = assembled(tmp_path / 'in')
    import_megatron(tmp_path / 'in', tmp_path / 'run', ['train.dtype=float32', 'mesh.model=2'])
    export_megatron(tmp_path / 'run', tmp_path / 'out', ranks=2)
    for rank in range(2):
        tensors = read_rank(tmp_path / 'out' / 'release' / f'mp_rank_0{rank}' / FILE).chunks[0]
        assert tensors.keys() == whole.keys()
        for name, x in whole.items():
            if name not in (TABLE, HEAD):  # which have more padding
                expected = shard(name, x, rank, 2, gated=True)
                np.testing.assert_array_equal(tensors[name], expected, err_msg=name)
    import_megatron(tmp_path / 'out', tmp_path / 'again')
    with pytest.raises(ConfigError, match=r'16 .* and model.experts.ffn_size=8'):
        export_megatron(tmp_path / 'run', tmp_path / 'more', ranks=16)
    first, again = (tmp_path / name / 'checkpoints' / '0' for name in ('run', 'again'))
    shapes = parameter_shapes(first)
    assert shapes['layers.experts.up.weight'] == (2, 4, 16, 2, 8)
    for name in shapes:
        np.testing.assert_array_equal(read_parameter(first, name), read_parameter(again, name))


def test_grouped_experts_have_the_names_of_separate_ones() -> None:
    mlp = 'decoder.layers.3.mlp.experts'
    assert local_name(f'{mlp}.linear_fc1.weight12') == f'{mlp}.local_experts.12.linear_fc1.weight'
    assert local_name(f'{mlp}.linear_fc2.bias0') == f'{mlp}.local_experts.0.linear_fc2.bias'


@pytest.mark.parametrize('seed', range(20))
def test_two_boxes_overlap_if_they_share_an_element(seed: int) -> None:
    random = np.random.default_rng(seed)
    boxes = random.integers(0, 6, (int(random.integers(2, 6)), 2, 3))
    boxes.sort(axis=1)
    boxes[:, 1] += 1
    count = np.zeros((7, 7, 7), int)
    for start, end in boxes:
        count[tuple(map(slice, start, end))] += 1
    assert (_overlapping(boxes) is not None) == (count.max() > 1)


NORM = 'decoder.final_layernorm.weight'


@pytest.mark.parametrize(
    ('name', 'changed', 'message'),
    [
        (HEAD, [Part(HEAD, (4, 0), np.ones((8, 4), np.float32))], 'is not within'),
        (HEAD, [Part(HEAD, (0, 0), np.ones((7, 4), np.float32))], 'hold 28 of 32 elements'),
        (
            HEAD,
            [Part(HEAD, (start, 0), np.ones((4, 4), np.float32)) for start in (0, 3)],
            r'its chunk at \(3, 0\) overlaps another',
        ),
        (HEAD, [Part(HEAD, (0, 0), np.ones((8, 4), np.int32))], 'has dtype int32'),
        (HEAD, [Part(HEAD, (0, 0), np.ones((8, 0), np.float32))], 'has no elements'),
        (NORM, [Part(NORM, (0,), np.full(4, np.nan, np.float32))], 'are not finite'),
    ],
    ids=['beyond', 'gap', 'overlap', 'dtype', 'empty', 'nan'],
)
def test_chunks_that_are_no_tensor_are_refused_by_name(
    name: str, changed: list[Part], message: str, tmp_path: Path
) -> None:
    kept = [part for part in small_parts() if part.name != name]
    write_small(tmp_path / 'in', [*kept, *changed])
    refused(tmp_path / 'in', rf'{name}.*{message}')


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    folder = write_small(tmp_path / 'in', small_parts())
    whole = {path: path.read_bytes() for path in folder.iterdir()}
    first, index = folder / '__0_0.distcp', folder / '.metadata'

    def damaged(path: Path, content: bytes, message: str) -> None:
        path.write_bytes(content)
        refused(tmp_path / 'in', rf'{folder}.*{message}')
        path.write_bytes(whole[path])

    damaged(
        first,
        whole[first][:-10],
        rf'__0_0.distcp: {HEAD} at \(0, 0\): should end at byte .* cut short',
    )
    damaged(first, b'x' * len(whole[first]), r'embedding.* at \(0, 0\): not a zip archive')
    damaged(first, b'', 'is empty')
    damaged(index, whole[index][:-10], 'cut short or damaged')
    moved = whole[index].replace(b'__0_0.distcp', b'../0_0.distc')
    damaged(index, moved, "is stored in '../0_0.distc', which is not a file name")
    other = whole[index].replace(b'__0_0.distcp', b'__1_0.distcp')
    damaged(index, other, r'__1_0.distcp: embed.* is float32 \(4,\), but .metadata .* \(8, 4\)')
    half = whole[index].replace(b'float32', b'float16')
    damaged(index, half, r'embed.* is float32 \(8, 4\), but .metadata says float16')
    damaged(folder / 'metadata.json', b'{"sharded_backend": "zarr"}', 'zarr.*--ckpt-format')
    damaged(folder / 'common.pt', whole[folder / 'common.pt'][:-50], 'cut short')
    (folder / 'metadata.json').unlink()  # as --use-megatron-fsdp saves checkpoints
    refused(
        tmp_path / 'in',
        r'formats torch_dcp and fsdp_dtensor, .* converts torch_dcp .* --ckpt-format torch_dist',
    )
    (folder / 'metadata.json').write_bytes(whole[folder / 'metadata.json'])
    first.unlink()
    refused(tmp_path / 'in', rf'{first}: is missing, and should hold embedding')


def test_tensors_of_another_model_are_refused(tmp_path: Path) -> None:
    parts = [*small_parts()[1:], Part('decoder.layers.0.mlp.router.weight', (0,), np.ones(2))]
    sizes = {part.name: part.x.shape for part in parts}
    write_checkpoint(tmp_path / 'in', parts, sizes, args=SMALL)
    refused(tmp_path / 'in', r'missing tensors \(1 .*\n.*unexpected.*mlp.router.weight')
    with pytest.raises(ConfigError, match='leave --tensor-parallel and --pipeline-parallel out'):
        import_megatron(tmp_path / 'in', tmp_path / 'run', ranks=2)
