"""The config keys that a Megatron-LM command line sets, section by section.

Imports no jax.
"""

from typing import Any

from megajax.core.config import ConfigError
from megajax.core.config.section import plain_number
from megajax.interop.megatron.command_line.arguments import EOD, VOCABULARIES, read_arguments
from megajax.interop.megatron.command_line.corpus import data_of, vocab_size_of
from megajax.interop.megatron.command_line.line import Line
from megajax.interop.megatron.command_line.muon import muon_of

Keys = dict[str, Any]
NEEDED = ('num_layers', 'hidden_size', 'num_attention_heads', 'seq_length', 'lr')
GROUPS = 'num_query_groups'
SCHEDULES = {
    'constant': 'constant',
    'linear': 'linear',
    'cosine': 'cosine',
    'WSD': 'wsd',
    'inverse-square-root': 'inverse_sqrt',
}
DTYPES = {'fp16': 'float16', 'bf16': 'bfloat16'}
PRECISIONS = {  # NeMo's values of trainer.precision
    'bf16': 'bfloat16',
    'bf16-mixed': 'bfloat16',
    '16': 'float16',
    '16-mixed': 'float16',
    '32': 'float32',
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
        'data': data_of(line, problems),
        'checkpoint': _checkpoint(line),
        'run': _run(line),
    }


def _model(line: Line, data: int, problems: list[str]) -> Keys:
    given = dict(line.arguments)
    given.setdefault('max_position_embeddings', given['seq_length'])
    # Two thirds of 4 times the hidden size.
    if given.get('swiglu') and 'ffn_hidden_size' not in given:
        given['ffn_hidden_size'] = int(4 * given['hidden_size'] * 2 / 3 / 64) * 64
    try:
        given['vocab_size'] = vocab_size_of(line)
    except ConfigError as error:
        problems.append(str(error))
        given['vocab_size'] = VOCABULARIES['GPT2BPETokenizer']
    # NeMo and Megatron-Bridge have only the number.
    if not line.spelled.get(GROUPS, '--').startswith('-'):
        given.setdefault('group_query_attention', True)
    given['data_parallel_size'] = data
    given[EOD] = None  # the arguments are megatron-core 0.19's
    model = read_arguments(given, 'the arguments')
    return model | ({'objective': 'masked_lm'} if line.is_bert else {})


def _mesh(line: Line, problems: list[str]) -> Keys:
    tensor, stages, context = (
        line.default(f'{kind}_parallel_size')
        for kind in ('tensor_model', 'pipeline_model', 'context')
    )
    mesh: Keys = {'model': tensor, 'stages': stages, 'context': context}
    if experts := line.get('expert_model_parallel_size'):
        mesh['experts'] = experts
    mesh['sequence_parallel'] = bool(line.get('sequence_parallel')) and tensor > 1
    if context > 1:
        names = {'p2p': 'ring', 'a2a': 'all_to_all'}
        mesh['context_exchange'] = names.get(line.default('cp_comm_type'), 'gather')
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
        'eval_every': line.default('eval_interval'),
        'eval_batches': line.default('eval_iters'),
        'log_every': line.default('log_interval'),
        'seed': line.default('seed'),
        'deterministic': bool(line.get('deterministic_mode')),
    }
    if line.get('fp8_recipe') == 'tensorwise' and train['dtype'] == 'fp8':
        train['fp8_scaling'] = 'current'
    if line.get('initial_loss_scale') and train['dtype'] == 'float16':
        train['loss_scale'] = line.get('initial_loss_scale')
    if line.get('profile'):
        start, end = (line.default(f'profile_step_{edge}') for edge in ('start', 'end'))
        train['profile'] = {'start': start, 'steps': end - start}
    return train


def _dtype(line: Line, problems: list[str]) -> str:
    given = {dtype: name for name, dtype in DTYPES.items() if line.get(name)}
    if precision := line.get('precision'):
        given.setdefault(PRECISIONS[precision], 'precision')
    options = ' and '.join(map(line.option, given.values()))
    if len(given) > 1:
        problems.append(f'{options}: give one of them')
    if line.get('fp8_format'):
        if 'bfloat16' not in given:
            fix = 'give --bf16' + (f' instead of {options}' if options else '')
            problems.append(f'{line.spelled["fp8_format"]}: the rest computes in bf16: {fix}')
        return 'fp8'
    return next(iter(given), 'float32')


def _optim(line: Line, steps: int, batch: int, problems: list[str]) -> Keys:
    moments = {line.get(f'{moment}_dtype') or 'fp32' for moment in ('exp_avg', 'exp_avg_sq')}
    if len(moments) > 1:
        problems.append(
            '--exp-avg-dtype and --exp-avg-sq-dtype: both moments have one dtype, which is fp32 '
            'by default: give both the same'
        )
    return {
        **muon_of(line.arguments),
        'lr': line.arguments['lr'],
        'min_lr': line.default('min_lr'),
        **_schedule(line, steps, batch, problems),
        'weight_decay': line.default('weight_decay'),
        'beta1': line.default('adam_beta1'),
        'beta2': line.default('adam_beta2'),
        'eps': line.default('adam_eps'),
        'grad_clip': line.default('clip_grad'),
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
    init, falls = line.default('lr_warmup_init'), line.arguments['lr'] != line.default('min_lr')
    style = line.default('lr_decay_style') if falls else 'constant'
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
        'wsd_decay': line.default('lr_wsd_decay_style'),
    }


def _shard(line: Line) -> str:
    if line.get('use_torch_fsdp2'):
        return 'weights'
    if line.get('use_megatron_fsdp'):
        return SHARDS[line.default('data_parallel_sharding_strategy')]
    is_sharded = line.get('use_distributed_optimizer') or line.get('optimizer') == 'dist_muon'
    return 'optimizer' if is_sharded else 'none'


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
