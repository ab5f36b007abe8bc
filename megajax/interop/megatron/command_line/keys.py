"""The config keys that Megatron-LM's arguments set. Imports no jax."""

from collections.abc import Mapping

# The argument that sets each key; if there are several, any of them does.
KEYS = """
    model.num_layers: num_layers
    model.hidden_size: hidden_size
    model.num_heads: num_attention_heads
    model.num_kv_heads: num_query_groups
    model.head_dim: kv_channels
    model.ffn_size: ffn_hidden_size
    model.vocab_size: vocab_size
    model.max_seq_len: max_position_embeddings
    model.norm: normalization
    model.activation: swiglu openai_gelu bias_gelu_fusion use_te_activation_func
    model.position: position_embedding_type
    model.window: window_size
    model.layers: window_attn_skip_freq no_rope_freq
    model.rope_theta: rotary_base
    model.rotary_fraction: rotary_percent
    model.rope_scaling: use_rope_scaling rope_scaling_factor rotary_seq_len_interpolation_factor
    model.qk_norm: qk_layernorm
    model.zero_centered_norm: apply_layernorm_1p
    model.bias: add_bias_linear
    model.qkv_bias: add_qkv_bias
    model.experts: num_experts
    model.experts.count: num_experts
    model.experts.active: moe_router_topk
    model.experts.ffn_size: moe_ffn_hidden_size ffn_hidden_size
    model.experts.shared_ffn_size: moe_shared_expert_intermediate_size
    model.experts.groups: moe_router_num_groups
    model.experts.active_groups: moe_router_group_topk
    model.experts.capacity: moe_expert_capacity_factor
    model.tie_embeddings: untie_embeddings_and_output_weights
    model.dropout: hidden_dropout
    model.attention_dropout: attention_dropout
    model.norm_eps: norm_epsilon
    model.init_std: init_method_std
    mesh.model: tensor_model_parallel_size
    mesh.stages: pipeline_model_parallel_size
    mesh.context: context_parallel_size
    mesh.experts: expert_model_parallel_size
    mesh.sequence_parallel: sequence_parallel
    mesh.context_exchange: cp_comm_type
    mesh.virtual_stages: num_virtual_stages_per_pipeline_rank num_layers_per_virtual_pipeline_stage
    mesh.replicas: num_distributed_optimizer_instances
    train.steps: train_iters train_samples
    train.batch_size: global_batch_size micro_batch_size
    train.microbatches: micro_batch_size
    train.seq_len: seq_length
    train.dtype: bf16 fp16 precision fp8_format
    train.fp8_scaling: fp8_recipe
    train.recompute: recompute_granularity
    train.eval_every: eval_interval
    train.eval_batches: eval_iters
    train.log_every: log_interval
    train.seed: seed
    train.deterministic: deterministic_mode
    train.loss_scale: initial_loss_scale
    train.profile: profile
    optim.kind: optimizer
    optim.momentum: muon_momentum
    optim.nesterov: muon_nesterov
    optim.ns_steps: muon_num_ns_steps
    optim.ns_coefficients: muon_coefficient_type
    optim.lr: lr
    optim.min_lr: min_lr
    optim.warmup_steps: lr_warmup_iters lr_warmup_samples lr_warmup_fraction
    optim.warmup_init: lr_warmup_init
    optim.decay_steps: lr_decay_iters lr_decay_samples
    optim.schedule: lr_decay_style
    optim.wsd_steps: lr_wsd_decay_iters lr_wsd_decay_samples
    optim.wsd_decay: lr_wsd_decay_style
    optim.weight_decay: weight_decay
    optim.beta1: adam_beta1
    optim.beta2: adam_beta2
    optim.eps: adam_eps
    optim.grad_clip: clip_grad
    optim.shard: use_distributed_optimizer use_megatron_fsdp use_torch_fsdp2
    optim.reduce_dtype: grad_reduce_in_bf16
    optim.moments_dtype: exp_avg_dtype exp_avg_sq_dtype
    data.split: split
    data.corpus: data_path
    data.blend: data_path
    data.tokenizer: tokenizer_model
    data.document_mask: reset_position_ids reset_attention_mask eod_mask_loss
    checkpoint.every: save_interval
    checkpoint.keep_every: save_retain_interval
    run.dir: save
    run.max_minutes: exit_duration_in_mins
    run.wandb: wandb_project
"""
SOURCES: Mapping[str, list[str]] = {
    key.strip(): sources.split()
    for key, sources in (line.split(':') for line in KEYS.strip().splitlines())
}
