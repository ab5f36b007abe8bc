"""Megatron-LM's arguments for which no value is supported. Imports no jax."""

from collections.abc import Mapping

# Arguments for which no value is supported, with what to do instead.
INSTEAD: Mapping[str, str] = {
    'rampup_batch_size': 'leave it out; a run that is stopped and resumed with a larger '
    'train.batch_size continues with it',
    'step_batch_size_schedule': 'use one train.batch_size, or several runs with run.start_from',
    'init_method_xavier_uniform': 'weights are drawn from a normal distribution: '
    'give --init-method-std',
    'decoupled_lr': 'all parameters have one optim.lr',
    'decoupled_min_lr': 'all parameters have one optim.min_lr',
    'train_data_path': 'give one --data-path with --split',
    'valid_data_path': 'give one --data-path with --split',
    'test_data_path': 'give one --data-path with --split',
    'per_split_data_args_path': 'give one --data-path with --split',
    'data_args_path': 'give --data-path',
    'sft': 'train on JSON lines with messages, with data.corpus and data.chat_template',
    'full_validation': 'set train.eval_batches in the YAML',
    'multiple_validation_sets': 'give one --data-path with --split',
    'apply_wd_to_qk_layernorm': 'weight decay is not applied to norms: leave it out',
    'train_data': 'build .bin and .idx with `megajax data build`, and give --data-path',
    'bert_no_binary_head': 'BERT always has its sentence-order head',
    'exit_interval': 'end after a number of steps with --train-iters, or after a time with '
    '--exit-duration-in-mins',
    'skip_train': 'use `megajax eval`',
    'pretrained_checkpoint': 'import it with `megajax import megatron`, '
    'and begin with run.start_from',
    'yaml_cfg': 'give the arguments themselves',
    'spec': 'the layers of a decoder are those that `megajax config show` lists',
    'cpu_offloading': 'use train.recompute, optim.shard, or more devices',
    'cpu_offloading_num_layers': 'use train.recompute, optim.shard, or more devices',
    'optimizer_cpu_offload': 'use optim.shard, or optim.moments_dtype=bfloat16',
    'optimizer_offload_fraction': 'use optim.shard, or optim.moments_dtype=bfloat16',
    'decoder_first_pipeline_num_layers': 'every stage has the same number of layers, and the '
    'embedding and the head are divided over them',
    'decoder_last_pipeline_num_layers': 'every stage has the same number of layers, and the '
    'embedding and the head are divided over them',
    'pipeline_model_parallel_layout': 'every stage has the same number of layers',
    'account_for_embedding_in_pipeline_split': 'every stage has the same number of layers',
    'account_for_loss_in_pipeline_split': 'every stage has the same number of layers',
    'pipeline_model_parallel_split_rank': 'encoder-decoder models are not supported',
    'decoder_num_layers': 'encoder-decoder models are not supported',
    'decoder_seq_length': 'encoder-decoder models are not supported',
    'standalone_embedding_stage': 'the embedding is divided over the stages: leave it out',
    'data_parallel_random_init': 'replicas have the same weights: leave it out',
    'mtp_num_layers': 'a decoder predicts only the next token: leave it out',
    'hierarchical_context_parallel_sizes': 'context shards are one group: leave it out',
    'hybrid_attention_ratio': 'every layer has attention and an MLP',
    'hybrid_override_pattern': 'every layer has attention and an MLP',
    'fp4_format': 'give --fp8-format hybrid, or --bf16',
    'label_smoothing': 'set loss.label_smoothing in the YAML',
    'embedding_init_method_std': 'embeddings are initialized as --init-method-std says: leave it '
    'out',
    'qk_clip': 'weights are not clipped: leave it out',
    'eval_global_batch_size': 'batches of validation have train.batch_size: leave it out',
    'eval_micro_batch_size': 'batches of validation have train.batch_size: leave it out',
    'start_eval_at_iter': 'runs evaluate every --eval-interval steps from the beginning: '
    'leave it out',
    'iterations_to_skip': 'every batch is trained on: leave it out',
    'dataloader_inter_document_masking': 'give --reset-position-ids, --reset-attention-mask and '
    '--eod-mask-loss',
    'allow_ambiguous_pad_tokens': 'every token of a corpus counts in the loss: leave it out',
    'use_dion': 'give --optimizer muon or adam',
}
