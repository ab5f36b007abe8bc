"""A recipe fits the GPUs that it names, and trains a small model as it trains the large one."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from checkpoints import make_state
from support import ROOT, on_mesh, slow

from megajax.analysis.plan.network import Cluster
from megajax.analysis.plan.search import memory_on, usable_memory
from megajax.core.config import Config, load, recipes
from megajax.core.config.lora import without_adapters
from megajax.core.config.overlap_rules import resolved
from megajax.core.hardware.records import hardware
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.runtime.checkpoint.compare import read_parameter
from megajax.runtime.data.text.tokenizer import byte_tokenizer
from megajax.runtime.run.run import run

SMALL = [
    'model.num_layers=1',
    'model.hidden_size=32',
    'model.num_heads=4',
    'model.num_kv_heads=2',
    'model.ffn_size=64',
    'model.vocab_size=300',
    'model.max_seq_len=64',
    'train.seq_len=64',
    'train.batch_size=8',
    'train.microbatches=2',
    'train.steps=4',
    'train.eval_every=4',
    'train.eval_batches=1',
    'checkpoint.every=4',
    'optim.warmup_steps=1',
    'data.tokenizer=bytes',
    'data.split=6,2,0',
]
LINES = {
    'recipes/continue_llama3_8b': {'text': 'Once more: the reduction stands after the product. '},
    'recipes/lora_llama3_8b': {
        'messages': [
            {'role': 'user', 'content': 'Where does the reduction stand?'},
            {'role': 'assistant', 'content': 'After it.'},
        ]
    },
}


@pytest.mark.parametrize('name', recipes())
def test_a_recipe_fits_its_gpus(name: str) -> None:
    config = resolved(load(name), on_gpu=True)
    cluster = Cluster.of(hardware('h100'), config.mesh.num_devices)
    assert memory_on(config, cluster).total <= usable_memory(cluster)


@pytest.mark.parametrize('name', recipes())
def test_a_recipe_names_the_rotary_scaling_of_llama_3_1(name: str) -> None:
    header = (ROOT / f'configs/{name}.yaml').read_text().partition('\nmodel:')[0]
    found = re.search(r"(model\.rope_scaling)='(.*)'", header)
    assert found
    model = load(name, ['='.join(found.groups())]).model
    assert model.rope_scaling == load('llama3_8b_128k').model.rope_scaling


@pytest.mark.parametrize('name', recipes())
def test_a_recipe_for_several_gpus_reads_token_files(name: str) -> None:
    config, text = load(name), (ROOT / f'configs/{name}.yaml').read_text()
    build = rf'megajax data build {config.data.corpus} .*--tokenizer {config.data.tokenizer} '
    assert bool(re.search(build, text)) == (config.mesh.num_devices > 1)


def imported(folder: Path, config: Config) -> Path:
    """A model at step 0, as an import leaves it."""
    with (
        on_mesh(config),
        Checkpoints(folder / 'checkpoints', config, tokenizer=byte_tokenizer()) as checkpoints,
    ):
        checkpoints.save({'params': make_state(config, 0).params}, 0)
    byte_tokenizer().save(folder / 'tokenizer.json')
    return folder


@pytest.mark.parametrize('name', [name if 'lora' in name else slow(name) for name in recipes()])
def test_a_recipe_trains_a_small_model(name: str, tmp_path: Path) -> None:
    (tmp_path / 'mine.jsonl').write_text((json.dumps(LINES[name]) + '\n') * 200)
    small = [*SMALL, f'mesh.data={min(4, load(name).mesh.data)}']
    base = imported(tmp_path / 'base', without_adapters(load(name, small)))
    config = load(
        name,
        [
            *small,
            f'data.corpus={tmp_path}/mine.jsonl',
            f'run.dir={tmp_path}/run',
            f'run.start_from={base}',
        ],
    )
    done = run(config, name='small')
    assert done.step == 4
    lines = [json.loads(line) for line in (tmp_path / 'run/metrics.jsonl').open()]
    assert all(np.isfinite(line['loss']) for line in lines if 'loss' in line)
    before = read_parameter(base / 'checkpoints/0', 'layers.mlp.up.weight')
    after = read_parameter(tmp_path / 'run/checkpoints/4', 'layers.mlp.up.weight')
    is_kept = np.array_equal(after, before.astype(after.dtype))
    assert is_kept == (config.lora is not None)
