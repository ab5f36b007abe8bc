"""Files of models, checkpoints and runs that megajax reads: small ones, and their readers."""

import shutil
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from mutants.data_files import ROOT
from runs import train

INTEROP = ROOT / 'tests/interop'


def write_model(folder: Path) -> None:
    """A Hugging Face directory of each family, without weights."""
    for name in ('gpt2', 'llama3', 'phi3', 'olmo2', 'qwen3'):
        shutil.copytree(INTEROP / 'data' / name, folder / name)
    shutil.copytree(INTEROP / 'qwen3_vl', folder / 'qwen3_vl')
    for path in folder.glob('*/*'):
        if path.suffix != '.json':
            path.unlink()
    (folder / 'gpt2/generation_config.json').write_text('{"eos_token_id": [3, 4]}')
    (folder / 'gpt2/tokenizer_config.json').write_text(
        '{"chat_template": [{"name": "default", "template": "{{ messages }}"}], "eos_token": "a"}'
    )


def read_model(path: Path) -> None:
    from megajax.base.files.json_file import read_json
    from megajax.core.config import reload
    from megajax.interop.folder import settings
    from megajax.interop.huggingface.families import read_family
    from megajax.interop.huggingface.preprocessor import read_preprocessor
    from megajax.runtime.checkpoint.hf_files import companions_of_model

    folder = path.parent
    keys = read_json(folder / 'config.json')
    _, model, _ = read_family(keys, str(path))
    if 'vision' in model:
        read_preprocessor(folder, model['vision'])
    fits = ['vision.max_patches=64'] if 'vision' in model else []
    config = reload(settings(model, Path('run'), None), fits, place=str(path))
    companions_of_model(folder, keys, config.model.vocab_size)


def write_safetensors(folder: Path) -> None:
    from megajax.interop.huggingface.tensors import Tensor, write_tensors

    plan = [Tensor(name, x.shape, x.dtype) for name, x in _arrays().items()]
    for shard_bytes in (300, 10**6):
        (folder / str(shard_bytes)).mkdir()
        arrays = iter(_arrays().values())
        write_tensors(folder / str(shard_bytes), plan, arrays, shard_bytes=shard_bytes)


def _arrays() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {
        'embedding.word_embeddings.weight': (16, 8),
        'decoder.layers.0.mlp.linear_fc1.weight': (32, 8),
        'decoder.final_layernorm.weight': (8,),
    }
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def read_safetensors(path: Path) -> None:
    from megajax.interop.huggingface.tensors import read_tensors

    for x in read_tensors(path.parent).values():
        x.copy()


ARGUMENTS: dict[str, Any] = {
    'num_layers': 1, 'hidden_size': 8, 'num_attention_heads': 2, 'vocab_size': 16,
    'max_position_embeddings': 8, 'swiglu': False, 'position_embedding_type': 'rope',
    'add_bias_linear': False, 'norm_epsilon': 1e-5, 'use_rope_scaling': True,
}  # fmt: skip


def write_ranks(folder: Path) -> None:
    from interop.oracles import write_ranks

    write_ranks(folder, _arrays(), 2, ARGUMENTS)


def read_ranks(path: Path) -> None:
    from megajax.interop.megatron.command_line.arguments import read_arguments
    from megajax.interop.megatron.rank_files import find_ranks, read_rank

    top = path.parents[2] if path.suffix == '.pt' else path.parent
    for rank, files in enumerate(find_ranks(top)):
        content = read_rank(files[0])
        for x in content.chunks[0].values():
            x.copy()
        if not rank:
            read_arguments(content.arguments, str(path))


def write_dist(folder: Path) -> None:
    from interop.dist_writer import Part, write_checkpoint

    arrays = _arrays()
    parts = [
        Part(name, (start, *[0] * (x.ndim - 1)), x[start : start + len(x) // 2])
        for name, x in arrays.items()
        for start in (0, len(x) // 2)
    ]
    shapes = {name: x.shape for name, x in arrays.items()}
    write_checkpoint(folder, parts, shapes, args=ARGUMENTS, checkpoint_version=3.0)


def read_dist(path: Path) -> None:
    from interop.dist_writer import ITERATION

    from megajax.interop.megatron.command_line.arguments import of_model, read_arguments
    from megajax.interop.megatron.dist_checkpoint import open_checkpoint, open_chunks
    from megajax.interop.megatron.rank_files import newest

    top = path.parent.parent if path.parent.name == ITERATION else path.parent
    checkpoint = open_checkpoint(newest(top))
    read_arguments(of_model(checkpoint.arguments, str(path)), str(path))
    for _, _, x in open_chunks(checkpoint.folder, checkpoint.tensors):
        x.copy()


SCRIPT = """#!/bin/bash
ARGS=( --num-layers 24 --hidden-size 1024 --num-attention-heads 16 )
DATA="--seq-length 1024 --max-position-embeddings 1024 --tokenizer-model tokenizer.json"
WORLD_SIZE=8 torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py ${ARGS[@]} $DATA \\
  --micro-batch-size 4 --global-batch-size 64 --lr 0.00015 --train-iters 500000 --min-lr 1e-5 \\
  --lr-decay-style cosine --lr-warmup-fraction .01 --clip-grad 1.0 --bf16 --split 949,50,1 \\
  --tensor-model-parallel-size 2 --tokenizer-type HuggingFaceTokenizer --eval-iters 10 \\
  --pipeline-model-parallel-size 2 --save a --load a --log-interval 100 --swiglu --vocab-size 300
"""


def write_script(folder: Path) -> None:
    from megajax.runtime.data.text.tokenizer import byte_tokenizer

    (folder / 'train.sh').write_text(SCRIPT)
    (folder / 'other.sh').write_text(SCRIPT.replace('--vocab-size 300', ''))
    byte_tokenizer().save(folder / 'tokenizer.json')


def read_script(path: Path) -> None:
    from megajax.interop.megatron.command_line.line import read_line
    from megajax.interop.megatron.command_line.to_config import from_megatron

    script = path if path.suffix == '.sh' else path.with_name('other.sh')
    with chdir(path.parent):
        from_megatron(read_line([f'@{script}']))


def write_recording(folder: Path) -> None:
    from megajax.analysis.compare.recording import About, Recording, write_recording

    about = About(
        source='a', config={'model': {}}, executed_with='jax', megajax='1', platform='cpu',
        weights={'a': '0'},
    )  # fmt: skip
    arrays = _arrays()
    recording = Recording(about=about, batch=arrays, forward=arrays, gradients=arrays)
    write_recording(folder / 'a.npz', recording)


def read_recording(path: Path) -> None:
    from megajax.analysis.compare.recording import read_recording

    read_recording(path)


RUN = """
model: {num_layers: 1, hidden_size: 16, num_heads: 1, vocab_size: 300, max_seq_len: 16}
train: {steps: 4, batch_size: 2, seq_len: 16, dtype: float32, eval_every: 2, eval_batches: 1, \
log_every: 1, sample_prompts: ['def '], profile: {start: 1, steps: 2}}
checkpoint: {every: 2}
"""


def write_run_folder(folder: Path) -> None:
    from support import write_run

    train(write_run(folder, RUN), JAX_PLATFORMS='cpu')
    (folder / 'run/checkpoints/2/validation_loss.json').write_text('3.5')


def read_run_folder(path: Path) -> None:
    from megajax.analysis.report.write import write_report

    run = next(parent for parent in path.parents if parent.name == 'run')
    write_report([run], run.with_name('report.html'), max_program=0)


def read_checkpoint(path: Path) -> None:
    from megajax.commands.checkpoint import ls
    from megajax.core.config import reload
    from megajax.runtime.checkpoint.compare import parameter_shapes
    from megajax.runtime.checkpoint.digests import find_foreign, find_steps, problems
    from megajax.runtime.checkpoint.record import config_differences, other_differences, read_record

    run = path.parents[2]
    with redirect_stdout(StringIO()):
        ls(run)
    find_steps(run / 'checkpoints')
    find_foreign(run / 'checkpoints')
    problems(path.parent)
    record, other = read_record(path.parent), read_record(run / 'checkpoints/4')
    config_differences(record, other)
    other_differences(record, other)
    reload(record.config, place=str(path))
    parameter_shapes(path.parent)


def read_profile(path: Path) -> None:
    from megajax.analysis.profile import profile

    profile(next(parent for parent in path.parents if parent.name == 'run'))
