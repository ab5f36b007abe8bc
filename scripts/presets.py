"""Write the layouts that `megajax plan` advises into presets: python scripts/presets.py

The presets of PRESETS reproduce no paper's mesh. Each keeps its number of GPUs, its comments and
the order of its keys.
"""

import re
from pathlib import Path
from typing import Any

import megajax
from megajax.analysis.plan import Plan
from megajax.analysis.plan.advice import layout_keys
from megajax.core.config.schema import MeshConfig, OptimConfig, TrainConfig

GPU, NAME = 'h100', 'H100'
PRESETS = (
    'gemma3_1b',
    'gemma3_27b',
    'gpt3_175b',
    'llama3_70b',
    'llama3_8b',
    'llama3_8b_128k',
    'olmo2_7b',
    'olmo3_7b',
    'qwen3_8b',
    'qwen3_vl_2b',
    'qwen3_vl_32b',
    'qwen3_vl_4b',
    'qwen3_vl_8b',
    'recipes/continue_llama3_8b',
)
CONFIGS = Path(__file__).parents[1] / 'configs'
# The key of `train` that each key of a layout follows.
AFTER = {'microbatches': 'batch_size', 'schedule': 'microbatches'}
REASON = re.compile(r'# On \d+ .*\n# .*\n(?=mesh:)')


def rewritten(text: str, plan: Plan) -> str:
    """Return a preset with the fastest layout of a plan, and the reason as a comment."""
    best, layout = plan.best, plan.fastest()
    defaults = {'mesh': MeshConfig(), 'train': TrainConfig(), 'optim': OptimConfig()}
    keys = layout_keys(layout, layout.model_copy(update=defaults))
    text = _section(REASON.sub('', text), 'mesh', ''.join(map(_line, keys['mesh'].items())))
    text = re.sub(
        r'^  (microbatches|schedule|recompute|overlap|unroll|shard): .*\n',
        '',
        text,
        flags=re.MULTILINE,
    )
    for key, value in keys['train'].items():
        before = AFTER.get(key, 'seq_len')
        text = re.sub(
            rf'^(  {before}: .*\n)', rf'\1{_line((key, value))}', text, flags=re.MULTILINE
        )
    text = text.replace('optim:\n', 'optim:\n' + ''.join(map(_line, keys['optim'].items())))
    assert best.seconds is not None
    return text.replace(
        'mesh:\n',
        f'# On {plan.gpus} {NAME}s, `megajax plan --gpu {GPU}` predicts '
        f'{best.seconds:.2f} s a step and {best.bytes / 1e9:.1f} GB a GPU for this layout,\n'
        '# the fastest that it finds; not measured. `make presets` wrote it.\nmesh:\n',
    )


def _section(text: str, name: str, lines: str) -> str:
    return re.sub(rf'^{name}:\n(  .*\n)*', f'{name}:\n{lines}', text, flags=re.MULTILINE)


def _line(item: tuple[str, Any]) -> str:
    key, value = item
    return f'  {key}: {str(value).lower()}\n'


if __name__ == '__main__':
    for name in PRESETS:
        file = CONFIGS / f'{name}.yaml'
        plan = megajax.plan(megajax.load(name), gpu=GPU)
        file.write_text(rewritten(file.read_text(), plan))
        print(f'{name}: {plan.best.name}')
