"""The table of Megatron-LM's arguments: which set a config key, why others do not, and defaults.

Names are written as in Megatron-LM's namespace, for example `num_layers` for `--num-layers`. The
releases range from the first (2019) to megatron-core 0.19. Arguments that neither `pretrain_gpt.py`
nor `pretrain_bert.py` needs, such as those for retrieval, are not listed. Imports no jax.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from megajax.interop.megatron.command_line.unsupported import INSTEAD

# Arguments that set config keys, by the type of their value; `bool` is a flag.
READ: Mapping[type, str] = {
    int: """
        num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels
        max_position_embeddings vocab_size rotary_base rotary_seq_len_interpolation_factor
        tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
        num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank
        num_distributed_optimizer_instances
        micro_batch_size global_batch_size seq_length train_iters train_samples seed
        eval_iters eval_interval log_interval save_interval save_retain_interval
        expert_model_parallel_size expert_tensor_parallel_size
        num_experts moe_ffn_hidden_size moe_router_topk moe_router_num_groups moe_router_group_topk
        moe_router_topk_limited_devices moe_shared_expert_intermediate_size moe_latent_size
        moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size muon_num_ns_steps
        lr_decay_iters lr_decay_samples lr_warmup_iters lr_warmup_samples
        lr_wsd_decay_iters lr_wsd_decay_samples profile_step_start profile_step_end ckpt_step
        fp8_amax_history_len
    """,
    float: """
        norm_epsilon rotary_percent rope_scaling_factor hidden_dropout attention_dropout
        init_method_std lr min_lr lr_warmup_fraction lr_warmup_init
        weight_decay start_weight_decay end_weight_decay adam_beta1 adam_beta2 adam_eps clip_grad
        loss_scale initial_loss_scale mask_prob exit_duration_in_mins
        moe_router_topk_scaling_factor moe_router_bias_update_rate moe_router_force_biased
        moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps moe_expert_capacity_factor
        moe_expert_rank_capacity_factor muon_momentum muon_extra_scale_factor
        mid_level_dataset_surplus
    """,
    str: """
        position_embedding_type window_size window_attn_skip_freq no_rope_freq precision
        normalization recompute_granularity fp8_format fp8_recipe fp8_amax_compute_algo
        lr_decay_style lr_wsd_decay_style weight_decay_incr_style optimizer
        cp_comm_type data_parallel_sharding_strategy exp_avg_dtype exp_avg_sq_dtype
        split tokenizer_type tokenizer_model vocab_file load save wandb_project dataloader_type
        moe_router_score_function moe_router_load_balancing_type moe_router_dtype moe_layer_freq
        moe_token_drop_policy transformer_impl
        muon_scale_mode muon_fp32_matmul_prec muon_coefficient_type muon_tp_mode
        muon_scalar_optimizer
    """,
    bool: """
        group_query_attention swiglu openai_gelu add_qkv_bias qk_layernorm apply_layernorm_1p
        use_te_activation_func use_mcore_models use_legacy_models
        use_rope_scaling
        untie_embeddings_and_output_weights sequence_parallel fp16 bf16
        use_distributed_optimizer use_megatron_fsdp use_torch_fsdp2 grad_reduce_in_bf16
        use_precision_aware_optimizer profile deterministic_mode reset_position_ids
        reset_attention_mask eod_mask_loss use_checkpoint_args no_position_embedding finetune
        no_fp8_wgrad first_last_layers_bf16 fp32_residual_connection
        moe_router_pre_softmax moe_router_enable_expert_bias moe_router_force_load_balancing
        moe_apply_probs_on_input moe_use_upcycling moe_shared_expert_gate muon_nesterov
    """,
    list: 'data_path recompute_modules',
}
# Flags that set the value of a different argument.
SETS: Mapping[str, tuple[str, Any]] = {
    'disable_bias_linear': ('add_bias_linear', False),
    'muon_no_split_qkv': ('muon_split_qkv', False),
    'no_bias_gelu_fusion': ('bias_gelu_fusion', False),
    'use_rotary_position_embeddings': ('position_embedding_type', 'rope'),
    'recompute_activations': ('recompute_granularity', 'selective'),
    'checkpoint_activations': ('recompute_granularity', 'full'),
    'disable_fp8_wgrad': ('no_fp8_wgrad', True),
    'fp8_hybrid': ('fp8_format', 'hybrid'),
    'fp8_e4m3': ('fp8_format', 'e4m3'),
}
# Older names, and the names in NeMo and Megatron-Bridge.
RENAMED: Mapping[str, str] = {
    'model_parallel_size': 'tensor_model_parallel_size',
    'batch_size': 'micro_batch_size',
    'warmup': 'lr_warmup_fraction',
    'intermediate_size': 'ffn_hidden_size',
    'num_moe_experts': 'num_experts',
    'layernorm_epsilon': 'norm_epsilon',
    'layernorm_zero_centered_gamma': 'apply_layernorm_1p',
    'encoder_num_layers': 'num_layers',
    'encoder_seq_length': 'seq_length',
    'activations_checkpoint_method': 'recompute_method',
    'activations_checkpoint_num_layers': 'recompute_num_layers',
    'checkpoint_num_layers': 'recompute_num_layers',
    'use_custom_fsdp': 'use_megatron_fsdp',
    'fp8': 'fp8_format',
    'muon_use_nesterov': 'muon_nesterov',
    'persistent_save_interval': 'save_interval',
    'use_nsys_profiler': 'profile',
}
KERNELS = 'XLA chooses and fuses kernels'
ATTENTION = "attention on a GPU is cuDNN's flash attention, or XLA's if it has dropout"
SCHEDULE = 'XLA schedules collectives, as train.overlap sets'
NETWORK = 'jax finds the devices, and NCCL the network'
PRECISION = 'softmax, norms, loss and sums of gradients are in fp32'
MEMORY = 'XLA allocates memory'
FORMAT = 'checkpoints have one format, and are read on every mesh'
LOGS = 'a run logs to its directory, TensorBoard included; run.wandb'
WATCH = 'always watched, see docs/failures.md'
READER = 'tokens are read by memory-mapped files'
UNREAD = 'it is only read together with an argument of its own'
NO_MEANING: Mapping[str, str] = {
    ATTENTION: 'use_flash_attn use_flash_attn_v2 attention_backend',
    KERNELS: """
        no_masked_softmax_fusion masked_softmax_fusion scaled_upper_triang_masked_softmax_fusion
        scaled_masked_softmax_fusion no_bias_swiglu_fusion no_bias_dropout_fusion
        bias_dropout_fusion no_rope_fusion no_persist_layer_norm no_gradient_accumulation_fusion
        cross_entropy_loss_fusion cross_entropy_fusion_impl enable_cuda_graph cuda_graph_impl
        cuda_graph_scope cuda_graph_warmup_steps external_cuda_graph te_rng_tracker
        inference_rng_tracker apply_rope_fusion bias_activation_fusion memory_efficient_layer_norm
        use_fused_weighted_squared_relu no_te_activation_func
        disable_jit_fuser jit_fuser onnx_safe cuda_graph_modules
        moe_grouped_gemm moe_permute_fusion moe_router_fusion moe_router_padding_for_fp8
        moe_router_padding_for_quantization moe_pad_expert_input_to_capacity
        moe_pad_experts_for_cuda_graph_inference moe_use_legacy_grouped_gemm
        moe_single_grouped_weight moe_single_grouped_bias use_grouped_gemm_for_shared_expert
        use_transformer_engine_op_fuser fused_residual_rmsnorm
    """,
    'an all-to-all sends tokens to their experts': """
        moe_token_dispatcher_type moe_flex_dispatcher_backend moe_enable_deepep moe_deepep_num_sms
        moe_flex_dispatcher_num_sms moe_extended_tp moe_hybridep_num_sms
        moe_permute_fusion_into_hybridep
    """,
    'the loss of a step is the mean over its tokens': 'calculate_per_token_loss',
    SCHEDULE: """
        tp_comm_overlap tp_comm_overlap_cfg tp_comm_bootstrap_backend disable_tp_comm_overlap_ag
        disable_tp_comm_overlap_rs tp_comm_overlap_rs_dgrad disable_tp_comm_bulk_dgrad
        disable_tp_comm_bulk_wgrad disable_tp_comm_split_ag disable_tp_comm_split_rs
        overlap_grad_reduce overlap_param_gather overlap_param_gather_with_optimizer_step
        no_align_grad_reduce no_align_param_gather align_grad_reduce delay_param_gather
        no_delay_grad_reduce delay_wgrad_compute no_overlap_p2p_communication
        overlap_p2p_communication_warmup_flush batch_p2p_communication use_ring_exchange_p2p
        no_scatter_gather_tensors_in_pipeline no_async_tensor_model_parallel_allreduce
        async_tensor_model_parallel_allreduce defer_embedding_wgrad_compute
        wgrad_deferral_limit ddp_bucket_size ddp_num_buckets ddp_average_in_collective
        ddp_pad_buckets_for_high_nccl_busbw no_contiguous_buffers_in_local_ddp
        overlap_moe_expert_parallel_comm moe_shared_expert_overlap
        use_contiguous_buffers_in_ddp microbatch_group_size_per_virtual_pipeline_stage
        no_tp_comm_bulk_dgrad no_tp_comm_bulk_wgrad no_tp_comm_overlap_ag no_tp_comm_overlap_rs
        no_tp_comm_split_ag no_tp_comm_split_rs disable_align_grad_reduce fsdp_double_buffer
        high_priority_a2a_comm_stream
    """,
    NETWORK: """
        distributed_backend distributed_timeout_minutes distributed_timeout_seconds_after_init
        local_rank rank world_size DDP_impl lazy_mpu_init nccl_communicator_config_path
        nccl_ub use_nccl_ub use_sharp sharp_enabled_group use_tp_pp_dp_mapping
        disable_symmetric_registration fsdp_manual_registration
        pipeline_model_parallel_comm_backend
        enable_gloo_process_groups disable_gloo_process_groups high_priority_stream_groups
        replication replication_jump replication_factor init_model_with_meta_device
    """,
    PRECISION: """
        accumulate_allreduce_grads_in_fp32 attention_softmax_in_fp32 apply_query_key_layer_scaling
        no_query_key_layer_scaling fp32_embedding fp32_layernorm
        fp32_tokentypes fp32_allreduce fp16_lm_cross_entropy disable_bf16_reduced_precision_matmul
        main_grads_dtype main_params_dtype no_fp32_embedding grad_scaling_factor
        ddp_reduce_scatter_with_fp32_accumulation megatron_fsdp_main_grads_dtype
    """,
    # `core/train/loss_scale.py`
    'the loss scale doubles after 1000 steps, halves at the 2nd overflow, and is at least 1': """
        hysteresis loss_scale_window min_scale min_loss_scale dynamic_loss_scale
    """,
    'layers are recomputed one by one': """
        recompute_method recompute_num_layers distribute_saved_activations moe_layer_recompute
        distribute_checkpointed_activations
    """,
    MEMORY: """
        empty_unused_memory_level manual_gc manual_gc_interval no_manual_gc_eval
        no_clone_scatter_output_in_embedding fp8_param_gather keep_fp8_weight_transpose_cache
        reuse_grad_buf_for_mxfp8_param_ag torch_fsdp2_no_reshard_after_forward
        suggested_communication_unit_size no_gradient_reduce_div_fusion keep_fp8_transpose_cache
        disable_manual_gc_eval disable_clone_scatter_output_in_embedding no_pin_cpu_grads
        no_pin_cpu_params
    """,
    # `core/train/scaling.py`
    'delayed scales follow from the largest values of 1024 steps, without a margin': """
        fp8_margin fp8_interval
    """,
    'the vocabulary is padded to a multiple of 1024 on every mesh': """
        make_vocab_size_divisible_by padded_vocab_size no_pad_vocab_size disable_pad_vocab_size
    """,
    'initial weights are the same on every mesh': """
        use_cpu_initialization no_initialization perform_initialization deep_init
        init_method_normal
    """,
    'a resumed run has the optimizer, the random state and the schedule of its checkpoint': """
        no_load_optim no_load_rng no_save_optim no_save_rng override_lr_scheduler
        override_opt_param_scheduler use_checkpoint_lr_scheduler use_checkpoint_opt_param_scheduler
        exit_on_missing_checkpoint no_load_strict resume_dataloader
    """,
    FORMAT: """
        ckpt_format dist_ckpt_format use_dist_ckpt auto_detect_ckpt_format async_save
        use_persistent_ckpt_worker ckpt_fully_parallel_save no_ckpt_fully_parallel_save
        ckpt_fully_parallel_load ckpt_assume_constant_structure dist_ckpt_strictness
        load_model_opt_format dist_ckpt_optim_fully_reshardable dist_ckpt_workers
        non_persistent_ckpt_type non_persistent_save_interval ckpt_convert_format
        ckpt_convert_save ckpt_convert_update_legacy_dist_opt_format verify_integrity
        async_strategy async_ckpt_cpu_priority async_ckpt_io_priority async_ckpt_use_cpu_shm
        non_persistent_global_ckpt_dir non_persistent_local_ckpt_dir non_persistent_local_ckpt_algo
        use_mp_args_from_checkpoint_args dist_ckpt_save_pre_mcore_014
        distrib_optim_fully_reshardable_mem_efficient
    """,
    LOGS: """
        tensorboard_dir tensorboard_log_interval tensorboard_queue_size log_params_norm
        log_num_zeros_in_grad log_throughput log_progress log_timers_to_tensorboard
        log_batch_size_to_tensorboard no_log_learnig_rate_to_tensorboard
        no_log_learning_rate_to_tensorboard no_log_loss_scale_to_tensorboard
        log_validation_ppl_to_tensorboard log_memory_to_tensorboard log_world_size_to_tensorboard
        log_loss_scale_to_tensorboard log_learning_rate_to_tensorboard log_energy
        timing_log_level timing_log_option no_barrier_with_level_1_timing logging_level
        wandb_exp_name wandb_save_dir wandb_entity enable_one_logger no_one_logger
        one_logger_project one_logger_entity one_logger_run_name one_logger_async
        enable_msc disable_msc config_logger_dir record_memory_history memory_snapshot_path
        profile_ranks use_pytorch_profiler log_memory_interval log_device_memory_used
        moe_per_layer_logging log_max_attention_logit disable_log_loss_scale_to_tensorboard
        pytorch_profiler_collect_shapes pytorch_profiler_collect_callstack
        pytorch_profiler_collect_chakra record_shapes nvtx_ranges save_tokens_per_expert_interval
        save_params_interval save_activations_interval save_wgrads_interval save_dgrads_interval
    """,
    WATCH: """
        log_straggler disable_straggler_on_startup straggler_ctrlr_port straggler_minmax_count
        exit_signal_handler exit_signal adlr_autoresume adlr_autoresume_interval
        no_check_for_nan_in_loss_and_grad check_for_nan_in_loss_and_grad check_for_spiky_loss
        check_for_large_grads check_weight_hash_across_dp_replicas_interval rerun_mode
        error_injection_rate error_injection_type enable_ft_package calc_ft_timeouts
        inprocess_restart train_sync_interval test_mode app_tag_run_name app_tag_run_version
        exit_signal_handler_for_training exit_signal_handler_for_dataloader ft_num_warmup_iters
        run_workload_inspector_server gpu_sniff_test_interval flight_recorder_dump_path
        flight_recorder_trace_buffer_size flight_recorder_include_stack_trace
        no_flight_recorder_dump_on_timeout disable_flight_recorder_dump_on_timeout
        no_flight_recorder_include_only_active disable_flight_recorder_include_only_active
        no_flight_recorder_extra_dump_on_exec disable_flight_recorder_extra_dump_on_exec
    """,
    READER: """
        num_workers data_cache_path no_mmap_bin_files data_impl mmap_warmup lazy_loader
        no_create_attention_mask_in_dataloader num_dataset_builder_threads
        object_storage_cache_path presplit_sentences dataloader_save dataloader_fast_cache_load
        dataloader_defer_npy_index_mmap
    """,
    'the corpus already consists of token ids; data.tokenizer names a tokenizer.json': """
        merge_file vocab_extra_ids tiktoken_pattern tiktoken_num_special_tokens
        tiktoken_special_tokens tokenizer_prompt_format legacy_tokenizer trust_remote_code
        tokenizer_hf_use_fast tokenizer_hf_include_special_tokens null_tokenizer_eod_id
        tokenizer_hf_no_use_fast tokenizer_hf_no_include_special_tokens null_tokenizer_pad_id
        tokenizer_metadata tokenizer_sentencepiece_legacy
        no_use_tokenizer_model_from_checkpoint_args
        disable_use_tokenizer_model_from_checkpoint_args
    """,
    'without --data-path, data.corpus names the corpus': 'mock_data',
    'jax decides how steps are split between processes': 'data_sharding no_data_sharding',
    'sequences of BERT are not shortened at random': 'short_seq_prob',
    UNREAD: """
        moe_upcycling_granularity moe_router_quantile_balancing_ema
        q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
        sgd_momentum use_tokenizer_from_checkpoint_args
        lion_beta1 lion_beta2 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16
        enable_experimental mtp_loss_scaling_factor qk_clip_alpha qk_clip_threshold
    """,
}
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
    'fp8_amax_history_len': 1,
    'fp8_amax_compute_algo': 'most_recent',
}


def names(text: str) -> list[str]:
    """Return the names in a block of the table."""
    return text.split()


def known_names() -> Iterator[str]:
    """Yield every name in the tables of this file and in INSTEAD."""
    for block in (*READ.values(), *NO_MEANING.values()):
        yield from names(block)
    yield from (*SETS, *RENAMED, *INSTEAD)
