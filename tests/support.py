"""What several tests need: small configs and batches, and parameters as numpy arrays."""

import functools
import importlib.util
import io
import math
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import (
    AbstractContextManager,
    chdir,
    contextmanager,
    redirect_stderr,
    redirect_stdout,
)
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
import tokenizers
from flax import nnx

from megajax.commands.main import main
from megajax.core.config import Config
from megajax.core.counts.declaration import Parameter
from megajax.core.counts.parameters import dim_sizes, shape_of
from megajax.core.model.parameters import map_parameters
from megajax.core.model.transformer import LanguageModel, model_graph
from megajax.core.parallel.layout import Layout
from megajax.core.parallel.mesh import concrete, mesh_for
from megajax.core.train.step import TrainState, init_state
from megajax.runtime.data.text.tokenizer import byte_tokenizer

ROOT = Path(__file__).parents[1]
# Options with which a program is compiled as a user's is, not as quickly as `conftest.py` has it.
AS_SHIPPED = {'xla_cpu_use_fusion_emitters': True} if jax.__version__.startswith('0.10.') else {}
# Together: tied and untied, learned and rotary positions, both norms, GELU and SwiGLU, MHA and GQA
# (key/value heads at least and fewer than `model`), norms of queries and keys by the head and over
# all heads, norms before sublayers and after them, biases and none, vocabularies that no mesh
# divides, dropout, label smoothing and z-loss. Eight heads for model=8.
MODELS: dict[str, dict[str, Any]] = {
    'gpt': {
        'model': {'vocab_size': 1000, 'activation': 'gelu', 'dropout': 0.1},
        'loss': {'label_smoothing': 0.1},
    },
    'llama': {
        'model': {
            'vocab_size': 1037,
            'num_kv_heads': 2,
            'norm': 'rmsnorm',
            'activation': 'swiglu',
            'position': 'rope',
            'qk_norm': True,
            'bias': False,
            'tie_embeddings': False,
        },
        'loss': {'label_smoothing': 0.1, 'z_loss': 1e-3},
    },
    'olmo2': {
        'model': {
            'vocab_size': 1037,
            'num_kv_heads': 2,
            'norm': 'rmsnorm',
            'norm_position': 'after',
            'activation': 'swiglu',
            'position': 'rope',
            'qk_norm': 'all',
            'bias': False,
            'tie_embeddings': False,
        },
        'loss': {'z_loss': 1e-3},
    },
    'bert': {
        'model': {
            'vocab_size': 1000,
            'objective': 'masked_lm',
            'activation': 'gelu',
            'dropout': 0.1,
        }
    },
}

MODELS['both_norms'] = {
    **MODELS['olmo2'],
    'model': MODELS['olmo2']['model']
    | {
        'norm_position': 'both',
        'qk_norm': True,
        'zero_centered_norm': True,
        'embedding_scale': 8.0,
        'query_scale': 0.4,
        'tie_embeddings': True,
    },
}

# LayerNorms, also of queries and keys over all heads.
MODELS['layer_norms'] = {
    **MODELS['olmo2'],
    'model': MODELS['olmo2']['model'] | {'norm': 'layernorm', 'zero_centered_norm': True},
}

# Attention sinks, with and without a window, as in gpt-oss.
MODELS['sinks'] = {
    **MODELS['llama'],
    'model': MODELS['llama']['model'] | {'attention_sinks': True, 'layers': [{'window': 4}, {}]},
}

# Layers of different kinds in turn: with a window, with another theta, and without positions.
MODELS['windows'] = {
    **MODELS['llama'],
    'model': MODELS['llama']['model']
    | {
        'num_layers': 4,
        'layers': [{'window': 4}, {'rope_theta': 1e6}, {'window': 6, 'position': 'none'}],
    },
}

# Mixtures of experts: as in Mixtral, and with everything that other models add, and drops.
MODELS['experts'] = {
    **MODELS['llama'],
    'model': MODELS['llama']['model']
    | {
        'experts': {
            **{'count': 8, 'active': 2, 'ffn_size': 32, 'shared_ffn_size': 48},
            **{'balance_loss': 0.1, 'z_loss': 0.01},
        }
    },
}
# Some layers with an MLP: the first one, or every second one.
OF_EXPERTS = MODELS['experts']['model']
MODELS['first_dense'] = {
    **MODELS['llama'],
    'model': OF_EXPERTS | {'experts': OF_EXPERTS['experts'] | {'first_dense': 1}},
}
MODELS['half_dense'] = {
    **MODELS['llama'],
    'model': OF_EXPERTS | {'num_layers': 4, 'layers': [{'experts': None}, {'window': 4}]},
}
MODELS['bert_experts'] = {
    'model': MODELS['bert']['model'] | {'experts': {'count': 4, 'active': 2, 'ffn_size': 32}},
}
MODELS['capacity'] = {
    **MODELS['llama'],
    'model': MODELS['llama']['model']
    | {
        'bias': True,
        'activation': 'clamped_swiglu',
        'experts': {
            **{'count': 8, 'active': 3, 'ffn_size': 32, 'scores': 'sigmoid', 'scale': 2.5},
            **{'router_bias': True, 'selection_bias': True, 'groups': 4, 'active_groups': 2},
            **{'balance_loss': 0.1, 'balance_over': 'sequence'},
            **{'capacity': 1.0, 'capacity_group': 4},
        },
    },
}

SIZES = {'num_layers': 2, 'hidden_size': 64, 'num_heads': 8, 'max_seq_len': 32}
TRAIN = {'batch_size': 8, 'seq_len': 32, 'dtype': 'float32'}


def slow(*values: Any) -> Any:
    """A case for `make test-slow`, where another one shows the same mechanism in `make test`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def exhaustive(*values: Any) -> Any:
    """A case for `.ci/full`, where another one shows the same mechanism in `make test-slow`."""
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.exhaustive])


def more(*values: Any) -> Any:
    """A case for `make test-faults`, where another one shows the same mechanism in `make test`."""
    return pytest.param(*values, marks=pytest.mark.faults)


def make_config(
    name: str = 'gpt',
    data: int = 1,
    model: int = 1,
    /,
    *,
    sequence_parallel: bool = False,
    **sections: dict[str, Any],
) -> Config:
    """One of MODELS on a mesh of data x model; `sections` are laid over it."""
    config = {
        'mesh': {'data': data, 'model': model, 'sequence_parallel': sequence_parallel},
        'train': TRAIN,
        **MODELS[name],
    }
    config['model'] = SIZES | config['model']
    return Config(
        **{key: config.get(key, {}) | sections.get(key, {}) for key in {*config, *sections}}
    )


def on_mesh(config: Config) -> AbstractContextManager[Any]:
    """The mesh that the config asks for, as the current one."""
    return jax.set_mesh(mesh_for(config))


def _images(config: Config, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Images of random sizes in the rows of a batch, but for the last, which has none."""
    vision, (rows, length) = config.vision, (config.train.batch_size, config.train.seq_len)
    assert vision is not None
    if config.relevance is None:
        side = math.isqrt(vision.vectors)
        units = random.integers(1, side + 1, size=(rows, vision.images, 2))
    else:
        units = np.broadcast_to(config.relevance.units, (rows, vision.images, 2)).copy()
    units[-1] = 0
    grid = vision.merge_size * units
    index = np.full((rows, length), -1)
    for row in range(rows):
        start = 1
        for slot in range(vision.images):
            count = min(units[row, slot].prod(), vision.vectors)
            count = min(count, 1) if vision.is_crossed else count
            index[row, start : start + count] = slot * vision.vectors + np.arange(count)
            start += count + 1
    shape = rows, vision.images, vision.max_patches, vision.pixels
    return {
        'pixels': random.integers(256, size=shape).astype(np.uint8),
        'image_grid': grid.astype(np.int32),
        'image_index': index.astype(np.int32),
        'positions': np.sort(random.integers(length, size=(rows, length, 3)), axis=1).astype(
            np.int32
        ),
    }


def make_batch(config: Config, *, seed: int = 0) -> dict[str, np.ndarray]:
    """A batch of random tokens; later rows have more tokens that count, so that no two data shards
    have as many.
    """
    random = np.random.default_rng(seed)
    rows, length = config.train.batch_size, config.train.seq_len
    token = random.integers(config.model.vocab_size, size=(rows, length + 1), dtype=np.int32)
    counts = random.random((rows, length)) < np.linspace(0.2, 1, rows)[:, None]
    batch = {
        'tokens': token[:, :-1],
        'labels': token[:, 1:],
        'loss_mask': counts.astype(np.float32),
    }
    if config.vision is not None:
        batch |= _images(config, random)
        batch['loss_mask'] *= batch['image_index'] < 0
    if config.model.causal:
        return batch
    place, rest = np.arange(length)[None], {'swapped': random.integers(2, size=(rows, 1))}
    rest |= {
        'token_types': place > length // 2,
        'segment_ids': place >= length - np.arange(rows)[:, None],
    }  # the end is padding
    batch['loss_mask'] *= rest['segment_ids'] == 0
    return batch | {
        name: np.broadcast_to(x, (rows, x.shape[1])).astype(np.int32) for name, x in rest.items()
    }


def pack(batch: dict[str, np.ndarray], lengths: list[int]) -> dict[str, np.ndarray]:
    """The batch with each row cut into documents of these lengths."""
    segment = np.repeat(np.arange(len(lengths)), lengths)
    position = np.concatenate([np.arange(length) for length in lengths])
    whole = {'segment_ids': segment, 'positions': position}
    return batch | {
        name: np.broadcast_to(x, batch['tokens'].shape).astype(np.int32)
        for name, x in whole.items()
    }


def pack_at_random(batch: dict[str, np.ndarray], seed: int = 0) -> dict[str, np.ndarray]:
    """The batch with each row cut anywhere: into documents of one token, into longer ones, or not
    at all.
    """
    random, (rows, length) = np.random.default_rng(seed), batch['tokens'].shape
    starts = random.random((rows, length)) < random.permutation(np.linspace(0, 1, rows))[:, None]
    starts[:, 0] = False
    place = np.arange(length)
    first = np.maximum.accumulate(np.where(starts, place, 0), axis=1)
    whole = {'segment_ids': np.cumsum(starts, axis=1), 'positions': place - first}
    return batch | {name: x.astype(np.int32) for name, x in whole.items()}


def abstract_state(config: Config) -> TrainState:
    """The shapes of a state and its places on the current mesh."""
    return _abstract_state(config, jax.sharding.get_mesh())


@functools.cache
def _abstract_state(config: Config, _: jax.sharding.Mesh) -> TrainState:
    return concrete(jax.eval_shape(lambda: init_state(config)))


def random_params(config: Config, std: float) -> nnx.State:
    """Parameters of which none is zero or one, in their places on the current mesh, those of a
    padded shard apart; made in numpy, so without compiling.
    """
    random = np.random.default_rng(1)
    abstract = abstract_state(config).params
    sizes, layout = dim_sizes(config.model), Layout.of(config)

    def draw(declared: Parameter, x: jax.ShapeDtypeStruct) -> jax.Array:
        value = random.normal(0, std, shape_of(declared.dims, sizes)).astype(x.dtype)
        if declared.dims[0] in 'LΔΛ':
            value = value[np.array(layout.layer_order(len(value)))]
        padding = [(0, size - own) for size, own in zip(x.shape, value.shape, strict=True)]
        return jax.device_put(np.pad(value, padding), x.sharding)

    return map_parameters(draw, abstract)


def random_state(config: Config, std: float = 0.05) -> TrainState:
    """The state before the first step with `random_params`; to compile what `init_state` draws
    takes ten times as long.
    """
    return init_state(config, random_params(config, std=std))


def graph_of(config: Config) -> nnx.GraphDef[LanguageModel]:
    """The model of a config without its parameters, for `nnx.merge`."""
    return model_graph(config.model, Layout.of(config))


def by_name(params: nnx.State) -> dict[str, Any]:
    """{'layers.mlp.up.weight': leaf, ...}"""
    return {'.'.join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(params)}


def gather(params: nnx.State) -> dict[str, np.ndarray]:
    """The parameters by name, as whole numpy arrays; what pads a shard is zero and left out."""
    arrays = by_name(params)
    if 'embedding.table' not in arrays:  # a part of a model, which is never at rest
        return {name: np.asarray(x) for name, x in arrays.items()}
    every = by_name(map_parameters(lambda declared, _: declared, params))
    widths = {  # of the letters that are padded, which no vector is
        letter.upper(): size
        for name, declared in every.items()
        if not declared.is_matrix
        for letter, size in zip(declared.dims, arrays[name].shape, strict=True)
    }

    def unpadded(dims: str, x: jax.Array) -> np.ndarray:
        kept = tuple(
            slice(min(own, widths.get(letter.upper(), own)))
            for letter, own in zip(dims, x.shape, strict=True)
        )
        whole, part = np.asarray(x), np.asarray(x)[kept]
        assert np.count_nonzero(whole) == np.count_nonzero(part)
        return part

    return {name: unpadded(every[name].dims, x) for name, x in arrays.items()}


def in_layer_order(arrays: Mapping[str, np.ndarray], config: Config) -> dict[str, np.ndarray]:
    """Parameters by name with the layers in the order of the model, not of its stages."""
    layout = Layout.of(config)
    return {
        name: x[np.argsort(layout.layer_order(len(x)))] if name.startswith('layers.') else x
        for name, x in arrays.items()
    }


def with_gradients(function: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, ...]]:
    """The output and the gradients, as a function of the output's gradient and the inputs."""

    def both(do: jax.Array, *given: jax.Array) -> tuple[jax.Array, ...]:
        o, pullback = jax.vjp(function, *given)
        return o, *pullback(do)

    return jax.jit(both)


def relative_error(actual: Any, expected: Any) -> float:
    """max |actual - expected| / max |expected|, over one array; 0 where both are all zeros."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    difference, size = np.abs(actual - expected).max(), np.abs(expected).max()
    return float(difference / size) if difference else 0.0


def assert_close(actual: Mapping[str, Any], expected: Mapping[str, Any], limit: float) -> None:
    """Each array is within `limit` of its namesake, by `relative_error`."""
    assert actual.keys() == expected.keys()
    errors = {name: relative_error(actual[name], expected[name]) for name in actual}
    wrong = {name: error for name, error in errors.items() if not error <= limit}
    assert not wrong, f'above {limit}: {wrong}'


def start_token(path: Path) -> str:
    """The tokenizer.json of one token per byte, 256 for the end of a document and, as Llama's have
    one, <s>, 257, for its start.
    """
    byte_tokenizer(['<s>']).save(path)
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single='<s> $A', special_tokens=[('<s>', 257)]
    )
    backend.save(str(path))
    return str(path)


@contextmanager
def disk_full_at(size: int) -> Iterator[None]:
    """No file that this process writes gets longer than `size` bytes: an error says so, as it does
    of a full disk.
    """
    limit, handler = (
        resource.getrlimit(resource.RLIMIT_FSIZE),
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)


def write_run(folder: Path, config: str, *, split: str = '6,2,0') -> Path:
    """A small corpus, and `config` on it as small.yaml, in `folder`; where the split has nothing to
    validate on, no run compiles an evaluation.
    """
    (folder / 'corpus').mkdir()
    for number in range(8):
        (folder / f'corpus/{number}.txt').write_text(
            f'def f{number}(x):\n    return x + {number}\n' * 30
        )
    (folder / 'small.yaml').write_text(
        config + f'data: {{corpus: {folder}/corpus, tokenizer: bytes, split: "{split}"}}\n'
    )
    return folder


def megajax(*arguments: object, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """What `megajax ARGUMENTS` in a folder writes and exits with, without a process of its own."""
    words, out, error, code = ['megajax', *map(str, arguments)], io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, 'argv', words),
        chdir(folder),
        redirect_stdout(out),
        redirect_stderr(error),
    ):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(words, code, out.getvalue(), error.getvalue())


def load_script(name: str, folder: str = 'benchmarks') -> ModuleType:
    """A program of `benchmarks/` or another folder as a module, which may import its neighbors."""
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f'{name}.py')
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.append(str(ROOT / folder))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / folder))
    return module
