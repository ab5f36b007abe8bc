"""Both heads of a BERT of transformers' give transformers' logits on every mesh, and its tensors
come back bit for bit.

`bert` holds a tiny random model and what transformers made of some tokens (`make_bert.py`); where
transformers is installed, it is asked itself, with other settings.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from support import by_name, exhaustive, graph_of, on_mesh

from megajax.core.config import Config, ConfigError
from megajax.core.model.computation import Computation
from megajax.core.model.rows import Rows
from megajax.interop.huggingface.directories import export_huggingface, import_huggingface
from megajax.interop.huggingface.families import read_family, write_family
from megajax.interop.huggingface.tensors import read_tensors
from megajax.interop.huggingface.weights import from_huggingface

BERT = Path(__file__).parent / 'bert'
LIMIT = 2e-4  # of logits of size 1 to 10, in fp32
MESHES = [exhaustive((1, 1, False)), (2, 2, False), (1, 4, True)]


def heads_on_mesh(
    folder: Path, inputs: Mapping[str, np.ndarray], *mesh: int
) -> dict[str, np.ndarray]:
    """The logits of both heads of the model in `folder`."""
    data, model, sequence_parallel = mesh
    keys = read_family(json.loads((folder / 'config.json').read_text()), str(folder))[1]
    config = Config(
        model=keys,
        mesh={'data': data, 'model': model, 'sequence_parallel': sequence_parallel},
        train={'seq_len': 24, 'dtype': 'float32'},
    )
    with on_mesh(config):
        params = from_huggingface(config, read_tensors(folder), source=str(folder))
        graph = graph_of(config)
        names = ('input_ids', 'token_type_ids', 'attention_mask')
        placed = [
            jax.device_put(inputs[name].astype(np.int32), jax.P('data', None)) for name in names
        ]

        @jax.jit
        def heads(
            params: nnx.State, token_BS: jax.Array, type_BS: jax.Array, mask_BS: jax.Array
        ) -> dict[str, jax.Array]:
            bert, computation = nnx.merge(graph, params), Computation.of(config)
            rows = {'type_BS': type_BS, 'segment_BS': 1 - mask_BS}
            x_BSD, _ = bert.hidden(token_BS, computation, Rows(**rows))
            return {'logits': bert(token_BS, computation, **rows), 'order': bert.order_head(x_BSD)}

        made = {name: np.asarray(x) for name, x in heads(params, *placed).items()}
    return {'logits': made['logits'][:, :, : config.model.vocab_size], 'order': made['order']}


def assert_heads_close(
    actual: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    inputs: Mapping[str, np.ndarray],
) -> None:
    real = inputs['attention_mask'] > 0
    assert np.abs(actual['logits'] - expected['logits'])[real].max() < LIMIT
    assert np.abs(actual['order'] - expected['order']).max() < LIMIT
    assert np.abs(expected['logits'][real]).max() > 1
    assert np.abs(expected['order']).max() > 0.1


@pytest.mark.parametrize('mesh', MESHES)
def test_logits_of_both_heads_are_those_of_transformers(mesh: tuple[int, ...]) -> None:
    stored = dict(np.load(BERT / 'heads.npz'))
    assert_heads_close(heads_on_mesh(BERT, stored, *mesh), stored, stored)


def test_types_and_padding_matter() -> None:
    stored = dict(np.load(BERT / 'heads.npz'))
    for name in ('token_type_ids', 'attention_mask'):
        other = heads_on_mesh(BERT, stored | {name: np.ones_like(stored[name])}, 1, 1, False)
        assert np.abs(other['order'] - stored['order']).max() > 10 * LIMIT


def test_import_then_export_gives_the_same_tensors_bit_for_bit(tmp_path: Path) -> None:
    config = import_huggingface(BERT, tmp_path / 'run', ['mesh.model=2'])
    assert config.model.objective == 'masked_lm'
    assert export_huggingface(tmp_path / 'run', tmp_path / 'out')[0] == 'megatron-bert'
    actual, expected = read_tensors(tmp_path / 'out'), read_tensors(BERT)
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(actual[name], x, err_msg=name)


def test_old_files_may_hold_what_is_tied_and_what_nobody_reads() -> None:
    tensors = dict(read_tensors(BERT))
    table, bias = tensors['bert.embeddings.word_embeddings.weight'], tensors['cls.predictions.bias']
    tensors |= {'cls.predictions.decoder.weight': table, 'cls.predictions.decoder.bias': bias}
    tensors['bert.embeddings.position_ids'] = np.arange(32)[None]
    keys = read_family(json.loads((BERT / 'config.json').read_text()), 'bert')[1]
    config = Config(model=keys, train={'seq_len': 24, 'dtype': 'float32'})
    with on_mesh(config):
        params = by_name(from_huggingface(config, tensors, source='bert'))
        np.testing.assert_array_equal(np.asarray(params['masked_head.bias'])[:50], bias)
        for name, x in (('weight', table + 1), ('bias', bias + 1)):
            with pytest.raises(
                ConfigError, match=rf'decoder\.{name} differs from .*, but tie_word_embeddings says'
            ):
                from_huggingface(
                    config, tensors | {f'cls.predictions.decoder.{name}': x}, source='bert'
                )


@pytest.mark.parametrize(
    ('keys', 'message'),
    [
        ({'model_type': 'bert'}, 'norms come after the residual connections'),
        ({'tie_word_embeddings': False}, 'tie_word_embeddings: false: only true'),
        ({'type_vocab_size': 4}, 'type_vocab_size: 4: only 2'),
        ({'position_embedding_type': 'relative_key'}, 'only "absolute"'),
        ({'hidden_act': 'relu'}, 'hidden_act'),
    ],
)
def test_another_architecture_is_refused_with_the_reason(
    keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_family(json.loads((BERT / 'config.json').read_text()) | keys, 'config.json')


def test_no_other_family_is_this_model() -> None:
    model = Config(
        model=read_family(json.loads((BERT / 'config.json').read_text()), '')[1],
        train={'seq_len': 16},
    ).model
    assert write_family(model)[0] == 'megatron-bert'
    with pytest.raises(ConfigError, match=r'model\.objective'):
        write_family(model, 'gpt2')


@pytest.mark.parametrize(
    'keys',
    [
        {'hidden_act': 'gelu_new', 'layer_norm_eps': 1e-3},
        {'num_hidden_layers': 3, 'num_attention_heads': 8},
    ],
)
def test_transformers_itself_agrees_there_and_back(keys: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip('transformers', reason="transformers is in the extra 'test-hf'")
    from interop import make_bert

    model, inputs = make_bert.random_bert(**keys), make_bert.random_inputs()
    expected = make_bert.heads_of(model, inputs)
    model.save_pretrained(tmp_path / 'in')
    assert_heads_close(heads_on_mesh(tmp_path / 'in', inputs, 1, 2, False), expected, inputs)
    import_huggingface(tmp_path / 'in', tmp_path / 'run')
    export_huggingface(tmp_path / 'run', tmp_path / 'out')
    again = type(model).from_pretrained(tmp_path / 'out').eval()
    assert np.abs(make_bert.heads_of(again, inputs)['logits'] - expected['logits']).max() < 1e-6


def test_what_is_stored_is_what_transformers_makes() -> None:
    transformers = pytest.importorskip(
        'transformers', reason="transformers is in the extra 'test-hf'"
    )
    from interop import make_bert

    stored = dict(np.load(BERT / 'heads.npz'))
    model = transformers.MegatronBertForPreTraining.from_pretrained(BERT).eval()
    for name, x in make_bert.heads_of(model, make_bert.random_inputs()).items():
        np.testing.assert_allclose(x, stored[name], atol=1e-5)
