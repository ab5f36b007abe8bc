"""Two recordings of a few numbers, compared without a model."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from support import make_config

from megajax.analysis.compare.difference import Comparison, compare_recordings
from megajax.analysis.compare.recording import About, Recording, read_recording, write_recording
from megajax.analysis.compare.report import to_text, verdict
from megajax.base.render.console import as_text
from megajax.core.config import ConfigError

ABOUT = About(
    source='small',
    config=make_config().model_dump(mode='json'),
    executed_with='jax 1',
    megajax='1',
    platform='cpu',
    weights={'norm.weight': 'b', 'embedding.table': 'a'},
)


def recording(*numbers: float, gradient: float = 1.0) -> Recording:
    return Recording(
        about=ABOUT,
        batch={'tokens': np.arange(4)},
        forward={'embedding': np.array(numbers, np.float32)},
        gradients={
            'norm.weight': np.array([1.0], np.float32),
            'embedding.table': np.array([gradient], np.float32),
        },
    )


def test_a_difference_is_relative_to_the_largest_number_and_has_its_place() -> None:
    comparison = compare_recordings(recording(1, -8, 2), recording(1, -8, 2.5))
    first = comparison.first
    assert first is not None
    assert (first.name, first.place, first.a, first.b) == ('embedding', [2], 2.0, 2.5)
    assert first.error == pytest.approx(0.5 / 8)
    assert verdict(comparison) == 'first difference: embedding forward, 6.2e-02 (limit 1e-05)'


def test_what_is_not_a_number_is_equal_only_to_itself() -> None:
    broken = recording(1, np.nan, np.inf)
    assert compare_recordings(broken, broken).same_bits
    for other in (recording(1, 2, np.inf), recording(1, np.nan, -np.inf)):
        comparison = compare_recordings(broken, other)
        assert comparison.first is not None
        assert comparison.first.error == np.inf
        written = comparison.model_dump_json()
        json.loads(written, parse_constant=pytest.fail)
        read = Comparison.model_validate_json(written)
        assert read.first.error == np.inf
        assert np.isnan(read.first.a) or read.first.a == np.inf
        assert read.model_dump_json() == written


def test_a_verdict_names_what_is_not_finite_on_both_sides() -> None:
    broken, near = recording(1, np.nan), recording(1 + 1e-7, np.nan)
    more = dataclasses.replace(broken, gradients={'norm.weight': np.full(2, np.inf, np.float32)})
    proof = ', but numbers of {} are NaN or infinite on both sides'
    site = 'embedding forward'
    assert verdict(compare_recordings(broken, broken)).endswith(proof.format(site))
    assert verdict(compare_recordings(broken, near)).endswith(proof.format(site))
    assert verdict(compare_recordings(more, more)).endswith(proof.format(f'{site} and 1 more site'))
    different = verdict(compare_recordings(more, broken))
    assert different.startswith('first difference: gradient of norm.weight')
    assert different.endswith(proof.format(site))
    assert 'both sides' not in verdict(compare_recordings(recording(1), recording(1)))
    assert 'both sides' not in verdict(compare_recordings(broken, recording(1, 2)))


def test_a_gradient_that_is_all_rounding_is_relative_to_the_others() -> None:
    assert (
        compare_recordings(recording(1, gradient=1e-9), recording(1, gradient=-1e-9)).first is None
    )
    assert (
        compare_recordings(recording(1, gradient=1e-5), recording(1, gradient=-1e-5)).first
        is not None
    )


@pytest.mark.parametrize('gradients', [(0, 5e-6), (5e-6, 0), (1e-9, 5e-6)])
def test_a_gradient_that_one_side_lacks_is_a_difference(gradients: tuple[float, float]) -> None:
    a, b = (recording(1, gradient=gradient) for gradient in gradients)
    first = compare_recordings(a, b).first
    assert first is not None
    assert first.name == 'embedding.table'


def test_a_result_that_is_zero_in_a_is_relative_to_b() -> None:
    first = compare_recordings(recording(0, 0), recording(0, 9e-6)).first
    assert first is not None
    assert (first.name, first.error) == ('embedding', 1)


def test_gradients_summed_in_16_bits_leave_the_limits_of_a_forward_pass_in_fp32() -> None:
    config = make_config(optim={'reduce_dtype': 'bfloat16'}).model_dump(mode='json')
    about = ABOUT.model_copy(update={'config': config})
    a, b = (
        dataclasses.replace(
            recording(1 + error, gradient=1 + error),
            about=about,
            forward={name: np.array([1 + error], np.float32) for name in ('embedding', 'loss')},
        )
        for error in (0, 1e-2)
    )
    sites = {site.name: site for site in compare_recordings(a, b).sites}
    assert [name for name, site in sites.items() if not site.ok] == ['embedding', 'loss']


def test_zeros_of_two_signs_are_within_any_limit_but_not_equal_to_the_bit() -> None:
    comparison = compare_recordings(recording(0.0), recording(-0.0), tolerance=0)
    assert comparison.first is None
    assert not comparison.same_bits


def test_a_site_of_another_shape_or_of_one_side_is_a_difference_with_its_reason() -> None:
    first = compare_recordings(recording(1, 2), recording(1)).first
    assert first is not None
    assert first.note == '[2] in A, [1] in B'
    more = dataclasses.replace(recording(1), forward=recording(1).forward | {'norm': np.ones(1)})
    assert (
        verdict(compare_recordings(recording(1), more))
        == 'first difference: norm forward, only in B'
    )


def test_other_batches_are_refused() -> None:
    other = dataclasses.replace(recording(1), batch={'tokens': np.arange(5)})
    with pytest.raises(ConfigError, match='small and small have different batches'):
        compare_recordings(recording(1), other)


def test_a_layer_is_a_row_unless_it_has_the_first_difference() -> None:
    layers = [f'layers.{layer}.{part}' for layer in range(3) for part in ('attention', 'mlp')]

    def of_layers(*numbers: float) -> Recording:
        arrays = (np.array([number], np.float32) for number in numbers)
        forward = dict(zip(layers, arrays, strict=True))
        return dataclasses.replace(recording(1), forward=forward)

    comparison = compare_recordings(of_layers(1, 1, 1, 1, 1, 1), of_layers(1, 1, 1, 2, 3, 1))
    lines = as_text(to_text(comparison)).splitlines()
    sites = [line.split('  ')[0] for line in lines if line.startswith('layers.')]
    assert sites == ['layers.0 (2 sites)', *layers[2:4], 'layers.2 (2 sites)']
    every = as_text(to_text(comparison, every=True))
    assert all(f'\n{name} ' in every for name in layers)


def test_keys_that_differ_are_shown_with_both_values_above_the_sites() -> None:
    config = make_config(train={'seed': 7}).model_dump(mode='json')
    other = dataclasses.replace(recording(1), about=ABOUT.model_copy(update={'config': config}))
    said = as_text(to_text(compare_recordings(recording(1), other)))
    assert re.search(r'differs in +A +B *\ntrain.seed +1234 +7 *\n\nsite ', said)
    assert 'differs in' not in as_text(to_text(compare_recordings(recording(1), recording(1))))


def test_a_file_holds_a_recording_to_the_bit(tmp_path: Path) -> None:
    written = recording(1, np.nan, -0.0)
    write_recording(tmp_path / 'a.npz', written)
    assert compare_recordings(written, read_recording(tmp_path / 'a.npz')).same_bits
    assert [path.name for path in tmp_path.iterdir()] == ['a.npz']


@pytest.mark.parametrize('content', [b'', b'PK\3\4', b'no archive'])
def test_a_damaged_file_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    (tmp_path / 'a.npz').write_bytes(content)
    with pytest.raises(
        ConfigError, match=r'a\.npz was not written by this version of megajax compare'
    ):
        read_recording(tmp_path / 'a.npz')


def test_a_file_cut_short_is_refused_by_name(tmp_path: Path) -> None:
    write_recording(tmp_path / 'a.npz', recording(1))
    content = (tmp_path / 'a.npz').read_bytes()
    (tmp_path / 'a.npz').write_bytes(content[: len(content) // 2])
    with pytest.raises(
        ConfigError, match=r'a\.npz was not written by this version of megajax compare'
    ):
        read_recording(tmp_path / 'a.npz')
