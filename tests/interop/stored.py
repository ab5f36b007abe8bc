"""What `data` holds (`make_data.py`), and how its models are used in tests."""

import json
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from support import graph_of

from megajax.core.config import Config
from megajax.core.model.computation import Computation
from megajax.interop.huggingface.families import read_family
from megajax.interop.huggingface.tensors import read_tensors

DATA = Path(__file__).parent / 'data'
NAMES = sorted(path.stem for path in DATA.glob('*.npz'))
LIMIT = 2e-4  # of logits of size 1 to 10, in fp32


def config_of(name: str, data: int = 1, model: int = 1, experts: int = 1) -> Config:
    keys = read_family(json.loads((DATA / name / 'config.json').read_text()), name)[1]
    return Config(
        model=keys,
        mesh={'data': data, 'model': model, 'experts': experts},
        train={'seq_len': 16, 'dtype': 'float32'},
    )


def logits(config: Config, params: nnx.State, token_BS: np.ndarray) -> np.ndarray:
    """Of the entries of the vocabulary, on the current mesh."""
    placed = jax.device_put(token_BS.astype(np.int32), jax.P('data', None))

    @jax.jit
    def forward(params: nnx.State, token_BS: jax.Array) -> jax.Array:
        return nnx.merge(graph_of(config), params)(token_BS, Computation.of(config))

    logit_BSV = forward(params, placed)
    return np.asarray(logit_BSV)[:, :, : config.model.vocab_size]


def tensors_of(folder: Path) -> list[np.ndarray]:
    return list(read_tensors(folder).values())


def assert_same_tensors(actual: Path, expected: Path) -> None:
    a, b = read_tensors(actual), read_tensors(expected)
    assert a.keys() == b.keys()
    for name, x in b.items():
        assert (a[name].dtype, a[name].shape, a[name].tobytes()) == (
            x.dtype,
            x.shape,
            x.tobytes(),
        ), name
