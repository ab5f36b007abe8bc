"""An export holds the numbers of its checkpoint, or there is none."""

import shutil
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from interop.stored import DATA
from safetensors.numpy import save_file
from support import on_mesh, random_params

from megajax.core.config import ConfigError, load
from megajax.interop.huggingface.directories import Dtype, export_huggingface, import_huggingface
from megajax.interop.huggingface.tensors import SINGLE, read_tensors
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.run.start import origin_of

NAME = 'transformer.h.1.mlp.c_fc.weight'


def test_a_number_that_the_dtype_does_not_have_is_refused_by_name(tmp_path: Path) -> None:
    tensors = dict(read_tensors(DATA / 'gpt2'))
    tensors[NAME] = tensors[NAME].copy()
    tensors[NAME][3, 2] = -70000
    shutil.copytree(DATA / 'gpt2', tmp_path / 'in')
    save_file(tensors, tmp_path / 'in' / SINGLE)
    import_huggingface(tmp_path / 'in', tmp_path / 'run')
    with pytest.raises(
        ConfigError,
        match=f'{NAME}: 70000 is beyond the range of float16: export as bfloat16 or float32',
    ):
        export_huggingface(tmp_path / 'run', tmp_path / 'out', dtype='float16')
    assert not (tmp_path / 'out').exists()
    export_huggingface(tmp_path / 'run', tmp_path / 'out', dtype='bfloat16')
    exported = dict(read_tensors(tmp_path / 'out'))[NAME]
    np.testing.assert_array_equal(exported, tensors[NAME].astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize('dtype', ['float32', 'float16'])
def test_a_weight_that_is_not_finite_is_named_with_its_position(
    dtype: Dtype, tmp_path: Path
) -> None:
    config = load('tiny', ['model.num_layers=1', 'train.dtype=float32'])
    with on_mesh(config), Checkpoints(tmp_path / 'run/checkpoints', config) as checkpoints:
        params = random_params(config, 0.5)
        params['norm']['weight'][...] = params['norm']['weight'][...].at[3].set(jnp.nan)
        checkpoints.save({'params': params}, 1)
    with pytest.raises(ConfigError, match='numbers are not finite, the first, nan, at'):
        export_huggingface(tmp_path / 'run', tmp_path / 'out', dtype=dtype)


@pytest.mark.parametrize(('bias', 'family'), [('false', 'phi3'), ('true', 'llama')])
def test_a_run_has_the_family_of_its_import_or_the_first_that_fits_if_it_no_longer_fits(
    bias: str, family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import_huggingface(DATA / 'phi3', tmp_path / 'import', ['train.dtype=float32'])
    config = load(
        tmp_path / 'import/config.yaml', [f'model.{key}={bias}' for key in ('bias', 'qkv_bias')]
    )
    with (
        on_mesh(config),
        Checkpoints(tmp_path / 'run/checkpoints', config) as checkpoints,
    ):
        checkpoints.origin = origin_of(tmp_path / 'import/checkpoints/0')
        checkpoints.save({'params': random_params(config, 0.5)}, 1)
    assert export_huggingface(tmp_path / 'run', tmp_path / 'out')[0] == family
    assert ('written as llama, because the family' in caplog.text) == (family == 'llama')
    assert ('--family phi3 gives the reason' in caplog.text) == (family == 'llama')


@pytest.mark.parametrize('prefix', ['transformer.', ''])
def test_each_tensor_has_the_dtype_of_its_import(prefix: str, tmp_path: Path) -> None:
    single = {'transformer.ln_f.weight', 'transformer.wpe.weight'}
    expected = {
        name: x if name in single else x.astype(ml_dtypes.bfloat16)
        for name, x in read_tensors(DATA / 'gpt2').items()
        if not name.startswith('lm_head')
    }
    shutil.copytree(DATA / 'gpt2', tmp_path / 'in')
    named = {prefix + name.removeprefix('transformer.'): x for name, x in expected.items()}
    save_file(named, tmp_path / 'in' / SINGLE)
    import_huggingface(tmp_path / 'in', tmp_path / 'run')
    assert export_huggingface(tmp_path / 'run', tmp_path / 'out') == ('gpt2', 'bfloat16')
    found = read_tensors(tmp_path / 'out')
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x, name, strict=True)
    export_huggingface(tmp_path / 'run', tmp_path / 'halves', dtype='bfloat16')
    assert {x.dtype for x in read_tensors(tmp_path / 'halves').values()} == {np.dtype('bfloat16')}
