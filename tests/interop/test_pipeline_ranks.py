"""Megatron-LM's pipeline ranks, with virtual stages, are merged and written as it has them, and
megatron-core itself takes them.
"""

import contextlib
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interop.oracles import (
    Arrays,
    arguments_of,
    logits,
    oracle_of,
    shard,
    weights_of,
    write_ranks,
)
from support import gather

from megajax.core.config import ConfigError
from megajax.interop.megatron.export import export_megatron
from megajax.interop.megatron.rank_files import FILE
from megajax.interop.megatron.ranks import import_megatron
from megajax.interop.megatron.torch_files import load_torch
from megajax.interop.megatron.torch_writer import Stored, torch_files
from megajax.runtime.checkpoint.open import open_model

LAYERS = 4
LAYER = re.compile(r'decoder\.layers\.(\d+)\.')
FIRST = 'embedding.'
LAST = 'decoder.final_layernorm.', 'output_layer.'
TABLE, HEAD = 'embedding.word_embeddings.weight', 'output_layer.weight'


def deep(name: str) -> tuple[Arrays, dict[str, Any]]:
    """The oracle's model with more layers, no two of which are alike; its vocabulary is padded."""
    oracle, random = oracle_of(name), np.random.default_rng(0)
    weights = {}
    for key, x in weights_of(oracle).items():
        names = [key]
        if match := LAYER.match(key):
            names = [key.replace(match[0], f'decoder.layers.{n}.') for n in range(LAYERS)]
        if match and match[1] != '0':
            continue
        for each in names:
            weights[each] = x + random.normal(0, 0.02, x.shape).astype(np.float32)
    return weights, arguments_of(oracle) | {'num_layers': LAYERS}


def chunk_of(weights: Arrays, layers: range, *, is_first: bool, is_last: bool) -> Arrays:
    """What a chunk of a pipeline has of a model, by hand."""
    found = {}
    for name, x in weights.items():
        match = LAYER.match(name)
        if match and int(match[1]) in layers:
            local = int(match[1]) - layers.start
            found[name.replace(match[0], f'decoder.layers.{local}.')] = x
        if (name.startswith(FIRST) and is_first) or (name.startswith(LAST) and is_last):
            found[name] = x
    if is_last and not is_first and HEAD not in weights:
        found[HEAD] = weights[TABLE]
    return found


def files_of(
    weights: Arrays, ranks: int, sizes: list[list[int]], *, gated: bool
) -> dict[str, dict[str, Arrays]]:
    """The models in the file of each rank; `sizes` has the layers of each stage, for each chunk."""
    files: dict[str, dict[str, Arrays]] = {}
    start = 0
    for index, of_stages in enumerate(sizes):
        for stage, size in enumerate(of_stages):
            layers = range(start, start + size)
            start += size
            ends = {'is_first': layers.start == 0, 'is_last': start == LAYERS}
            for rank in range(ranks):
                parts = {
                    key: shard(key, x, rank, ranks, gated=gated)
                    for key, x in chunk_of(weights, layers, **ends).items()
                }
                name = 'model' if len(sizes) == 1 else f'model{index}'
                files.setdefault(f'mp_rank_{rank:02}_{stage:03}', {})[name] = parts
    return files


def write(folder: Path, files: dict[str, dict[str, Arrays]], arguments: dict[str, Any]) -> Path:
    for name, models in files.items():
        path = folder / 'release' / name / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        stored = {
            model: {key: Stored(x.shape, x.dtype) for key, x in parts.items()}
            for model, parts in models.items()
        }
        contents = {'checkpoint_version': 3.0, 'iteration': 1, 'args': arguments, **stored}
        with torch_files([path], [contents]) as (file,):
            for parts in models.values():
                for x in parts.values():
                    file.append(x)
    (folder / 'latest_checkpointed_iteration.txt').write_text('release')
    return folder


@pytest.mark.parametrize(
    ('name', 'ranks', 'sizes', 'mesh'),
    [
        ('llama', 2, [[2, 2]], 'mesh.model=2'),
        ('gpt2', 1, [[1, 1], [1, 1]], 'mesh.stages=2 mesh.virtual_stages=2'),
        ('llama', 1, [[1, 0], [1, 2]], 'mesh.stages=4'),
    ],
)
def test_pipeline_ranks_are_merged_as_the_model_that_they_are_parts_of(
    tmp_path: Path, name: str, ranks: int, sizes: list[list[int]], mesh: str
) -> None:
    weights, arguments = deep(name)
    files = files_of(weights, ranks, sizes, gated=name == 'llama')
    write(tmp_path / 'in', files, arguments | {'pipeline_model_parallel_size': 2})
    overrides = [*mesh.split(), 'train.microbatches=4']
    import_megatron(tmp_path / 'in', tmp_path / 'run', overrides, ranks=ranks, stages=2)
    write_ranks(tmp_path / 'whole', weights, 1, arguments)
    import_megatron(tmp_path / 'whole', tmp_path / 'expected')
    found, expected = (gather(open_model(tmp_path / run).params) for run in ('run', 'expected'))
    assert found.keys() == expected.keys()
    for key, x in expected.items():
        np.testing.assert_array_equal(found[key], x, err_msg=key)


@pytest.mark.parametrize(
    ('name', 'ranks', 'stages', 'virtual'), [('gpt2', 2, 2, 2), ('llama', 1, 4, 1)]
)
def test_an_export_is_what_each_rank_of_a_pipeline_would_hold(
    tmp_path: Path, name: str, ranks: int, stages: int, virtual: int
) -> None:
    weights, arguments = deep(name)
    write_ranks(tmp_path / 'in', weights, 1, arguments)
    import_megatron(tmp_path / 'in', tmp_path / 'run')
    export_megatron(
        *(tmp_path / 'run', tmp_path / 'out'),
        ranks=ranks,
        stages=stages,
        virtual_stages=virtual,
        transformer_impl='local',
    )
    size = LAYERS // (stages * virtual)
    rows = [(0, 128 * (ranks - 1)), (0, 0)]  # a vocabulary of 128 on each rank
    padded = {key: np.pad(x, rows) if key in (TABLE, HEAD) else x for key, x in weights.items()}
    files = files_of(padded, ranks, [[size] * stages] * virtual, gated=name == 'llama')
    assert {path.name for path in (tmp_path / 'out/release').iterdir()} == files.keys()
    for folder, models in files.items():
        contents = load_torch(tmp_path / 'out/release' / folder / FILE)
        assert {key for key in contents if key.startswith('model')} == models.keys()
        for model, parts in models.items():
            assert contents[model].keys() == parts.keys()
            for key, x in parts.items():
                np.testing.assert_array_equal(contents[model][key], x, err_msg=key, strict=True)


def test_stages_that_do_not_fit_are_refused_with_the_numbers(tmp_path: Path) -> None:
    weights, arguments = deep('gpt2')
    files = files_of(weights, 1, [[1, 1], [1, 1]], gated=False)

    def refused(message: str, **options: Any) -> None:
        with pytest.raises(ConfigError, match=message):
            import_megatron(tmp_path / 'in', tmp_path / 'run', **options)

    write(tmp_path / 'in', files, arguments)
    refused('holds 2 pipeline stages, not 4', stages=4)
    copy = files['mp_rank_00_001']['model1'][HEAD]
    files['mp_rank_00_001']['model1'][HEAD] = copy + 1
    write(tmp_path / 'in', files, arguments)
    refused(f'{HEAD} differs from {TABLE} in .*mp_rank_00_000.*both should hold the same')
    files['mp_rank_00_001']['model1'][HEAD] = copy
    for key in [key for key in files['mp_rank_00_001']['model0'] if LAYER.match(key)]:
        del files['mp_rank_00_001']['model0'][key]
    write(tmp_path / 'in', files, arguments)
    refused(r'rank 00 hold 1 \+ 0 \+ 1 \+ 1 = 3 layers, but model.num_layers is 4')
    del files['mp_rank_00_001']['model1']
    write(tmp_path / 'in', files, arguments)
    refused('mp_rank_00_001.* holds no .model., nor .model0.')
    write_ranks(tmp_path / 'whole', weights, 1, arguments)
    import_megatron(tmp_path / 'whole', tmp_path / 'run')
    with pytest.raises(ConfigError, match=r'3 pipeline stages x 1 virtual stages must divide'):
        export_megatron(tmp_path / 'run', tmp_path / 'out', ranks=1, stages=3)
    with pytest.raises(ConfigError, match='2 virtual stages need a pipeline'):
        export_megatron(tmp_path / 'run', tmp_path / 'out', ranks=1, virtual_stages=2)


@pytest.mark.parametrize(('stages', 'virtual'), [(2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize('name', ['gpt2', 'llama'])
def test_megatron_core_loads_each_chunk_strictly_and_has_our_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, stages: int, virtual: int
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        pytest.importorskip(
            'megatron.core.models.gpt.gpt_model', reason='megatron-core is not installed'
        )
    import torch
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    # Attention's buffer, and dropout of 0, would ask for a GPU.
    monkeypatch.setattr(torch.cuda, 'current_device', lambda: 'cpu')
    monkeypatch.setattr(CudaRNGStatesTracker, 'fork', lambda *_: contextlib.nullcontext())
    weights, arguments = deep(name)
    write_ranks(tmp_path / 'in', weights, 1, arguments)
    import_megatron(tmp_path / 'in', tmp_path / 'run', ['train.dtype=float32'])
    export_megatron(
        *(tmp_path / 'run', tmp_path / 'out'),
        ranks=1,
        stages=stages,
        virtual_stages=virtual,
        transformer_impl='local',
    )
    token_BS = oracle_of(name)['tokens']
    expected = logits(tmp_path / 'run', token_BS, model=1)
    found = _logits_of_megatron(tmp_path / 'out', arguments, token_BS, stages, virtual)
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


def _logits_of_megatron(
    folder: Path, arguments: dict[str, Any], token_BS: np.ndarray, stages: int, virtual: int
) -> np.ndarray:
    """The logits of megatron-core's chunks, one after the other in this process."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import TransformerConfig

    store = torch.distributed.FileStore(str(folder / 'store'), 1)
    torch.distributed.init_process_group('gloo', store=store, rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        is_llama, hidden = arguments['swiglu'], None
        bias = arguments['add_bias_linear']
        config = TransformerConfig(
            num_layers=LAYERS // (stages * virtual),
            hidden_size=arguments['hidden_size'],
            num_attention_heads=arguments['num_attention_heads'],
            num_query_groups=arguments['num_query_groups'],
            kv_channels=arguments['kv_channels'],
            ffn_hidden_size=arguments['ffn_hidden_size'],
            normalization=arguments['normalization'],
            layernorm_epsilon=arguments['norm_epsilon'],
            gated_linear_unit=is_llama,
            activation_func=torch.nn.functional.silu if is_llama else _tanh_gelu,
            add_bias_linear=bias,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            use_cpu_initialization=True,
        )
        for index in range(stages * virtual):
            number, stage = divmod(index, stages)
            path = folder / 'release' / f'mp_rank_00_{stage:03}' / FILE
            contents = torch.load(path, weights_only=True)
            is_last = index == stages * virtual - 1
            model = GPTModel(
                config,
                get_gpt_layer_local_spec(normalization=arguments['normalization']),
                vocab_size=128,
                max_sequence_length=arguments['max_position_embeddings'],
                pre_process=index == 0,
                post_process=is_last,
                share_embeddings_and_output_weights=not arguments[
                    'untie_embeddings_and_output_weights'
                ],
                position_embedding_type=arguments['position_embedding_type'],
            )
            model.load_state_dict(contents['model' if virtual == 1 else f'model{number}'])
            if index:
                model.set_input_tensor(hidden)
            tokens = torch.from_numpy(token_BS.astype(np.int64))
            length = tokens.shape[1]
            masked = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
            with torch.no_grad():
                hidden = model(tokens, torch.arange(length).expand_as(tokens), masked)
        assert hidden is not None
        return hidden.numpy()
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def _tanh_gelu(x: Any) -> Any:
    import torch

    return torch.nn.functional.gelu(x, approximate='tanh')
