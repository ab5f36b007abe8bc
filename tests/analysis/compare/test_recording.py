"""A recording comes back as it was written, and a broken one is refused."""

import zipfile
from pathlib import Path

import numpy as np
import pytest

from megajax.analysis.compare.recording import About, Recording, read_recording, write_recording
from megajax.core.config import ConfigError


@pytest.fixture
def recording() -> Recording:
    about = About(
        source='a', config={}, executed_with='jax 1', megajax='1', platform='cpu', weights={}
    )
    x = np.arange(6.0).reshape(2, 3)
    return Recording(about=about, batch={'tokens': x}, forward={'embed': x}, gradients={'w': -x})


def test_a_recording_comes_back(recording: Recording, tmp_path: Path) -> None:
    write_recording(tmp_path / 'a.npz', recording)
    found = read_recording(tmp_path / 'a.npz')
    assert found.about == recording.about
    np.testing.assert_array_equal(found.gradients['w'], recording.gradients['w'])


def test_a_recording_with_the_names_of_an_earlier_version_is_read_by_those_of_today(
    recording: Recording, tmp_path: Path
) -> None:
    x, name = recording.batch['tokens'], 'layers.0.mlp_norm'
    about = recording.about.model_copy(update={'weights': {f'{name}.weight': 'a'}})
    old = Recording(about=about, batch={}, forward={name: x}, gradients={f'{name}.weight': x})
    write_recording(tmp_path / 'a.npz', old)
    found = read_recording(tmp_path / 'a.npz')
    assert [*found.forward] == ['layers.0.mlp.norm']
    assert [*found.gradients] == [*found.about.weights] == ['layers.0.mlp.norm.weight']


@pytest.mark.parametrize(
    'header',
    [
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (2, 3), }(",
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (2, 10**9)}",
        b"{'descr': '|O', 'fortran_order': False, 'shape': (2,)}",
        b'\xff\xff\xff',
        b'',
    ],
    ids=['brackets', 'a call', 'objects', 'no text', 'nothing'],
)
def test_an_array_that_is_none_is_refused_by_the_files_name(
    recording: Recording, tmp_path: Path, header: bytes
) -> None:
    write_recording(tmp_path / 'a.npz', recording)
    array = b'\x93NUMPY\x01\x00' + len(header).to_bytes(2, 'little') + header
    with zipfile.ZipFile(tmp_path / 'a.npz', 'a') as archive:
        archive.writestr('forward/x.npy', array)
    with pytest.raises(
        ConfigError, match=r'a.npz was not written by this version of megajax compare'
    ):
        read_recording(tmp_path / 'a.npz')


def test_a_packing_that_zipfile_does_not_know_is_refused(
    recording: Recording, tmp_path: Path
) -> None:
    file = tmp_path / 'a.npz'
    write_recording(file, recording)
    content = bytearray(file.read_bytes())
    entry = content.index(b'PK\x01\x02')
    content[entry + 10] = 99  # the method of compression
    file.write_bytes(content)
    with pytest.raises(
        ConfigError, match=r'a.npz was not written by this version of megajax compare'
    ):
        read_recording(file)
