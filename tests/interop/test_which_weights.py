"""Of several files of weights, the one that transformers loads is read."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from megajax.base.files.pointers import POINTER
from megajax.core.config import ConfigError, load
from megajax.interop.huggingface.adapters import _family_of
from megajax.interop.huggingface.directories import import_huggingface
from megajax.interop.huggingface.hub import DESCRIPTION
from megajax.interop.huggingface.tensors import ADAPTER, read_tensors
from megajax.runtime.checkpoint.record import FAMILY, make_record
from megajax.runtime.data.text.tokenizer import load_tokenizer

INDEX = 'model.safetensors.index.json'


@pytest.mark.parametrize('shard_is_there', [True, False])
def test_a_single_file_comes_before_the_index_of_an_older_model(
    shard_is_there: bool, tmp_path: Path
) -> None:
    save_file({'x': np.ones(2, np.float32)}, tmp_path / 'model.safetensors')
    (tmp_path / INDEX).write_text(json.dumps({'weight_map': {'x': 'old.safetensors'}}))
    if shard_is_there:
        save_file({'x': np.zeros(2, np.float32)}, tmp_path / 'old.safetensors')
    assert read_tensors(tmp_path)['x'].tolist() == [1, 1]


def test_a_folder_or_repository_with_an_adapter_is_rejected(tmp_path: Path) -> None:
    (tmp_path / ADAPTER).write_text('{"base_model_name_or_path": "org/base"}')
    with pytest.raises(ConfigError, match='an adapter of org/base, and no model; to merge it'):
        import_huggingface(tmp_path, tmp_path / 'run')
    save_file({'x': np.ones(2, np.float32)}, tmp_path / 'model.safetensors')
    with pytest.raises(ConfigError, match=r'adds this .*; move adapter_\* to a folder .*to merge'):
        read_tensors(tmp_path)
    assert ADAPTER in DESCRIPTION  # so that it is found before any weights are downloaded


@pytest.mark.parametrize(
    ('base', 'more', 'name'),
    [
        ('org/base', {}, 'AutoModelForCausalLM'),
        ('Qwen/Qwen3-VL-2B', {}, 'AutoModelForImageTextToText'),
        ('org/x', {'auto_mapping': {'base_model_class': 'Qwen3VLModel'}}, 'Qwen3VLModel'),
        ('{folder}', {}, 'Qwen3VLForConditionalGeneration'),
    ],
)
def test_an_adapter_is_merged_into_the_class_that_its_model_needs(
    base: str, more: dict[str, object], name: str, tmp_path: Path
) -> None:
    config = {'architectures': ['Qwen3VLForConditionalGeneration']}
    (tmp_path / 'config.json').write_text(json.dumps(config))
    (tmp_path / 'a').mkdir()
    settings = {'base_model_name_or_path': base.format(folder=tmp_path), **more}
    (tmp_path / 'a' / ADAPTER).write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=rf'PeftModel\.from_pretrained\({name}\.from_pre'):
        read_tensors(tmp_path / 'a')


def test_adapters_have_the_family_of_their_base_else_of_the_import(tmp_path: Path) -> None:
    (tmp_path / 'config.json').write_text('{"model_type": "phi3"}')
    assert _family_of(str(tmp_path)) == 'phi3'
    assert _family_of('org/name') is _family_of(None) is None
    record = make_record(load('tiny'), 1)
    assert record.family is None
    assert record.model_copy(update={'origin': {FAMILY: 'mistral'}}).family == 'mistral'


def test_a_pointer_of_git_lfs_is_named_as_one(tmp_path: Path) -> None:
    for name in ('model.safetensors', 'tokenizer.json'):
        (tmp_path / name).write_bytes(POINTER + b'github.com/spec/v1\noid sha256:0\nsize 9\n')
    with pytest.raises(ConfigError, match=r'Git LFS pointer.*run git lfs pull'):
        read_tensors(tmp_path)
    with pytest.raises(ConfigError, match=r'Git LFS pointer.*run git lfs pull'):
        load_tokenizer(str(tmp_path / 'tokenizer.json'))
    (tmp_path / 'model.safetensors').write_bytes(b'')
    with pytest.raises(ConfigError, match='download or copy it again'):
        read_tensors(tmp_path)
