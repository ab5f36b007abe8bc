"""A family of Hugging Face's is named by the command and from Python alike."""

import dataclasses
import typing

import pytest

from megajax.commands.interop import Family
from megajax.core.config import ConfigError, load
from megajax.core.counts.parameters import dim_sizes, parameters, shape_of
from megajax.interop.huggingface.families import ARCHITECTURES, FAMILIES, write_family
from megajax.interop.huggingface.weights import huggingface_pieces


def test_the_command_knows_every_family() -> None:
    assert set(typing.get_args(Family)) == set(ARCHITECTURES)


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match='family gemma: choose among gpt2, llama, '):
        write_family(load('gpt2_124m').model, 'gemma')


@pytest.mark.parametrize(
    'changed',
    [
        {'zero_centered_norm': True},
        {'embedding_scale': 64.0},
        {'query_scale': 0.5},
        {'attention_sinks': True},
    ],
)
def test_a_family_without_a_setting_that_changes_its_numbers_is_not_written(
    changed: dict[str, object],
) -> None:
    model = load('qwen3_8b').model.model_copy(update=changed)
    for family in ('llama', 'qwen2', 'qwen3', 'mistral', 'olmo2', 'phi3'):
        with pytest.raises(ConfigError, match=f'model.{next(iter(changed))}='):
            write_family(model, family)


def test_a_bert_is_written_as_megatron_bert() -> None:
    family, keys = write_family(load('bert_336m').model, 'megatron-bert')
    assert (family, keys['model_type']) == ('megatron-bert', 'megatron-bert')


def test_a_family_of_other_names_has_its_own_table(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load('tiny').model
    renamed = {
        path: [row._replace(name=f'other.{row.name}') for row in rows]
        for path, rows in FAMILIES['gpt2'].tensors.items()
    }
    other = dataclasses.replace(FAMILIES['gpt2'], name='other', tensors=renamed)
    monkeypatch.setitem(FAMILIES, 'other', other)
    sizes = dim_sizes(model)
    shapes = {name: shape_of(one.dims, sizes) for name, one in parameters(model)}
    pieces, known = (huggingface_pieces(model, shapes, family=name) for name in ('other', 'gpt2'))
    for path, group in known.items():
        assert [piece._replace(name=f'other.{piece.name}') for piece in group] == pieces[path]
