"""Convert a Megatron-LM command line to a config file. Imports no jax."""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megajax.base.render.text import typed
from megajax.core.config import Config, ConfigError, Problem, reload
from megajax.core.config.load import dump_sections
from megajax.core.config.schema import keys_of
from megajax.interop.megatron.command_line import muon
from megajax.interop.megatron.command_line.arguments import NULL, rejected
from megajax.interop.megatron.command_line.corpus import split_of, tokenizer_of
from megajax.interop.megatron.command_line.keys import SOURCES
from megajax.interop.megatron.command_line.line import Line
from megajax.interop.megatron.command_line.script import WAY_OUT
from megajax.interop.megatron.command_line.settings import (
    GROUPS,
    PRECISIONS,
    SCHEDULES,
    settings_of,
)

COLUMNS = 100
DROPOUT = 'attention_dropout'
AMAX = 1024, 'max'  # as in `core/train/scaling.py`
# Supported values of arguments, and what to do instead of using other values.
VALUES: Mapping[str, tuple[tuple[Any, ...], str]] = {
    'optimizer': (('adam', *muon.KINDS), 'give adam or muon'),
    'lr_decay_style': (tuple(SCHEDULES), f'give {", ".join(SCHEDULES)}'),
    'lr_wsd_decay_style': (
        ('linear', 'cosine', 'exponential', 'minus_sqrt'),
        'give linear, cosine, exponential or minus_sqrt',
    ),
    'weight_decay_incr_style': (('constant',), 'the decay is constant: give --weight-decay'),
    'loss_scale': ((0.0,), 'the scale of fp16 is dynamic: leave it out'),
    'precision': (tuple(PRECISIONS), f'give {", ".join(PRECISIONS)}'),
    'fp8_format': (('hybrid',), 'matmuls are e4m3 forward and e5m2 backward: give hybrid'),
    'fp8_recipe': (('delayed', 'tensorwise'), 'give delayed or tensorwise'),
    'first_last_layers_bf16': ((False,), 'all layers have FP8 matmuls: leave it out'),
    'no_fp8_wgrad': ((False,), 'gradients of weights are FP8 matmuls too: leave it out'),
    'fp32_residual_connection': ((False,), 'sublayers add in train.dtype: leave it out'),
    'cp_comm_type': (
        ('p2p', 'all_gather', 'a2a'),
        'give p2p, which is a ring, all_gather, or a2a (Ulysses)',
    ),
    'dataloader_type': (('single',), 'samples are read in their order: give single'),
    'mask_prob': ((0.15,), 'give 0.15'),
    'exp_avg_dtype': (('fp32', 'bf16'), 'give fp32 or bf16'),
    'exp_avg_sq_dtype': (('fp32', 'bf16'), 'give fp32 or bf16'),
    'recompute_granularity': (('full', 'selective'), 'give full or selective'),
    'recompute_modules': ((['core_attn'],), 'give core_attn, or --recompute-granularity full'),
    'data_parallel_sharding_strategy': (
        ('no_shard', 'optim', 'optim_grads', 'optim_grads_params'),
        'give no_shard, optim, optim_grads or optim_grads_params',
    ),
    'position_embedding_type': (('learned_absolute', 'rope'), 'give learned_absolute or rope'),
    'normalization': (('LayerNorm', 'RMSNorm'), 'give LayerNorm or RMSNorm'),
}


def from_megatron(line: Line) -> str:
    """Return an equivalent YAML file, with comments that name the omitted arguments.

    The file has each key that an argument sets, and each of Megatron-LM's defaults that differs
    from megajax's.

    Raises ConfigError with all arguments that are not supported, missing or contradictory.
    """
    problems = list(_problems(line))
    settings = config = None
    try:
        if settings := settings_of(_supported(line), problems):
            config = reload(settings, place='')
    except ConfigError as error:
        problems += [_in_their_names(line, problem) for problem in error.problems]
    if line.place:  # the script's command has an unknown part
        problems.append(f'{line.place}: {WAY_OUT}')
    if problems or settings is None or config is None:
        raise ConfigError(*dict.fromkeys(problems))
    keys = dump_sections(_written(line, settings, config)).splitlines()
    return (
        '\n'.join([*_head(line, config), *_with_notes(line, config, keys), *_unused(line)]) + '\n'
    )


def _supported(line: Line) -> Line:
    """Return the line without the arguments that `_problems` rejects."""
    wrong = {name for name, *_ in rejected(line.arguments)} | {
        name
        for name, (allowed, _) in VALUES.items()
        if name in line.arguments and line.arguments[name] not in allowed
    }
    wrong |= {name for name, *_ in muon.unsupported(line.arguments)}
    kept = {name: value for name, value in line.arguments.items() if name not in wrong}
    for name in ('clip_grad', 'eval_iters'):
        if kept.get(name) == 0:
            del kept[name]
    return line._replace(arguments=kept)


def _in_their_names(line: Line, problem: Problem | str) -> str:
    """Return a problem of the config, with Megatron-LM's arguments in place of megajax's keys."""

    def name(match: re.Match[str]) -> str:
        sources = SOURCES.get(match[1])
        if sources is None:
            return match[0]
        given = next((source for source in sources if source in line.spelled), sources[0])
        return line.option(given) + (' ' if match[2] else '')

    return re.sub(
        r'\b((?:model|mesh|train|optim|data|run|checkpoint)(?:\.\w+)+)(=?)', name, str(problem)
    )


def _problems(line: Line) -> Iterator[str]:
    yield from line.problems
    for name, _, instead in rejected(line.arguments):
        yield f'{line.spelled[name]}: is not supported: {instead}'
    for name, (allowed, instead) in VALUES.items():
        if name in line.arguments and line.arguments[name] not in allowed:
            yield f'{line.spelled.get(name, name)}: is not supported: {instead}'
    for name, value, instead in muon.unsupported(line.arguments):
        written = line.spelled.get(name, f'{line.option(name)} {value}, the default')
        yield f'{written}: is not supported with Muon: {instead}'
    decay = line.get('weight_decay')
    for name in ('start_weight_decay', 'end_weight_decay'):
        if line.get(name) not in (None, decay):
            yield f'{line.spelled[name]}: is not supported: the decay is constant'
    if line.get('no_position_embedding') and line.get('position_embedding_type') != 'rope':
        yield '--no-position-embedding: is not supported: give --position-embedding-type rope too'
    tensor = line.get('tensor_model_parallel_size') or 1
    if line.get('expert_tensor_parallel_size') not in (None, tensor):
        yield (
            f'{line.spelled["expert_tensor_parallel_size"]}: is not supported: the matrices of '
            f'experts have {tensor} shards too: leave it out'
        )
    if line.get('clip_grad') == 0:
        yield f'{line.spelled["clip_grad"]}: is not supported: give a large number, such as 1e9'
    if line.get('eval_iters') == 0 and split_of(line)[1].strip('0.'):
        yield (
            f'{line.spelled["eval_iters"]}: is not supported: runs evaluate at their last step: '
            'give 1, or --split 100,0,0 to have no validation data'
        )


def _written(
    line: Line, settings: Mapping[str, Mapping[str, Any]], config: Config
) -> dict[str, Any]:
    """Return the keys that the line sets or that change the config, and attention dropout."""
    kept = {section: dict(keys) for section, keys in settings.items()}
    for section, keys in settings.items():
        for key, value in keys.items():
            sources = SOURCES.get(f'{section}.{key}', ())
            is_set = any(source in line.spelled for source in sources)
            if value is not None and (is_set or (value and key == DROPOUT)):
                continue
            del kept[section][key]
            try:
                is_same = reload(kept, place='') == config
            except ConfigError:  # the key is required, or a different key needs it
                is_same = False
            if not is_same:
                kept[section][key] = value
    return {
        section: {key: kept[section][key] for key in keys_of(section) if key in kept[section]}
        for section in kept
        if kept[section]
    }


def _with_notes(line: Line, config: Config, keys: Sequence[str]) -> Iterator[str]:
    """Yield the keys, with notes before some of them."""
    notes = {}
    is_global = line.get('moe_router_load_balancing_type') == 'global_aux_loss'
    if is_global and (coefficient := line.get('moe_aux_loss_coeff')) and config.mesh.data > 1:
        notes['    balance_loss:'] = (
            f'This is {coefficient:g} / {config.mesh.data}: Megatron-LM divides '
            'the gradient of global_aux_loss by the number of data-parallel ranks.'
        )
    if config.model.attention_dropout:
        notes[f'  {DROPOUT}:'] = (
            "Dropout in attention needs XLA's attention, which keeps all scores in memory. With 0, "
            "16-bit dtypes and a head dim up to 128, a GPU runs cuDNN's flash attention."
        )
    amax = tuple(line.default(f'fp8_amax_{what}') for what in ('history_len', 'compute_algo'))
    if config.train.has_delayed_scales and amax != AMAX:
        notes['  dtype:'] = (
            f'FP8 scales follow from the largest values of {AMAX[0]} steps, as with '
            f'--fp8-amax-history-len {AMAX[0]} --fp8-amax-compute-algo {AMAX[1]}. With this line, '
            f'Megatron-LM has {amax[0]} and {amax[1]}.'
        )
    if config.model.num_kv_heads != (groups := line.get(GROUPS)) and groups is not None:
        notes['  num_kv_heads:'] = (
            f'Without --group-query-attention, Megatron-LM ignores {line.spelled[GROUPS]}.'
        )
    if line.get('save'):
        notes['  dir:'] = (
            f"This is not {line.get('save')}, the folder of Megatron-LM's checkpoints."
        )
    if config.optim.kind == 'muon':
        notes['  kind:'] = ' '.join(muon.differences(line.arguments, is_bert=line.is_bert))
    notes |= dict(_notes_on_data(line, config))
    for key in keys:
        for begin, note in notes.items():
            if key.startswith(begin):
                yield from (f'  {text}' for text in _comment(note, hang=''))
        yield key


def _notes_on_data(line: Line, config: Config) -> Iterator[tuple[str, str]]:
    """Yield notes on the vocabulary and the corpus, and the keys that they precede."""
    if line.get('vocab_size') not in (None, config.model.vocab_size):
        yield (
            '  vocab_size:',
            "This is the number of the tokenizer's tokens: with this tokenizer, Megatron-LM does "
            f'not read {line.spelled["vocab_size"]}.',
        )
    vocabulary = line.get('vocab_file')
    if vocabulary and not (
        line.get('vocab_size') or tokenizer_of(line) or Path(vocabulary).is_file()
    ):
        yield (
            '  vocab_size:',
            f"This is the usual number of tokens of the line's tokenizer: {vocabulary}, which "
            'tells it, is not there.',
        )
    if line.get('tokenizer_type') == NULL:
        yield (
            '  vocab_size:',
            "As in megatron-core 0.19, --vocab-size counts NullTokenizer's end-of-document token. "
            f'Earlier releases add this token: then set {line.get("vocab_size") + 1}.',
        )
    if config.data.document_mask and not line.get('eod_mask_loss'):
        yield (
            '  document_mask:',
            "The first token of a document has no loss, as with --eod-mask-loss. The line's "
            'arguments let Megatron-LM predict it from the document before.',
        )
    if config.data.tokenizer == 'none' and line.get('tokenizer_model'):
        yield (
            '  tokenizer:',
            f'{line.get("tokenizer_model")} is not a tokenizer.json or a folder that has one. '
            'Training needs none; give one for samples of text and bits per byte.',
        )
    if line.is_bert and line.get('data_path') and config.data.tokenizer == 'auto':
        yield (
            '  blend:' if config.data.blend else '  corpus:',
            'BERT needs the tokenizer.json that made these tokens: set data.tokenizer, unless '
            '`megajax data build` made them.',
        )


def _head(line: Line, config: Config) -> Iterator[str]:
    mesh = config.mesh
    yield f'# From the arguments of {line.program}.'
    if line.world_size is None:
        yield from _comment(
            'The number of GPUs is not in the line, so that mesh.data is 1: '
            'give --gpus N before the arguments.'
        )
    else:
        sizes = ' x '.join(f'{axis} {size}' for axis, size in mesh.sizes.items() if size > 1)
        yield f'# {line.world_size} GPUs: {sizes or "one"}'
    if line.joined:
        yield from _comment(
            f'{line.joined}: bash does not pass the arguments from this line on, because the line '
            'before ends the command. This config has them; to leave them out, delete them in the '
            'script.'
        )
    if not line.get('data_path'):
        yield from _comment(
            f'No --data-path is in the line, so that data.corpus is {config.data.corpus}: set it.'
        )
    if folder := line.get('load'):
        if step := line.get('ckpt_step'):
            folder = f'{folder}/iter_{step:07}'
        end = ' --finetune' if line.get('finetune') else ''
        yield from _comment(
            f'To continue from its checkpoint: `megajax import megatron {typed(folder)} RUN'
            + end
            + '`, and then run.start_from=RUN. The learning rate then restarts at step 1.'
        )


def _unused(line: Line) -> Iterator[str]:
    if line.unused:
        yield ''
        yield '# Without a meaning here:'
    for reason, arguments in line.unused.items():
        yield from _comment(f'{", ".join(arguments)}: {reason}', indent='  ')


def _comment(text: str, indent: str = '', hang: str = '  ') -> list[str]:
    text = ''.join(letter if letter.isprintable() else ' ' for letter in text)
    return textwrap.wrap(
        text,
        COLUMNS - 2,
        initial_indent=f'# {indent}',
        subsequent_indent=f'# {hang}{indent}',
        break_on_hyphens=False,
        break_long_words=False,
    )
