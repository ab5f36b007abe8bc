"""Small runs to report on: a config, and the lines of its metrics."""

import json
from collections.abc import Mapping
from pathlib import Path

from megajax.analysis.report.read import read_runs
from megajax.analysis.report.run_facts import Facts

MODEL = 'model: {num_layers: 1, hidden_size: 8, num_heads: 1, vocab_size: 64, max_seq_len: 16, '


def facts_of(folder: Path, *lines: Mapping[str, object], model: str = '') -> Facts:
    """A run in a folder with these lines of metrics, and with more keys of `model`."""
    (folder / 'config.yaml').write_text(f'train: {{seq_len: 16}}\n{MODEL}{model}}}\n')
    text = ''.join(f'{json.dumps(line)}\n' for line in lines)
    (folder / 'metrics.jsonl').write_text(text)
    (run,) = read_runs([folder])
    return Facts(run=run, color=0)
