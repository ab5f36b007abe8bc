"""Checkpoints as Megatron-LM has them, of the models of `tests/runtime/data/oracles`; logits of
runs, and training steps on the batch of an oracle.
"""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from support import graph_of

from megajax.core.config import Config
from megajax.core.model.computation import Computation
from megajax.core.train.feed import Batch, place_batch
from megajax.core.train.step import init_state, make_train_step
from megajax.interop.megatron.rank_files import FILE
from megajax.interop.megatron.torch_writer import Stored, torch_files
from megajax.interop.megatron.weights import to_megatron
from megajax.runtime.checkpoint.open import open_model

ORACLES = Path(__file__).parents[1] / 'runtime/data' / 'oracles'

Arrays = dict[str, np.ndarray]
Steps = tuple[list[float], list[float], Arrays]


def oracle_of(name: str) -> Arrays:
    with np.load(ORACLES / f'{name}_tp2.npz') as file:
        return dict(file)


def arguments_of(oracle: Arrays) -> dict[str, Any]:
    """Megatron-LM's arguments for the oracle's model."""
    given = json.loads(str(oracle['config']))
    return {
        'num_layers': given['layers'],
        'hidden_size': given['hidden'],
        'num_attention_heads': given['heads'],
        'group_query_attention': given['kv_heads'] != given['heads'],
        'num_query_groups': given['kv_heads'],
        'kv_channels': given['head_dim'],
        'ffn_hidden_size': given['ffn_hidden'],
        'vocab_size': given['vocab'],
        'max_position_embeddings': given['seq'],
        'normalization': given['norm'],
        'swiglu': given['act'] == 'swiglu',
        'position_embedding_type': given['pos'],
        'add_bias_linear': not given['nobias'],
        'untie_embeddings_and_output_weights': bool(given['untie']),
        'norm_epsilon': given['eps'],
        'hidden_dropout': 0.0,
        'pipeline_model_parallel_size': 1,
    }


def shard(name: str, x: np.ndarray, rank: int, ranks: int, *, gated: bool) -> np.ndarray:
    """What a rank of Megatron-LM holds of a merged weight: its rows, its columns, its half of gate
    and of up, or all of it.
    """
    if 'word_embeddings' in name or 'output_layer' in name:
        return np.split(x, ranks)[rank]
    if 'linear_fc1' in name and gated:
        return np.concatenate([np.split(half, ranks)[rank] for half in np.split(x, 2)])
    if 'linear_qkv' in name or 'linear_fc1' in name:
        return np.split(x, ranks)[rank]
    if name.endswith(('linear_proj.weight', 'linear_fc2.weight')):
        return np.split(x, ranks, axis=1)[rank]
    return x


def write_ranks(
    folder: Path,
    weights: Arrays,
    ranks: int,
    arguments: dict[str, Any] | None = None,
    **others: Any,
) -> None:
    """A checkpoint as Megatron-LM has it, of these whole weights."""
    gated = bool(arguments and arguments['swiglu'])
    for rank in range(ranks):
        parts = {name: shard(name, x, rank, ranks, gated=gated) for name, x in weights.items()}
        write_file(
            folder / 'iter_0000005' / f'mp_rank_{rank:02}' / FILE, parts, arguments, **others
        )
    (folder / 'latest_checkpointed_iteration.txt').write_text('5\n')


def write_file(path: Path, parts: Arrays, arguments: dict[str, Any] | None, **others: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    model = {name: Stored(x.shape, x.dtype) for name, x in parts.items()}
    contents = {'checkpoint_version': 3.0, 'iteration': 5, 'model': model, **others} | (
        {'args': arguments} if arguments else {}
    )
    with torch_files([path], [contents]) as (file,):
        for x in parts.values():
            file.append(x)


def under(prefix: str, oracle: Arrays) -> Arrays:
    """The oracle's arrays by Megatron's names: p parameters, g gradients, pf parameters after the
    training steps.
    """
    return {
        key.removeprefix(f'{prefix}/'): x
        for key, x in oracle.items()
        if key.startswith(f'{prefix}/')
    }


def weights_of(oracle: Arrays) -> Arrays:
    return under('p', oracle)


def batch_of(oracle: Arrays, config: Config) -> Batch:
    tokens, labels = oracle['tokens'].astype(np.int32), oracle['labels'].astype(np.int32)
    return place_batch(
        {'tokens': tokens, 'labels': labels, 'loss_mask': np.ones(tokens.shape, config.train.dtype)}
    )


def steps_of(config: Config, params: nnx.State, oracle: Arrays) -> Steps:
    """Losses and gradient norms of as many steps as the oracle has, on the current mesh, and the
    parameters after them by Megatron's names.
    """
    state, batch = init_state(config, params), batch_of(oracle, config)
    train_step, metrics = make_train_step(config), []
    for _ in oracle['train_losses']:
        state, step_metrics = train_step(state, batch)
        metrics.append(jax.device_get(step_metrics))
    weights = to_megatron(config, state.params)
    return [step['loss'] for step in metrics], [step['grad_norm'] for step in metrics], weights


def logits(run: Path, token_BS: np.ndarray, *, model: int) -> np.ndarray:
    opened = open_model(run, ['mesh.data=1', f'mesh.model={model}'])
    with jax.set_mesh(opened.mesh):
        graph, computation = graph_of(opened.config), Computation.of(opened.config)
        forward = jax.jit(lambda params, token_BS: nnx.merge(graph, params)(token_BS, computation))
        placed = jax.device_put(token_BS.astype(np.int32), jax.P('data', None))
        return np.asarray(forward(opened.params, placed))[:, :, : opened.config.model.vocab_size]
