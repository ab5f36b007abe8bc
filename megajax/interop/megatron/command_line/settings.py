"""The config keys that a Megatron-LM command line sets, section by section.

Imports no jax.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megajax.core.config import ConfigError
from megajax.core.config.section import plain_number
from megajax.interop.megatron.command_line.arguments import EOD, VOCABULARIES, read_arguments
from megajax.interop.megatron.command_line.line import Line
from megajax.interop.megatron.command_line.muon import muon_of

Keys = dict[str, Any]
# Megatron-LM's defaults, except a model's, which are in `arguments.py`. Where releases differ, they
# are megatron-core 0.19's, except for `eval_interval`: without it, 0.19 does not evaluate.
DEFAULTS: Mapping[str, Any] = {
    'tensor_model_parallel_size': 1,
    'pipeline_model_parallel_size': 1,
    'context_parallel_size': 1,
    'eval_interval': 1000,
    'eval_iters': 100,
    'log_interval': 100,
    'seed': 1234,
    'min_lr': 0.0,
    'lr_decay_style': 'linear',
    'lr_warmup_init': 0.0,
    'lr_wsd_decay_style': 'exponential',
    'weight_decay': 0.01,
    'adam_beta1': 0.9,
    'adam_beta2': 0.999,
    'adam_eps': 1e-8,
    'clip_grad': 1.0,
    'split': '969, 30, 1',
    'mid_level_dataset_surplus': 0.005,
    'cp_comm_type': 'p2p',
    'data_parallel_sharding_strategy': 'optim_grads_params',
    'profile_step_start': 10,
    'profile_step_end': 12,
}
NEEDED = ('num_layers', 'hidden_size', 'num_attention_heads', 'seq_length', 'lr')
SCHEDULES = {
    'constant': 'constant',
    'linear': 'linear',
    'cosine': 'cosine',
    'WSD': 'wsd',
    'inverse-square-root': 'inverse_sqrt',
}
SHARDS = {
    'no_shard': 'none',
    'optim': 'optimizer',
    'optim_grads': 'gradients',
    'optim_grads_params': 'weights',
}


def settings_of(line: Line, problems: list[str]) -> dict[str, Keys] | None:
    """Return the sections of a config, with Megatron-LM's defaults written out.

    Appends to `problems` every argument that is missing or contradicts another argument; a wrong
    value is replaced by a placeholder. Returns None if an argument is missing that every config
    needs.
    """
    if line.get('use_checkpoint_args'):
        problems.append(
            f'--use-checkpoint-args: the model is in the checkpoint {line.get("load")}: '
            'read it with `megajax import megatron`, which makes the config'
        )
    absent = [name for name in NEEDED if line.get(name) is None]
    problems += [f'{line.option(name)}: is missing' for name in absent if name not in line.faulty]
    has_length = bool(line.get('train_iters') or line.get('train_samples'))
    if not has_length and line.faulty.isdisjoint(('train_iters', 'train_samples')):
        problems.append('--train-iters: is missing, and so is --train-samples')
    if absent or not has_length:
        return None
    mesh = _mesh(line, problems)
    train = _train(line, mesh.get('data', 1), problems)
    return {
        'model': _model(line, mesh.get('data', 1), problems),
        'mesh': mesh,
        'train': train,
        'optim': _optim(line, train['steps'], train['batch_size'], problems),
        'data': _data(line, problems),
        'checkpoint': _checkpoint(line),
        'run': _run(line),
    }


def _default(line: Line, name: str) -> Any:
    return line.arguments.get(name, DEFAULTS[name])


def _model(line: Line, data: int, problems: list[str]) -> Keys:
    given = dict(line.arguments)
    given.setdefault('max_position_embeddings', given['seq_length'])
    # Two thirds of 4 times the hidden size.
    if given.get('swiglu') and 'ffn_hidden_size' not in given:
        given['ffn_hidden_size'] = int(4 * given['hidden_size'] * 2 / 3 / 64) * 64
    try:
        given['vocab_size'] = _vocab_size(line)
    except ConfigError as error:
        problems.append(str(error))
        given['vocab_size'] = VOCABULARIES['GPT2BPETokenizer']
    given['data_parallel_size'] = data
    given[EOD] = None  # the arguments are megatron-core 0.19's
    model = read_arguments(given, 'the arguments')
    return model | ({'objective': 'masked_lm'} if line.is_bert else {})


def _vocab_size(line: Line) -> int:
    # The programs' defaults if the arguments choose none.
    usual = 'BertWordPieceLowerCase' if line.is_bert else 'GPT2BPETokenizer'
    kind, size = line.get('tokenizer_type') or usual, line.get('vocab_size')
    if size is not None:
        return int(size)
    if kind in VOCABULARIES:
        return VOCABULARIES[kind]
    if (tokenizer := _tokenizer(line)) and Path(tokenizer).is_file():
        try:
            content = json.loads(Path(tokenizer).read_bytes())
            added = (token['id'] for token in content['added_tokens'])
            vocab = content['model']['vocab']
            ids = range(len(vocab)) if isinstance(vocab, list) else vocab.values()
            return 1 + max([*ids, *added])
        except (AttributeError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f'{tokenizer}: is not a tokenizer.json: {error!r:.80}') from error
    raise ConfigError(
        f'--tokenizer-type {kind}: the number of its tokens is not in the arguments: '
        'add --vocab-size N'
    )


def _tokenizer(line: Line) -> str | None:
    """Return the tokenizer.json that an argument points to."""
    model = line.get('tokenizer_model')
    if line.get('tokenizer_type') != 'HuggingFaceTokenizer' or not model:
        return None
    return model if model.endswith('.json') else f'{model}/tokenizer.json'


def _mesh(line: Line, problems: list[str]) -> Keys:
    tensor, stages, context = (
        _default(line, f'{kind}_parallel_size')
        for kind in ('tensor_model', 'pipeline_model', 'context')
    )
    mesh: Keys = {'model': tensor, 'stages': stages, 'context': context}
    if experts := line.get('expert_model_parallel_size'):
        mesh['experts'] = experts
    mesh['sequence_parallel'] = bool(line.get('sequence_parallel')) and tensor > 1
    if context > 1:
        names = {'p2p': 'ring', 'a2a': 'all_to_all'}
        mesh['context_exchange'] = names.get(_default(line, 'cp_comm_type'), 'gather')
    if virtual := _virtual_stages(line, stages, problems):
        mesh['virtual_stages'] = virtual
    if line.world_size is not None:
        # The config rejects sizes below one.
        data, rest = divmod(line.world_size, max(tensor * stages * context, 1))
        if rest or not data:
            problems.append(
                f'{line.world_size} GPUs are not a multiple of tensor x pipeline x context = '
                f'{tensor} x {stages} x {context}: give --gpus {tensor * stages * context}, or a '
                'multiple of it, before the arguments'
            )
        else:
            mesh['data'] = data
    if replicas := line.get('num_distributed_optimizer_instances'):
        mesh['replicas'] = replicas
    return mesh


def _virtual_stages(line: Line, stages: int, problems: list[str]) -> int | None:
    layers = line.get('num_layers_per_virtual_pipeline_stage')
    if not layers:
        return line.get('num_virtual_stages_per_pipeline_rank')
    if line.arguments['num_layers'] % (layers * max(stages, 1)):
        problems.append(
            f'--num-layers-per-virtual-pipeline-stage {layers} times {stages} stages does not '
            f'divide --num-layers {line.arguments["num_layers"]}'
        )
        return None
    return line.arguments['num_layers'] // (layers * max(stages, 1))


def _train(line: Line, data: int, problems: list[str]) -> Keys:
    micro = line.get('micro_batch_size') or 1
    batch = line.get('global_batch_size') or micro * data
    if batch % (micro * data):
        problems.append(
            f'--global-batch-size {batch}: is not a multiple of --micro-batch-size {micro} x '
            f'{data} data-parallel ranks'
        )
        batch = micro * data
    samples = line.get('train_samples')
    train: Keys = {
        'steps': line.get('train_iters') or samples // batch,
        'batch_size': batch,
        'microbatches': batch // (micro * data) if line.get('micro_batch_size') else 1,
        'seq_len': line.arguments['seq_length'],
        'dtype': _dtype(line, problems),
        'recompute': line.get('recompute_granularity') or 'none',
        'eval_every': _default(line, 'eval_interval'),
        'eval_batches': _default(line, 'eval_iters'),
        'log_every': _default(line, 'log_interval'),
        'seed': _default(line, 'seed'),
        'deterministic': bool(line.get('deterministic_mode')),
    }
    if line.get('fp8_recipe') == 'tensorwise' and train['dtype'] == 'fp8':
        train['fp8_scaling'] = 'current'
    if line.get('initial_loss_scale') and train['dtype'] == 'float16':
        train['loss_scale'] = line.get('initial_loss_scale')
    if line.get('profile'):
        start, end = (_default(line, f'profile_step_{edge}') for edge in ('start', 'end'))
        train['profile'] = {'start': start, 'steps': end - start}
    return train


def _dtype(line: Line, problems: list[str]) -> str:
    if line.get('fp16') and line.get('bf16'):
        problems.append('--fp16 and --bf16: give one of the two')
    if line.get('fp8_format'):
        return 'fp8'
    return 'float16' if line.get('fp16') else 'bfloat16' if line.get('bf16') else 'float32'


def _optim(line: Line, steps: int, batch: int, problems: list[str]) -> Keys:
    moments = {line.get(f'{moment}_dtype') for moment in ('exp_avg', 'exp_avg_sq')} - {None}
    if len(moments) > 1:
        problems.append('--exp-avg-dtype and --exp-avg-sq-dtype: both moments have one dtype')
    return {
        **muon_of(line.arguments),
        'lr': line.arguments['lr'],
        'min_lr': _default(line, 'min_lr'),
        **_schedule(line, steps, batch, problems),
        'weight_decay': _default(line, 'weight_decay'),
        'beta1': _default(line, 'adam_beta1'),
        'beta2': _default(line, 'adam_beta2'),
        'eps': _default(line, 'adam_eps'),
        'grad_clip': _default(line, 'clip_grad'),
        'shard': _shard(line),
        'reduce_dtype': 'bfloat16' if line.get('grad_reduce_in_bf16') else 'float32',
        'moments_dtype': 'bfloat16' if moments == {'bf16'} else 'float32',
    }


def _schedule(line: Line, steps: int, batch: int, problems: list[str]) -> Keys:
    """Return the keys of the learning rate; numbers of samples are converted to steps."""

    def number_of_steps(what: str) -> float | None:
        samples = line.get(f'{what}_samples')
        return line.get(f'{what}_iters') or (samples / batch if samples else None)

    decay = max(number_of_steps('lr_decay') or number_of_steps('train') or steps, 1)
    fraction = line.get('lr_warmup_fraction')
    warmup = fraction * decay if fraction else number_of_steps('lr_warmup') or 0
    init, falls = _default(line, 'lr_warmup_init'), line.arguments['lr'] != _default(line, 'min_lr')
    style = _default(line, 'lr_decay_style') if falls else 'constant'
    # Megatron-LM's warmup is then one sample, at the full lr
    if style == 'inverse-square-root' and not warmup:
        warmup, init = 1 / batch, line.arguments['lr']
    schedule: Keys = {
        'warmup_steps': plain_number(warmup),
        'warmup_init': init if warmup else None,
        'decay_steps': None if decay == steps or style == 'constant' else plain_number(decay),
        'schedule': SCHEDULES[style],
    }
    if style != 'WSD':
        return schedule
    if (fall := number_of_steps('lr_wsd_decay')) is None:
        problems.append('--lr-decay-style WSD: --lr-wsd-decay-iters is missing')
        return schedule
    return schedule | {
        'wsd_steps': plain_number(max(fall, 1)),
        'wsd_decay': _default(line, 'lr_wsd_decay_style'),
    }


def _shard(line: Line) -> str:
    if line.get('use_torch_fsdp2'):
        return 'weights'
    if line.get('use_megatron_fsdp'):
        return SHARDS[_default(line, 'data_parallel_sharding_strategy')]
    is_sharded = line.get('use_distributed_optimizer') or line.get('optimizer') == 'dist_muon'
    return 'optimizer' if is_sharded else 'none'


def _data(line: Line, problems: list[str]) -> Keys:
    data: Keys = {'split': ','.join(split_of(line))}
    paths = line.get('data_path') or []
    if len(paths) == 1:
        data['corpus'] = paths[0]
    elif paths:
        data['blend'] = _blend(paths, problems)
        if _default(line, surplus := 'mid_level_dataset_surplus') != DEFAULTS[surplus]:
            why = 'is not supported with several corpora, whose order depends on it'
            problems.append(f'{line.spelled[surplus]}: {why}: give {DEFAULTS[surplus]}')
    if paths and not line.is_bert:
        # The same samples in the same order; the corpus already consists of token ids.
        data |= {'order': 'megatron', 'tokenizer': _tokenizer(line) or 'none'}
    resets = [bool(line.get(f'reset_{what}')) for what in ('position_ids', 'attention_mask')]
    if any(resets) and not all(resets):
        both = '--reset-position-ids, --reset-attention-mask'
        problems.append(f'{both}: data.document_mask does both: give both, or neither')
    if line.get('eod_mask_loss') and not any(resets):
        problems.append(
            '--eod-mask-loss: is not supported alone: give --reset-position-ids and '
            '--reset-attention-mask too, which data.document_mask includes, or leave it out'
        )
    return data | {'document_mask': all(resets)}


def split_of(line: Line) -> list[str]:
    """Return the three parts of the data: as in Megatron-LM, the numbers in the text, then 0."""
    parts = re.findall(r'[.0-9]+', _default(line, 'split'))
    return parts + ['0'] * (3 - len(parts))


def _blend(paths: list[str], problems: list[str]) -> Keys:
    prefixes = paths[1::2]
    if twice := [path for number, path in enumerate(prefixes) if path in prefixes[:number]]:
        problems.append(
            f'--data-path {" ".join(paths)}: names {twice[0]} twice, which data.blend cannot: '
            'name it once, with the sum of its weights'
        )
    try:
        weights = [float(weight) for weight in paths[::2]]
        return dict(zip(prefixes, weights, strict=True))
    except ValueError:
        problems.append(
            f'--data-path {" ".join(paths)}: give each prefix its weight before it, '
            'as in --data-path 0.3 web 0.7 books'
        )
        return {}


def _checkpoint(line: Line) -> Keys:
    keys = {'every': line.get('save_interval'), 'keep_every': line.get('save_retain_interval')}
    return {key: value for key, value in keys.items() if value}


def _run(line: Line) -> Keys:
    run = {
        'dir': f'{save.rstrip("/")}-megajax' if (save := line.get('save')) else None,
        'max_minutes': line.get('exit_duration_in_mins'),
        'wandb': line.get('wandb_project') or None,
    }
    return {key: value for key, value in run.items() if value is not None}
