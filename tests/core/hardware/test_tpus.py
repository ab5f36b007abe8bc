"""TPUs as targets: slices, rejected settings, and a program compiled by libtpu where it is."""

from itertools import pairwise
from math import prod

import pytest

import megajax
from megajax.core.config import ConfigError
from megajax.core.hardware import tpus
from megajax.core.hardware.targets import hosts_of
from megajax.core.hardware.tpus import TPUS, check_tpu, num_tpu_hosts, shape_of_slice

CHIPS = 1, 2, 4, 8, 12, 16, 32, 36, 64, 128, 512


@pytest.mark.parametrize('target', TPUS)
def test_a_slice_has_the_chips_of_the_mesh_and_whole_hosts(target: str) -> None:
    for chips in CHIPS:
        shape = shape_of_slice(target, chips)
        assert prod(shape) == chips
        assert len(shape) == TPUS[target].num_dims
        if chips >= 4:
            assert not shape[0] % 2
            assert not shape[1] % 2
        assert num_tpu_hosts(target, chips) * 4 in (chips, 4)


def test_slices_are_named_as_google_names_them() -> None:
    shapes = [shape_of_slice('v5p', chips) for chips in (4, 8, 16, 32, 64)]
    assert shapes == [(2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4)]
    assert [shape_of_slice('v6e', chips) for chips in (4, 8, 16)] == [(2, 2), (2, 4), (4, 4)]
    for small, large in pairwise(shape_of_slice('v6e', 2**n) for n in range(3, 9)):
        assert all(a <= b for a, b in zip(small, large, strict=True))


@pytest.mark.parametrize(
    ('overrides', 'said'),
    [
        (['mesh.data=3', 'train.batch_size=3', 'mesh.model=1'], 'a multiple of 4 chips'),
        (['train.dtype=float16'], 'train.dtype'),
        (['train.dtype=bfloat16', 'train.overlap=batch_split'], 'use auto or none'),
    ],
)  # fmt: skip
def test_what_needs_a_gpu_is_rejected_before_anything_compiles(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], said: str
) -> None:
    monkeypatch.setattr(tpus, 'has_tpu_compiler', lambda: True)
    with pytest.raises(ConfigError, match=said) as error:
        hosts_of(megajax.load('tiny', overrides), 'v5p')
    assert error.value.exit_code == 2


def test_a_slice_has_its_own_number_of_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpus, 'has_tpu_compiler', lambda: True)
    config = megajax.load('tiny', ['mesh.data=4', 'mesh.model=2'])
    assert hosts_of(config, 'v5p') == hosts_of(config, 'v5p', 2) == 2
    with pytest.raises(ConfigError, match='leave --hosts out'):
        hosts_of(config, 'v5p', 4)


def test_without_libtpu_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpus.importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(ConfigError, match=r'tpu-compile\]'):
        check_tpu('v6e')
