"""The configs of the benchmarks that compile steps, and the tables that these extend."""

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from support import load_script

from megajax.core.config import presets

rows, collectives = load_script('compiled_rows'), load_script('collectives')


@pytest.mark.parametrize('preset', sorted(presets()))
def test_collectives_of_each_preset_are_over_data_and_model(preset: str) -> None:
    keys = {'sequence_parallel': 'True', 'microbatches': '1', 'recompute': 'none'}
    for data, model in collectives.MESHES:
        config = collectives.load(preset=preset, data=str(data), model=str(model), **keys)
        assert config is None or config.mesh.num_devices == data * model
        assert config is None or {*config.mesh.sizes} == {'data', 'model'}


@pytest.mark.parametrize('name', ['layouts', 'overlap', 'stages'])
def test_each_step_of_a_table_has_a_config(name: str) -> None:
    script = load_script(name)
    for step, words in rows.steps_of(script.STEPS):
        assert script.load(words), step


def test_a_table_continues_after_each_interruption(tmp_path: Path) -> None:
    path = tmp_path / 'out.csv'
    steps = rows.steps_of('first | a b\nsecond | c')
    assert steps == [('first', ['a', 'b']), ('second', ['c'])]

    def measured(count: int) -> Iterator[dict[str, str]]:
        for name, _ in rows.missing(path, steps)[:count]:
            yield {'name': name, 'jax': jax.__version__}
        if count < 2:
            raise KeyboardInterrupt

    for count in (0, 1):
        with pytest.raises(KeyboardInterrupt):
            rows.extend(path, ['name', 'jax'], measured(count))
    rows.extend(path, ['name', 'jax'], measured(2))
    assert [row['name'] for row in rows.read(path)] == ['first', 'second']
    assert not rows.missing(path, steps)
