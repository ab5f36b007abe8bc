"""The ways of two users, from the first command to the last: an engineer who trains a downloaded
model on several processes and hands it on, and one who comes from Megatron-LM.
"""

import json
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import support
from runs import finish, losses, read_until, start, steps
from support import ROOT, write_run

from megajax.runtime.data.tokens.indexed import write_index

pytestmark = pytest.mark.faults

CONFIG = """
model: {num_layers: 2, hidden_size: 32, num_heads: 4, vocab_size: 300, max_seq_len: 64,
        norm: rmsnorm, activation: swiglu, position: rope, bias: false}
train: {steps: 12, batch_size: 4, seq_len: 32, dtype: float32, log_every: 1}
checkpoint: {every: 4}
optim: {lr: 1e-2}
"""


def megajax(folder: Path, *arguments: str) -> str:
    """What a command says, without the progress on its other stream."""
    done = support.megajax(*arguments, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def greedy(folder: Path, run: str) -> str:
    options = ('--prompt', 'def f1(', '--max-tokens', '16', '--temperature', '0')
    return megajax(folder, 'generate', run, *options)


@pytest.mark.exhaustive
def test_a_downloaded_model_is_trained_on_two_processes_resumed_elsewhere_and_handed_on(
    tmp_path: Path,
) -> None:
    folder = write_run(tmp_path, CONFIG, split='1,0,0')
    megajax(folder, 'train', 'small.yaml', 'run.dir=first', 'train.steps=1')
    megajax(folder, 'export', 'hf', 'first', 'downloaded')
    megajax(folder, 'import', 'hf', 'downloaded', 'base', 'train.dtype=float32')

    lines = [json.dumps({'text': f'def f{n}(x):\n    return x + {n}\n' * 9}) for n in range(60)]
    (folder / 'mine.jsonl').write_text('\n'.join(lines))
    own = (
        'run.start_from=base',
        f'data.corpus={folder}/mine.jsonl',
        'mesh.data=2',
        'mesh.model=2',
        'train.steps=60',  # enough that the signal comes before the last
        'optim.lr=1e-3',
    )
    stopped = start(folder, *own, processes=2, name='mine')
    read_until(stopped, r'step 6/60')
    stopped.send_signal(signal.SIGTERM)
    code, said = finish(stopped)
    assert code == 75, said
    before = steps(folder / 'mine')[-1]
    assert 6 <= before < 60

    said = megajax(folder, 'train', 'run.dir=mine', 'mesh.data=1', 'mesh.model=4')
    assert re.search(rf'resume .*mine/checkpoints, step {before}', said)
    code, said = finish(start(folder, *own, name='undisturbed'))
    assert code == 0, said
    disturbed, undisturbed = losses(folder / 'mine'), losses(folder / 'undisturbed')
    assert disturbed == pytest.approx(undisturbed, rel=1e-5)
    assert disturbed[60] < disturbed[1]

    (folder / 'held_out.txt').write_text('def f61(x):\n    return x + 61\n' * 9)
    said = megajax(folder, 'eval', 'mine', '--task', 'perplexity', 'held_out.txt')
    assert 'bits_per_byte' in said

    megajax(folder, 'export', 'hf', 'mine', 'tuned')
    text = greedy(folder, 'mine')
    megajax(folder, 'import', 'hf', 'tuned', 'again', 'train.dtype=float32')
    assert greedy(folder, 'again') == text
    transformers = pytest.importorskip('transformers', reason='needs transformers and torch')
    pytest.importorskip('torch', reason='needs transformers and torch')
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / 'tuned')
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / 'tuned')
    prompt = tokenizer(tokenizer.eos_token + 'def f1(', return_tensors='pt')
    ids = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    assert tokenizer.decode(ids[0], skip_special_tokens=True).strip() == text.strip()


LINE = """
    torchrun --nproc_per_node 4 pretrain_gpt.py --tensor-model-parallel-size 2
    --num-layers 2 --hidden-size 16 --num-attention-heads 4 --ffn-hidden-size 32
    --seq-length 24 --max-position-embeddings 32 --hidden-dropout 0 --attention-dropout 0
    --no-bias-gelu-fusion
    --micro-batch-size 2 --global-batch-size 8 --train-iters 6 --lr 1e-2 --min-lr 1e-3
    --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0
    --tokenizer-type NullTokenizer --vocab-size 60 --data-path ids --split 9,1,0
    --save-interval 3 --eval-interval 3 --eval-iters 1 --log-interval 1
"""


def test_a_line_and_a_checkpoint_of_megatron_go_on_here(tmp_path: Path) -> None:
    shutil.unpack_archive(ROOT / 'tests/interop/torch_dist/gpt2.tar.xz', tmp_path / 'theirs')
    ids = (np.arange(4000) % 50).astype(np.uint16)  # a document counts to 48
    ids[49::50] = 59  # and ends
    ids.tofile(tmp_path / 'ids.bin')
    with (tmp_path / 'ids.idx').open('wb') as file:
        write_index(file, ids.dtype, np.full(80, 50, np.int32), np.arange(81))

    config = megajax(tmp_path, 'config', 'from-megatron', *LINE.split())
    (tmp_path / 'my.yaml').write_text(config)
    said = megajax(tmp_path, 'import', 'megatron', 'theirs', 'base', 'train.dtype=float32')
    assert re.search(r'checkpoint base/checkpoints/0', said)
    megajax(tmp_path, 'train', 'my.yaml', 'run.start_from=base', 'run.dir=mine')
    found = losses(tmp_path / 'mine')
    assert [*found] == [1, 2, 3, 4, 5, 6]
    assert found[6] < found[1]
    megajax(tmp_path, 'export', 'megatron', 'mine', 'back', '--tensor-parallel', '2')
    assert {path.name for path in (tmp_path / 'back').rglob('*.pt')} == {'model_optim_rng.pt'}
