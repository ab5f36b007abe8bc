"""Names that other programs use for config keys and values.

Imports no jax.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from megajax.core.config.schema import SECTIONS, keys_of

# Hyphens are written as underscores. Names that are keys of megajax in some section, such as lr,
# are not listed, because they are found without this table. A name with a section applies only in
# that section.
_NAMES = {
    'mesh.model': (
        'tp', 'tp_size', 'tensor', 'tensor_parallel', 'tensor_parallel_size',
        'tensor_model_parallel_size', 'tensor_parallelism', 'model_parallel', 'model_parallel_size',
    ),
    'mesh.data': ('dp', 'dp_size', 'data_parallel', 'data_parallel_size', 'fsdp', 'fsdp_size'),
    'mesh.replicas': ('hsdp', 'dp_replicate', 'data_parallel_replicate_degree', 'num_replicas'),
    'mesh.stages': (
        'pp', 'pp_size', 'pipeline', 'pipeline_parallel', 'pipeline_parallel_size',
        'pipeline_model_parallel_size', 'pipeline_stages', 'num_stages',
    ),
    'mesh.virtual_stages': (
        'vp', 'vpp', 'interleave', 'virtual_pipeline', 'virtual_pipeline_model_parallel_size',
        'num_virtual_stages_per_pipeline_rank',
    ),
    'mesh.context': (
        'cp', 'cp_size', 'context_parallel', 'context_parallel_size', 'ring_attention',
    ),
    'mesh.experts': (
        'ep', 'ep_size', 'expert_parallel', 'expert_parallel_size', 'expert_model_parallel_size',
    ),
    'mesh.sequence_parallel': ('sp', 'sequence'),
    'model.num_layers': (
        'n_layers', 'n_layer', 'num_hidden_layers', 'depth', 'num_decoder_layers',
    ),
    'model.hidden_size': (
        'd_model', 'dim', 'n_embd', 'n_embed', 'hidden', 'hidden_dim', 'width', 'emb_dim',
        'embed_dim', 'embedding_size', 'model_dim',
    ),
    'model.num_heads': (
        'n_heads', 'n_head', 'heads', 'num_attention_heads', 'attention_heads', 'nhead',
    ),
    'model.num_kv_heads': (
        'n_kv_heads', 'n_kv_head', 'kv_heads', 'num_key_value_heads', 'num_query_groups',
    ),
    'model.head_dim': ('d_head', 'd_k', 'kv_channels', 'head_size'),
    'model.ffn_size': (
        'd_ff', 'ffn', 'ffn_dim', 'ffn_hidden_size', 'intermediate_size', 'intermediate_dim',
        'mlp_dim', 'n_inner', 'ff_dim', 'dim_feedforward',
    ),
    'model.experts': ('expert', 'moe'),
    'model.experts.count': ('num_experts', 'n_experts', 'num_local_experts', 'n_routed_experts'),
    'model.experts.active': ('num_experts_per_tok', 'moe_router_topk'),
    'model.experts.ffn_size': ('moe_intermediate_size', 'moe_ffn_hidden_size'),
    'model.vocab_size': ('vocab', 'n_vocab', 'padded_vocab_size'),
    'model.max_seq_len': ('max_position_embeddings', 'n_positions', 'n_ctx', 'max_seq_length'),
    'model.norm': ('normalization', 'norm_type'),
    'model.window': (
        'sliding_window', 'sliding_window_size', 'window_size', 'attention_window', 'local_window',
    ),
    'model.layers': ('layer_types', 'layer_pattern', 'no_rope_layers'),
    'model.zero_centered_norm': (
        'apply_layernorm_1p', 'layernorm_1p', 'layernorm_zero_centered_gamma',
    ),
    'model.embedding_scale': ('embedding_multiplier', 'scale_embeddings', 'embed_scale'),
    'model.norm_eps': (
        'rms_norm_eps', 'layer_norm_eps', 'layer_norm_epsilon', 'layernorm_epsilon', 'norm_epsilon',
    ),
    'model.activation': ('hidden_act', 'act', 'activation_function', 'hidden_activation'),
    'model.position': ('position_embedding', 'position_embedding_type', 'pos_emb', 'rope'),
    'model.rope_theta': ('rotary_base', 'rope_base', 'theta'),
    'model.rotary_fraction': ('rotary_percent', 'partial_rotary_factor', 'rotary_pct'),
    'model.attention_sinks': ('sinks', 'sink', 'attention_sink'),
    'model.query_scale': ('softmax_scale', 'attention_scale', 'attn_scale', 'attention_multiplier'),
    'model.tie_embeddings': ('tie_word_embeddings', 'weight_tying', 'tied', 'tie_weights'),
    'model.dropout': ('hidden_dropout', 'resid_pdrop', 'residual_dropout'),
    'model.attention_dropout': ('attn_dropout', 'attn_pdrop'),
    'model.init_std': ('initializer_range', 'init_method_std'),
    'train.steps': (
        'max_steps', 'num_steps', 'n_steps', 'total_steps', 'train_steps', 'training_steps',
        'iterations', 'iters', 'max_iters', 'num_iterations', 'train_iters', 'num_train_steps',
    ),
    'train.batch_size': (
        'batch', 'bs', 'bsz', 'global_batch', 'global_batch_size', 'gbs', 'train_batch_size',
    ),
    'train.microbatches': (
        'microbatch', 'num_microbatches', 'accumulate', 'grad_accum', 'accumulation_steps',
        'grad_accum_steps', 'gradient_accumulation', 'gradient_accumulation_steps',
        'accumulate_grad_batches',
    ),
    'train.seq_len': (
        'seq_length', 'sequence_length', 'seqlen', 'block_size', 'context_length', 'max_length',
        'cutoff_len', 'ctx_len', 'context_len', 'seq',
    ),
    'train.dtype': (
        'precision', 'mixed_precision', 'torch_dtype', 'bf16', 'fp16', 'fp32', 'fp8', 'amp',
    ),
    'train.recompute': (
        'remat', 'checkpointing', 'activation_checkpointing', 'gradient_checkpointing',
        'recompute_granularity', 'activations_checkpoint_granularity', 'activation_checkpoint',
    ),
    'train.eval_every': (
        'eval.every', 'eval.interval', 'eval_interval', 'eval_steps', 'eval_freq',
        'val_interval', 'val_check_interval',
    ),
    'train.eval_batches': ('eval.batches', 'eval_iters', 'val_batches', 'limit_val_batches'),
    'train.log_every': ('log_interval', 'log_steps', 'logging_steps', 'log_freq'),
    'train.seed': ('random_seed', 'rng_seed'),
    'optim.kind': ('optimizer', 'optim_type', 'optim.name', 'optim.type'),
    'optim.momentum': ('muon_momentum', 'mu_momentum'),
    'optim.nesterov': ('muon_use_nesterov', 'use_nesterov'),
    'optim.ns_steps': ('muon_num_ns_steps', 'num_ns_steps', 'newton_schulz_steps'),
    'optim.ns_coefficients': ('muon_coefficient_type', 'ns_coeffs', 'coefficient_type'),
    'optim.lr': ('learning_rate', 'max_lr', 'peak_lr', 'base_lr'),
    'optim.min_lr': ('minimum_lr', 'end_lr', 'eta_min', 'final_lr'),
    'optim.warmup_steps': (
        'warmup', 'warmup_iters', 'lr_warmup', 'lr_warmup_iters', 'num_warmup_steps',
        'lr_warmup_steps',
    ),
    'optim.decay_steps': ('lr_decay_iters', 'lr_decay_steps', 'lr_decay'),
    'optim.schedule': (
        'scheduler', 'lr_schedule', 'lr_scheduler', 'lr_scheduler_type', 'lr_decay_style',
    ),
    'optim.weight_decay': ('wd', 'decay'),
    'optim.beta1': ('b1', 'adam_beta1', 'betas', 'adam_betas'),
    'optim.beta2': ('b2', 'adam_beta2'),
    'optim.eps': ('adam_eps', 'adam_epsilon', 'epsilon'),
    'optim.grad_clip': (
        'clip', 'clip_grad', 'clip_norm', 'clip_grad_norm', 'gradient_clipping', 'max_grad_norm',
        'gradient_clip_val', 'grad_norm', 'max_norm',
    ),
    'optim.shard': (
        'zero', 'zero_stage', 'zero_level', 'use_distributed_optimizer', 'distributed_optimizer',
        'sharding_strategy',
    ),
    'lora.rank': ('r', 'lora_r', 'lora_rank'),
    'lora.alpha': ('lora_alpha',),
    'lora.targets': ('target_modules', 'lora_target', 'lora_target_modules', 'modules'),
    'data.corpus': (
        'dataset', 'dataset_path', 'dataset_name', 'data_path', 'data.name', 'path',
        'train_file', 'train_data', 'input', 'file', 'files', 'train_files',
    ),
    'data.blend': ('mixture', 'mix', 'weights', 'datasets'),
    'data.tokenizer': (
        'tokenizer_path', 'tokenizer_model', 'tokenizer_name', 'vocab_file',
        'tokenizer.path', 'tokenizer.name', 'tokenizer.file', 'model.tokenizer_path',
    ),
    'data.chat_template': ('template', 'chat'),
    'data.document_mask': ('reset_attention_mask', 'intra_doc_masking', 'document_masking'),
    'checkpoint.every': (
        'save_interval', 'save_steps', 'save_every', 'checkpoint_interval', 'checkpoint_every',
        'ckpt_interval', 'save_freq',
    ),
    'checkpoint.keep': ('save_total_limit', 'max_to_keep', 'keep_last', 'max_checkpoints'),
    'run.dir': (
        'out', 'out_dir', 'output', 'output_dir', 'save', 'save_dir', 'checkpoint_dir', 'ckpt_dir',
        'log_dir', 'logdir', 'run_dir', 'exp_dir', 'run.name', 'run.path',
        'checkpoint.dir', 'checkpoint.path', 'resume_from', 'resume_from_checkpoint',
    ),
    'run.start_from': (
        'load', 'init_from', 'from_pretrained', 'pretrained', 'model_name_or_path', 'base_model',
        'restore_from', 'load_path', 'finetune', 'checkpoint_path', 'pretrained_checkpoint',
        'model.path', 'model.weights', 'model.load', 'model.file', 'model.checkpoint',
    ),
    'run.resume': ('auto_resume',),
    'run.wandb': ('wandb_project', 'project'),
    'run.max_minutes': ('max_time', 'exit_duration_in_mins', 'time_limit'),
}  # fmt: skip
_DIFFERENT = {
    'runs are measured in steps; use train.steps': ('epochs', 'num_epochs', 'num_train_epochs'),
    'use train.microbatches, the number of microbatches: train.batch_size // (mesh.data x size)': (
        'micro_batch', 'micro_batch_size', 'microbatch_size', 'mbs',
    ),
    'use train.batch_size, the sequences of a step: size x mesh.data x train.microbatches': (
        'per_device_batch_size', 'per_device_train_batch_size',
    ),
    'use optim.warmup_steps, the number of steps: ratio x train.steps': (
        'warmup_ratio', 'lr_warmup_fraction',
    ),
    'use mesh.data, the shards of all replicas together: degree x mesh.replicas': (
        'dp_shard', 'data_parallel_shard_degree',
    ),
    'use model.layers, a list of the layers that repeat: for 2, a layer with model.window and one '
    'without a window are model.layers=[{},{"window":null}]': ('sliding_window_pattern',),
    'dropout and biases are not supported in adapters': (
        'lora.dropout', 'lora.bias', 'lora_dropout', 'lora_bias',
    ),
}  # fmt: skip
_VALUES = {
    'none': ('no', 'off', 'false'),
    'full': ('true',),
    'float32': ('fp32', 'f32', 'float', '32'),
    'bfloat16': ('bf16', 'bf16_mixed'),
    'float16': ('fp16', 'f16', 'half', '16'),
    'fp8': ('float8', 'fp8_hybrid'),
    'optimizer': ('1', 'zero_1'),
    'gradients': ('2', 'zero_2'),
    'weights': ('3', 'zero_3', 'full_shard'),
    'layernorm': ('layer_norm', 'ln'),
    'rmsnorm': ('rms_norm', 'rms'),
    'swiglu': ('silu', 'swish'),
    'gelu_tanh': ('gelu_new', 'gelu_fast', 'gelu_pytorch_tanh'),
    'rope': ('rotary',),
    'learned': ('absolute', 'learned_absolute'),
    'next_token': ('clm', 'causal_lm'),
    'masked_lm': ('mlm',),
}  # fmt: skip
# Names that mean the key only in its own section or without a section; in other sections they are
# ambiguous.
_VAGUE = {
    'path', 'file', 'files', 'input', 'out', 'output', 'name', 'load', 'save', 'weights', 'mix',
    'mixture', 'modules', 'project',
}  # fmt: skip
_KEYS = {name: key for key, names in _NAMES.items() for name in names}
_REASONS = {name: reason for reason, names in _DIFFERENT.items() for name in names}


def key_meant(path: str) -> str | None:
    """Return the key that the last part of `path` is a name for in other programs, or None.

    A key in the section of `path` is preferred: vision.n_layers means vision.num_layers.
    """
    section, _, name = path.rpartition('.')
    meant = _KEYS.get(_plain(name))
    if full := _KEYS.get(_plain(path)):
        return full
    if meant and section not in ('', meant.partition('.')[0]) and _plain(name) in _VAGUE:
        return None
    own = meant and meant.partition('.')[2]
    return f'{section}.{own}' if section in SECTIONS and own in keys_of(section) else meant


def nearest_key(path: str) -> str | None:
    """Return the key or section that `path` probably means, or None.

    Candidates are the keys in the same section, and keys of the same name in other sections.
    """
    section, _, key = path.partition('.')
    is_section = section in SECTIONS
    siblings = keys_of(section) if is_section else ()
    every = [f'{name}.{each}' for name in SECTIONS for each in keys_of(name)]
    found = [full for full in every if full.partition('.')[2] == (key or section)]
    found += [f'{section}.{near}' for near in get_close_matches(key, siblings, n=1, cutoff=0.7)]
    if not is_section:
        found += get_close_matches(path, [*SECTIONS, *every], n=1, cutoff=0.75)
    return key_meant(path) or next(iter(found), None)


def value_meant(value: Any, allowed: Sequence[str]) -> str | None:
    """Return the allowed value that `value` is another name for, or the nearest one, or None."""
    name = _plain(str(value))
    near = get_close_matches(name, allowed, n=1, cutoff=0.8)
    return next((one for one in allowed if name in _VALUES.get(one, ())), next(iter(near), None))


def without_a_key(path: str) -> str | None:
    """Return what to do about a key of another program that megajax does not have, or None."""
    return _REASONS.get(_plain(path)) or _REASONS.get(_plain(path.rpartition('.')[2]))


def key_of_option(option: str, keys: Iterable[str]) -> str | None:
    """Return the key that an option such as --steps or --batch-size means, or None."""
    name = _plain(option.lstrip('-'))
    same = (key for key in keys if name in (key, key.partition('.')[2], key.replace('.', '_')))
    return next(same, None) or key_meant(name)


def _plain(name: str) -> str:
    return name.lower().replace('-', '_')
