"""Keys that keep the meaning of weights may differ from an import, and a run is told how else."""

import re
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_state, tiny
from support import gather, on_mesh

from megajax.core.config import Config, ConfigError
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.checkpoint.compare import check_same_model
from megajax.runtime.checkpoint.kept_weights import HARMLESS
from megajax.runtime.checkpoint.record import FIXED, OF_ROWS, make_record

EXPERTS = {'count': 4, 'active': 2, 'ffn_size': 16}
ROOT = Path(__file__).parents[3]
CHECKPOINT = Path('runs/a/checkpoints/3')


def small(**sections: Any) -> Config:
    model = {'position': 'rope', 'bias': False, 'experts': EXPERTS} | sections.pop('model', {})
    return tiny(1, 1, model=model, **sections)


def check(here: Config, *, is_import: bool) -> None:
    check_same_model(CHECKPOINT, make_record(small(), 3), make_record(here, 3), is_import=is_import)


@pytest.mark.parametrize(
    'sections',
    [
        {'train': {'dtype': 'float16'}},
        {'model': {'init_std': 0.1, 'max_seq_len': 64, 'rope_theta': 5e5}},
        {'model': {'experts': EXPERTS | {'balance_loss': 0.02}}, 'optim': {'kind': 'muon'}},
    ],
)
def test_keys_that_keep_the_weights_differ_from_an_import_and_need_a_new_run_otherwise(
    sections: dict[str, Any],
) -> None:
    here = small(**sections)
    check(here, is_import=True)
    with pytest.raises(ConfigError, match=r'begin a new run with run.start_from=runs/a$'):
        check(here, is_import=False)


@pytest.mark.parametrize('is_import', [False, True])
def test_another_model_is_refused_by_each_key(is_import: bool) -> None:
    experts = {'experts': EXPERTS | {'active': 1}, 'rope_theta': 5e3}
    with pytest.raises(ConfigError) as error:
        check(small(model=experts), is_import=is_import)
    assert str(error.value) == (
        f'{CHECKPOINT} contains a different model (model.experts.active 2 there, 1 here; '
        'model.rope_theta 10000.0 there, 5000.0 here): change these back, or choose another run.dir'
    )


def test_an_import_has_the_same_weights_in_any_dtype(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny(1, 1, train={'dtype': 'bfloat16'})
    half = tiny(1, 1, train={'dtype': 'float16'}, model={'dropout': 0.1})
    with on_mesh(config):
        params = make_state(config, 0).params
        with Checkpoints(tmp_path, config) as checkpoints:
            checkpoints.save({'params': params}, 0)
        with Checkpoints(tmp_path, half) as checkpoints, caplog.at_level('INFO'):
            restored = checkpoints.restore(0).params
    assert 'resume     train.dtype: bfloat16 -> float16' in caplog.text
    expected = gather(params)
    assert all((x == expected[name]).all() for name, x in gather(restored).items())


def test_the_pages_name_the_keys_that_a_run_may_and_may_not_change() -> None:
    resumed, started = (
        re.search(rf'{begin}.*?\n(?=\n|- )', (ROOT / f'docs/{page}.md').read_text(), re.DOTALL)[0]
        for page, begin in (('failures', 'A resume cannot change'), ('weights', '- With a config,'))
    )
    assert {key.removesuffix('.') for key in FIXED} | {*OF_ROWS} <= {
        *re.findall('`(.*?)`', resumed)
    }
    outside = {key for key in HARMLESS if not key.startswith(('model.', 'vision.'))}
    assert outside <= {*re.findall('`(.*?)`', started)}
