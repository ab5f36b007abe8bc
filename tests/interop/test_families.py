"""A family of Hugging Face's is named by the command and from Python alike."""

import typing

import pytest

from megajax.commands.interop import Family
from megajax.config import ConfigError, load
from megajax.interop.families import ARCHITECTURES, write_family


def test_the_command_knows_every_family() -> None:
    assert set(typing.get_args(Family)) == set(ARCHITECTURES)


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match='family gemma: choose among gpt2, llama, '):
        write_family(load('gpt2_124m').model, 'gemma')


def test_a_bert_is_written_as_megatron_bert() -> None:
    family, keys = write_family(load('bert_336m').model, 'megatron-bert')
    assert (family, keys['model_type']) == ('megatron-bert', 'megatron-bert')
