"""Megatron-LM's rank files, merged, give megatron-core's logits; files of torch.save give tensors,
and run nothing.
"""

import argparse
import io
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from interop.oracles import (
    arguments_of,
    logits,
    oracle_of,
    shard,
    weights_of,
    write_file,
    write_ranks,
)
from support import exhaustive, gather, relative_error, slow

from megajax.core.config import Config, ConfigError, load
from megajax.interop.megatron.command_line.arguments import of_model, read_arguments
from megajax.interop.megatron.export import export_megatron
from megajax.interop.megatron.rank_files import FILE, find_ranks
from megajax.interop.megatron.ranks import import_megatron
from megajax.interop.megatron.torch_files import Inert, Namespace, load_torch
from megajax.runtime.checkpoint.open import open_model

STORED = Path(__file__).parent / 'data' / 'torch.pt'
LIMIT = 2e-5  # relative, see support.relative_error


@pytest.mark.parametrize(
    ('name', 'ranks'),
    [
        exhaustive('gpt2', 1),
        exhaustive('gpt2', 2),
        slow('gpt2', 4),
        exhaustive('llama', 1),
        ('llama', 2),
    ],
)
def test_ranks_of_the_oracle_give_its_logits(name: str, ranks: int, tmp_path: Path) -> None:
    oracle = oracle_of(name)
    write_ranks(tmp_path / 'in', weights_of(oracle), ranks, arguments_of(oracle))
    import_megatron(
        tmp_path / 'in', tmp_path / 'run', ['train.dtype=float32', 'mesh.model=2'], ranks=ranks
    )
    assert (
        relative_error(logits(tmp_path / 'run', oracle['tokens'], model=2), oracle['logits'])
        < LIMIT
    )


@pytest.mark.parametrize(('name', 'ranks'), [slow('gpt2', 4), ('llama', 2)])
def test_an_export_is_what_megatron_would_hold_and_comes_back(
    name: str, ranks: int, tmp_path: Path
) -> None:
    oracle = oracle_of(name)
    write_ranks(tmp_path / 'in', weights_of(oracle), 1, arguments_of(oracle))
    import_megatron(tmp_path / 'in', tmp_path / 'run')
    export_megatron(tmp_path / 'run', tmp_path / 'out', ranks=ranks, transformer_impl='local')
    assert (tmp_path / 'out' / 'latest_checkpointed_iteration.txt').read_text() == 'release'
    for rank in range(ranks):
        model = load_torch(tmp_path / 'out' / 'release' / f'mp_rank_{rank:02}' / FILE)['model']
        assert model.keys() == weights_of(oracle).keys()
        for key, whole in weights_of(oracle).items():
            rows = 128 * ranks  # a vocabulary of 128 is padded to a multiple of 128 on each rank
            x = (
                np.pad(whole, [(0, rows - len(whole)), (0, 0)])
                if key.endswith(('word_embeddings.weight', 'output_layer.weight'))
                else whole
            )
            np.testing.assert_array_equal(
                model[key],
                shard(key, x, rank, ranks, gated=name == 'llama'),
                err_msg=key,
                strict=True,
            )
    import_megatron(tmp_path / 'out', tmp_path / 'again')
    first, again = (open_model(tmp_path / run) for run in ('run', 'again'))
    assert again.config.model == first.config.model
    assert all(
        np.array_equal(x, gather(again.params)[key]) for key, x in gather(first.params).items()
    )


def test_names_of_transformer_engine_and_of_older_versions(tmp_path: Path) -> None:
    oracle = oracle_of('gpt2')
    weights = weights_of(oracle)
    engine = {
        key.replace('input_layernorm.', 'self_attention.linear_qkv.layer_norm_').replace(
            'pre_mlp_layernorm.', 'mlp.linear_fc1.layer_norm_'
        ): x
        for key, x in weights.items()
    }
    old = {
        key.replace('linear_qkv', 'query_key_value')
        .replace('self_attention.linear_proj', 'self_attention.dense')
        .replace('pre_mlp_layernorm', 'post_attention_layernorm')
        .replace('linear_fc1', 'dense_h_to_4h')
        .replace('linear_fc2', 'dense_4h_to_h')
        .replace('decoder.', 'encoder.'): x
        for key, x in weights.items()
    }
    # Names of the later releases before megatron-core.
    newer = {
        key.replace('input_layernorm', 'input_norm')
        .replace('post_attention_layernorm', 'post_attention_norm')
        .replace('final_layernorm', 'final_norm'): x
        for key, x in old.items()
    }
    runs = []
    for kind, names in (
        ('core', weights),
        ('engine', engine),
        ('old', {f'language_model.{key}': x for key, x in old.items()}),
        ('newer', {f'language_model.{key}': x for key, x in newer.items()}),
    ):
        write_ranks(tmp_path / kind, names, 1, arguments_of(oracle))
        import_megatron(tmp_path / kind, tmp_path / f'run_{kind}')
        runs.append(gather(open_model(tmp_path / f'run_{kind}').params))
    for run in runs[1:]:
        assert all(np.array_equal(x, runs[0][key]) for key, x in run.items())


def test_sets_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    oracle = oracle_of('llama')
    weights, arguments = weights_of(oracle), arguments_of(oracle)

    def refused(message: str, **options: Any) -> None:
        with pytest.raises(ConfigError, match=message):
            import_megatron(tmp_path / 'in', tmp_path / 'run', **options)
        assert not (tmp_path / 'run').exists()

    refused('there is no mp_rank_00')
    write_ranks(tmp_path / 'in', weights, 2, arguments)
    refused('holds 2 ranks, not 4', ranks=4)
    first, second = (
        tmp_path / 'in' / 'iter_0000005' / f'mp_rank_{rank:02}' / FILE for rank in (0, 1)
    )
    parts = {name: shard(name, x, 1, 2, gated=True) for name, x in weights.items()}
    write_file(
        second, parts | {'decoder.final_layernorm.weight': np.zeros(64, np.float32)}, arguments
    )
    refused(
        r'mp_rank_01/model_optim_rng.pt: decoder.final_layernorm.weight differs from that in '
        r'.*mp_rank_00'
    )
    write_file(
        second, {name: x for name, x in parts.items() if 'linear_proj' not in name}, arguments
    )
    refused(
        r'mp_rank_01/model_optim_rng.pt: missing tensors \(2 of \d+; '
        r'.*decoder.layers.0.self_attention.linear_proj.weight'
    )
    write_file(
        second, parts | {'decoder.final_layernorm.weight': np.zeros(65, np.float32)}, arguments
    )
    refused(r'decoder.final_layernorm.weight: expected \(64,\), got \(65,\)')
    second.write_bytes(second.read_bytes()[:-40])
    refused(
        'mp_rank_01/model_optim_rng.pt: not a zip archive as torch.save writes since 1.6, '
        'or cut short'
    )
    second.unlink()
    refused('mp_rank_01/model_optim_rng.pt: is missing')
    second.parent.rename(second.parent.with_name('mp_rank_02'))
    refused('holds mp_rank_00, mp_rank_02, but not every rank from 00 on')
    first.parent.rename(first.parent.with_name('mp_rank_00_000'))
    refused('holds mp_rank_00_000, mp_rank_02, but not every rank from 00_000 on')
    (tmp_path / 'in' / 'iter_0000005' / 'mp_rank_00_000_000').mkdir()
    refused('mp_rank_00_000_000 is neither a tensor-parallel rank nor one of a pipeline')


@pytest.mark.parametrize(
    'content', [b'\xff\xfe', b'../iter_0000005', b'a\0b', b'', b'9' * 10_000, '²'.encode()]
)
def test_a_tracker_that_names_no_checkpoint_is_refused(tmp_path: Path, content: bytes) -> None:
    write_ranks(tmp_path, weights_of(oracle_of('llama')), 1)
    tracker = tmp_path / 'latest_checkpointed_iteration.txt'
    assert find_ranks(tmp_path) == [[tmp_path / 'iter_0000005/mp_rank_00' / FILE]]
    tracker.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        find_ranks(tmp_path)
    assert str(tmp_path) in str(refused.value)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    ('name', 'rank'),
    [('decoder.layers.1.mlp.linear_fc2.weight', 1), ('decoder.final_layernorm.weight', 0)],
)
def test_weights_that_are_not_finite_are_refused_by_name(
    name: str, rank: int, tmp_path: Path
) -> None:
    oracle = oracle_of('llama')
    weights = {key: x.copy() for key, x in weights_of(oracle).items()}
    weights[name][..., -1] = np.nan
    write_ranks(tmp_path / 'in', weights, 2, arguments_of(oracle))
    with pytest.raises(
        ConfigError,
        match=(
            rf'{tmp_path}/in.* {rank}?.*{name}: \d+ of \d+ numbers are not finite, the first, '
            r'nan, at'
        ),
    ):
        import_megatron(tmp_path / 'in', tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


def test_a_vocabulary_with_more_tokens_than_rows_is_refused_with_the_limit(tmp_path: Path) -> None:
    oracle = oracle_of('llama')
    write_ranks(tmp_path / 'in', weights_of(oracle), 2, arguments_of(oracle))
    said = 'but model.vocab_size is 999; set model.vocab_size to the number of tokens, at most'
    with pytest.raises(ConfigError, match=f'2 ranks hold .* rows of the embedding, {said}'):
        import_megatron(tmp_path / 'in', tmp_path / 'run', ['model.vocab_size=999'])


def test_ranks_must_divide_the_key_value_heads(tmp_path: Path) -> None:
    oracle = oracle_of('llama')
    write_ranks(tmp_path / 'in', weights_of(oracle), 1, arguments_of(oracle))
    import_megatron(tmp_path / 'in', tmp_path / 'run')
    with pytest.raises(
        ConfigError, match=r'4 tensor-parallel ranks must divide model.num_kv_heads=2'
    ):
        export_megatron(tmp_path / 'run', tmp_path / 'out', ranks=4)
    assert not (tmp_path / 'out').exists()


def test_arguments_become_a_model() -> None:
    base = {
        'num_layers': 2,
        'hidden_size': 64,
        'num_attention_heads': 4,
        'max_position_embeddings': 128,
        'padded_vocab_size': 50304,
    }
    defaults = Config(model=read_arguments(base, ''), train={'seq_len': 128}).model
    assert defaults == load('gpt2_124m', ['train.seq_len=128']).model.model_copy(
        update={
            'num_layers': 2,
            'hidden_size': 64,
            'num_heads': 4,
            'num_kv_heads': 4,
            'head_dim': 16,
            'query_scale': 16**-0.5,
            'ffn_size': 256,
        }
        | {'vocab_size': 50304, 'max_seq_len': 128, 'dropout': 0.1, 'attention_dropout': 0.1}
    )
    llama = {
        'position_embedding_type': 'rope',
        'rotary_base': 500000,
        'use_rope_scaling': True,
        'swiglu': True,
        'add_bias_linear': False,
    }
    model = Config(
        model=read_arguments(base | llama | {'add_qkv_bias': True}, ''), train={'seq_len': 128}
    ).model
    assert (model.activation, model.bias, model.qkv_bias, model.rope_theta) == (
        'swiglu',
        False,
        True,
        5e5,
    )
    # as in the releases of spring 2023, which have no `position_embedding_type`
    old = {'use_rotary_position_embeddings': True, 'rotary_percent': 0.5}
    older = Config(model=read_arguments(base | old, ''), train={'seq_len': 128}).model
    assert (older.position, older.rotary_fraction) == ('rope', 0.5)
    assert model.rope_scaling is not None
    assert (model.rope_scaling.type, model.rope_scaling.factor) == ('llama3', 8.0)
    # The second name is that of megatron-core 0.19, where the first may be left from a checkpoint.
    for centered in (
        {'apply_layernorm_1p': True},
        {'layernorm_zero_centered_gamma': True},
        {'layernorm_zero_centered_gamma': True, 'apply_layernorm_1p': False},
    ):
        for normalization in ('RMSNorm', 'LayerNorm'):
            read = read_arguments(base | centered | {'normalization': normalization}, '')
            assert (read['norm'], read['zero_centered_norm']) == (normalization.lower(), True)
    left = {'layernorm_zero_centered_gamma': False, 'apply_layernorm_1p': True}
    assert not read_arguments(base | left, '')['zero_centered_norm']
    wrong = {'multi_latent_attention': True, 'position_embedding_type': 'yarn'}
    with pytest.raises(
        ConfigError,
        match=r'multi_latent_attention=True is not supported: .*\n.*_type=yarn is not supported',
    ):
        read_arguments(base | wrong, 'x')
    with pytest.raises(ConfigError, match='hidden_size is missing from its arguments'):
        read_arguments({'num_layers': 2}, 'x')


@pytest.mark.parametrize(
    'damaged',
    [
        {'num_experts': 4, 'moe_router_topk': '2', 'moe_expert_capacity_factor': '1'},
        {'num_experts': 4, 'moe_aux_loss_coeff': []},
        {'num_experts': 4, 'moe_layer_freq': {}, 'num_layers': 2},
        {'normalization': 1},
        {'num_layers': '2'},
    ],
)
def test_arguments_of_other_types_are_refused_with_the_file(damaged: dict[str, Any]) -> None:
    model = {'num_layers': 2, 'hidden_size': 16, 'num_attention_heads': 4, 'vocab_size': 8}
    arguments = model | {'max_position_embeddings': 8} | damaged
    with pytest.raises(ConfigError, match=r'^x: its arguments describe no model: '):
        read_arguments(of_model(arguments, 'x'), 'x')


def vocab_size(arguments: dict[str, Any]) -> int:
    """The tokens of a checkpoint of a small model with these arguments."""
    model = {'num_layers': 2, 'hidden_size': 16, 'num_attention_heads': 4}
    keys = read_arguments(model | {'max_position_embeddings': 8} | arguments, 'x')
    return keys['vocab_size']


@pytest.mark.parametrize(
    ('arguments', 'size'),
    [
        ({}, 64),
        ({'vocab_size': 59}, 59),
        ({'vocab_size': 59, 'tokenizer_type': 'NullTokenizer'}, 60),
        # The tokenizer of megatron-core 0.19 does not add a token, and may have this argument.
        (
            {'vocab_size': 59, 'tokenizer_type': 'NullTokenizer', 'null_tokenizer_eod_id': None},
            59,
        ),
    ],
)
def test_the_tokens_of_a_checkpoint_are_those_of_its_release(
    arguments: dict[str, Any], size: int
) -> None:
    assert vocab_size({'padded_vocab_size': 64} | arguments) == size


@pytest.mark.parametrize(
    ('given', 'arguments', 'size'),
    [
        (100, {'padded_vocab_size': 128}, 100),
        (100, {'padded_vocab_size': 256}, 256),
        (100, {'padded_vocab_size': 256, 'tensor_model_parallel_size': 2}, 100),
        (100, {'padded_vocab_size': 128, 'tensor_model_parallel_size': 8}, 100),  # converted
        (300, {'padded_vocab_size': 256}, 256),
        (300, {'padded_vocab_size': 256, 'tensor_model_parallel_size': 8}, 256),
        (300, {'padded_vocab_size': 300}, 300),  # a converter's
        (100, {'padded_vocab_size': 256, 'tokenizer_type': 'TikTokenizer'}, 100),
        (100, {'padded_vocab_size': 256, 'tokenizer_type': 'NullTokenizer'}, 101),
        # The tokenizer's type tells the size.
        (51000, {'padded_vocab_size': 50304, 'tokenizer_type': 'GPT2BPETokenizer'}, 50257),
    ],
)
def test_the_vocab_size_of_a_checkpoint_is_believed_if_it_has_its_rows(
    given: int, arguments: dict[str, Any], size: int, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = {'tokenizer_type': 'HuggingFaceTokenizer'} | arguments
    multiple = {'vocab_size': given, 'make_vocab_size_divisible_by': 128}
    assert vocab_size(multiple | arguments) == size
    kept = f'x: all {size} rows of the vocabulary are kept: .* vocab_size={given} tokens; set'
    assert bool(re.search(kept, caplog.text)) == (size == 256)


@pytest.mark.parametrize(
    ('arguments', 'size', 'rows'),
    [
        ({'tokenizer_type': 'GPT2BPETokenizer', 'padded_vocab_size': 50304}, 50257, 47),
        (
            {
                'tokenizer_type': 'GPT2BPETokenizer',
                'padded_vocab_size': 51200,
                'tensor_model_parallel_size': 8,
            },
            50257,
            943,
        ),
        (
            {
                'tokenizer_type': 'GPT2BPETokenizer',
                'padded_vocab_size': 50304,
                'tensor_model_parallel_size': 8,
            },
            50257,
            47,
        ),
        ({'tokenizer_type': 'Llama2Tokenizer', 'padded_vocab_size': 32000}, 32000, 0),
        # These sizes are not the padding of the usual vocabulary.
        ({'tokenizer_type': 'Llama2Tokenizer', 'padded_vocab_size': 32128}, 32128, 0),
        ({'tokenizer_type': 'GPT2BPETokenizer', 'padded_vocab_size': 32768}, 32768, 0),
        ({'tokenizer_type': 'HuggingFaceTokenizer', 'padded_vocab_size': 50304}, 50304, 0),
    ],
)
def test_the_padding_of_a_usual_vocabulary_is_left_out(
    arguments: dict[str, Any], size: int, rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert vocab_size({'vocab_size': None} | arguments) == size
    assert (f'x: left out: {rows} rows of the vocabulary' in caplog.text) == bool(rows)


def test_a_usual_vocabulary_does_not_stand_for_missing_rows() -> None:
    arguments = {'num_layers': 2, 'hidden_size': 16, 'num_attention_heads': 4}
    arguments |= {'max_position_embeddings': 8, 'tokenizer_type': 'GPT2BPETokenizer'}
    assert 'vocab_size' not in read_arguments(arguments, 'x')


@pytest.mark.parametrize(
    ('name', 'neutral', 'value'),
    [
        ('softmax_type', 'vanilla', 'learnable'),
        ('qk_l2_norm', False, True),
        ('softmax_scale', None, 0.125),
        ('use_mup', False, True),
        ('quick_geglu', False, True),
        ('glu_linear_offset', 0.0, 1.0),
        ('activation_func_clamp_value', None, 7.0),
        ('experimental_attention_variant', None, 'gated_delta_net'),
        ('moe_mlp_glu_interleave_size', None, 32),
        ('moe_shared_expert_glu_interleave_size', None, 32),
    ],
)
def test_arguments_that_change_the_forward_pass_are_refused_by_name(
    name: str, neutral: object, value: object
) -> None:
    base = {
        'num_layers': 2,
        'hidden_size': 64,
        'num_attention_heads': 4,
        'max_position_embeddings': 128,
        'padded_vocab_size': 50304,
        'swiglu': True,
        'num_experts': 4,
    }
    assert read_arguments(base | {name: neutral}, 'x') == read_arguments(base, 'x')
    with pytest.raises(ConfigError, match=f'x: {name}={value!r} is not supported: '):
        read_arguments(base | {name: value}, 'x')


def test_a_file_of_torch_is_read_without_torch() -> None:
    found = load_torch(STORED)
    whole = np.arange(12, dtype=np.float32).reshape(3, 4)
    model = found['model']
    np.testing.assert_array_equal(model['whole'], whole, strict=True)
    np.testing.assert_array_equal(model['transposed'], whole.T[1:], strict=True)
    np.testing.assert_array_equal(model['half'], whole.astype(ml_dtypes.bfloat16), strict=True)
    np.testing.assert_array_equal(model['parameter'], whole[0], strict=True)
    assert isinstance(found['args'], Namespace)
    assert (found['args'].num_layers, found['args'].seed, found['args'].names) == (
        2,
        None,
        ['a', 'b'],
    )
    assert isinstance(found['rng_state'][0]['numpy'][1], Inert)
    assert (found['checkpoint_version'], found['iteration']) == (3.0, 7)


def test_torch_reads_what_is_written(tmp_path: Path) -> None:
    torch = pytest.importorskip('torch', reason="torch is in the extra 'test-hf'")
    arrays = {
        'a': np.arange(6, dtype=np.float32).reshape(2, 3),
        'b': np.ones(3, ml_dtypes.bfloat16),
        'c': np.zeros((0, 2), np.float32),
    }
    write_file(tmp_path / 'x.pt', arrays, {'flag': True, 'count': 2**40, 'rate': 0.5})
    for options in ({}, {'mmap': True}):
        found = torch.load(tmp_path / 'x.pt', weights_only=True, **options)
        assert found['args'] == {'flag': True, 'count': 2**40, 'rate': 0.5}
        assert {name: (tuple(x.shape), str(x.dtype)) for name, x in found['model'].items()} == {
            'a': ((2, 3), 'torch.float32'),
            'b': ((3,), 'torch.bfloat16'),
            'c': ((0, 2), 'torch.float32'),
        }
        np.testing.assert_array_equal(found['model']['a'].numpy(), arrays['a'])


def test_a_tensor_with_attributes_is_read_without_them(tmp_path: Path) -> None:
    path, x = tmp_path / 'x.pt', np.arange(4, dtype=np.float32)
    write_file(path, {'a': x}, None)
    with zipfile.ZipFile(path) as archive:
        program = archive.read('archive/data.pkl')
    call, end = b'ctorch._utils\n_rebuild_tensor_v2\n', b')RtR'
    assert program.count(call) == program.count(end) == 1
    program = program.replace(
        call, b'ctorch._tensor\n_rebuild_from_type_v2\n(' + call + b'ctorch\nTensor\n'
    ).replace(end, b')Rt}X\x0d\x00\x00\x00partition_dimK\x00stR')
    write_zip(path, program, data=x.tobytes())
    np.testing.assert_array_equal(load_torch(path)['model']['a'], x, strict=True)


def test_torchs_tensors_and_parameters_with_attributes_are_read(tmp_path: Path) -> None:
    torch = pytest.importorskip('torch', reason="torch is in the extra 'test-hf'")
    tensors = [torch.arange(4.0), torch.nn.Parameter(torch.arange(4.0))]
    for tensor in tensors:
        tensor.partition_dim = 0
    # as the optimizer of a run with 16-bit weights has them
    torch.save({'optimizer': {'fp32_from_fp16_params': [tensors]}}, tmp_path / 'x.pt')
    for x in load_torch(tmp_path / 'x.pt')['optimizer']['fp32_from_fp16_params'][0]:
        np.testing.assert_array_equal(x, np.arange(4, dtype=np.float32), strict=True)


class Call:
    """Pickles as the call of a function."""

    def __init__(self, function: Any, *arguments: Any):
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.function, self.arguments


@pytest.mark.parametrize('protocol', [0, 2, 4])
@pytest.mark.parametrize(
    ('function', 'name'),
    [
        (os.system, r'posix\.system'),
        (eval, r'(__builtin__|builtins)\.eval'),
        (getattr, r'(__builtin__|builtins)\.getattr'),
        (io.open, r'_?io\.open'),
    ],
)
def test_a_pickle_that_calls_is_refused_by_name_and_does_not_run(
    function: Any, name: str, protocol: int, tmp_path: Path
) -> None:
    canary = tmp_path / 'canary'
    arguments = {
        os.system: (f'touch {canary}',),
        eval: (f'open({str(canary)!r}, "w")',),
        getattr: (Call(__import__, 'os'), 'system'),
        io.open: (str(canary), 'w'),
    }
    write_pickle(
        tmp_path / 'in' / 'mp_rank_00' / FILE,
        {'model': Call(function, *arguments[function])},
        protocol,
    )
    with pytest.raises(
        ConfigError,
        match=(
            rf'rejected: it asks for ({name}|(__builtin__|builtins)\.__import__), '
            r'but only tensors'
        ),
    ):
        import_megatron(tmp_path / 'in', tmp_path / 'run')
    assert not canary.exists()


def test_what_is_inert_stays_so(tmp_path: Path) -> None:
    """Objects that are known to lie beside weights are let through, and calls of them, with
    whatever arguments, do nothing.
    """
    canary = tmp_path / 'canary'
    program = (
        b'cmegatron.core.enums\nsystem\n(X'
        + len(f'touch {canary}').to_bytes(4, 'little')
        + f'touch {canary}'.encode()
        + b'tR.'
    )
    write_zip(tmp_path / 'x.pt', b'\x80\x02' + program)
    assert isinstance(load_torch(tmp_path / 'x.pt'), Inert)
    assert not canary.exists()
    write_pickle(
        tmp_path / 'y.pt', {'args': argparse.Namespace(seed=1, nested=argparse.Namespace(a=[1]))}, 2
    )
    assert load_torch(tmp_path / 'y.pt')['args'].nested.a == [1]


def test_tensors_that_reach_beyond_their_storage_are_refused(tmp_path: Path) -> None:
    path = tmp_path / 'x.pt'
    write_file(path, {'a': np.zeros(4, np.float32)}, None)
    with zipfile.ZipFile(path) as archive:
        program = archive.read('archive/data.pkl')
    size = b'\x8a\x08' + (4).to_bytes(8, 'little')
    assert program.count(size) == 2  # of the storage, and of the tensor
    larger = size.replace(b'\x04', b'\x05')
    for broken in (program.replace(size, larger), larger.join(program.rsplit(size, 1))):
        write_zip(path, broken, data=np.zeros(4, np.float32).tobytes())
        with pytest.raises(
            ConfigError, match=r'reaches beyond its storage of 4|is shorter than its tensors'
        ):
            load_torch(path)


def write_pickle(path: Path, contents: Any, protocol: int) -> None:
    write_zip(path, pickle.dumps(contents, protocol))


def write_zip(path: Path, program: bytes, data: bytes = b'') -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, 'w') as archive:
        archive.writestr('archive/data.pkl', program)
        archive.writestr('archive/data/0', data)
