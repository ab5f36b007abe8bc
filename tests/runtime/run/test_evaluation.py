"""What needs an evaluation is rejected where there is nothing to evaluate on."""

from pathlib import Path

import pytest
from checkpoints import tiny

from megajax.core.config import ConfigError
from megajax.runtime.data import load_data
from megajax.runtime.run.evaluation import check_best


def test_the_best_checkpoints_need_a_validation_loss(tmp_path: Path) -> None:
    (tmp_path / 'a.jsonl').write_text(
        ''.join(f'{{"text": "{number} {"words " * 50}"}}\n' for number in range(50))
    )
    text = {'corpus': str(tmp_path / 'a.jsonl'), 'tokenizer': 'bytes'}
    config = tiny(data=text | {'split': '1,0,0'}, checkpoint={'keep_best': 2})
    refused = r'^checkpoint.keep_best: 2 has no effect, .* data.split=1,0,0 .*keep_best=null$'
    with pytest.raises(ConfigError, match=refused):
        check_best(config, load_data(config))
    for right in (
        tiny(data=text | {'split': '1,1,0'}, checkpoint={'keep_best': 2}),
        tiny(data=text | {'split': '1,0,0'}),
    ):
        check_best(right, load_data(right))
