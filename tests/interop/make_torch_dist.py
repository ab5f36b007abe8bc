"""Write tests/interop/torch_dist: checkpoints that megatron-core saves, and its models' logits.

    torchrun --nproc_per_node 4 tests/interop/make_torch_dist.py

needs torch and megatron-core; names of models after it write these alone. The stored files are of
torch 2.14.1 and megatron-core 0.16.1, those of experts of torch 2.10.0 and megatron-core 0.19.2, on
a CPU with gloo. megatron-core expects a GPU, so `use_the_cpu` replaces what asks for one, and what
gloo lacks. Then run make_dist_steps.py, whose results lie beside these.

`gpt2` is written by 2 tensor-parallel ranks x 2 pipeline stages with the state of AdamW: its layers
are stacked in one tensor. `llama` is written by 2 tensor-parallel ranks x 2 data shards: each layer
has tensors of its own, gate and up too, and the vocabulary of 60 is padded to 64. `experts` and
`experts_of_layers` are one model with experts, written by 2 tensor-parallel x 2 expert-parallel
ranks: with layers and experts stacked, and with tensors for each.
"""

import argparse
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import optimizer as sharded
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

FOLDER = Path(__file__).parent / 'torch_dist'
VOCAB, PADDED, LENGTH = 60, 64, 24
# Megatron-LM stores its arguments in a checkpoint; its training package is not in megatron-core.
ARGUMENTS: dict[str, Any] = {
    'num_layers': 2,
    'hidden_size': 16,
    'num_attention_heads': 4,
    'max_position_embeddings': 32,
    'seq_length': LENGTH,
    'vocab_size': VOCAB,
    'padded_vocab_size': PADDED,
    'hidden_dropout': 0.0,
    'attention_dropout': 0.0,
    'params_dtype': torch.float32,
    'bias_gelu_fusion': False,
}
MODELS: dict[str, dict[str, Any]] = {
    'gpt2': {'ffn_hidden_size': 32, 'pipeline_model_parallel_size': 2},
    'llama': {
        'ffn_hidden_size': 24,
        'group_query_attention': True,
        'num_query_groups': 2,
        'position_embedding_type': 'rope',
        'normalization': 'RMSNorm',
        'swiglu': True,
        'add_bias_linear': False,
        'untie_embeddings_and_output_weights': True,
        'pipeline_model_parallel_size': 1,
    },
}
MODELS['experts'] = MODELS['llama'] | {
    'num_experts': 4,
    'expert_model_parallel_size': 2,
    'moe_ffn_hidden_size': 8,
    'moe_router_topk': 2,
    'moe_router_score_function': 'sigmoid',
    'moe_router_enable_expert_bias': True,
    'moe_router_topk_scaling_factor': 2.5,
    'moe_token_dispatcher_type': 'alltoall',
}
MODELS['experts_of_layers'] = MODELS['experts']
EACH_LAYER = 'llama', 'experts_of_layers'  # with tensors of their own


def use_the_cpu() -> None:
    """Replace what asks for a GPU, and what gloo lacks."""
    torch.cuda.current_device = lambda: torch.device('cpu')
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda self, *_, **__: self
    CudaRNGStatesTracker.fork = lambda *_: nullcontext()  # there is no dropout
    filesystem_async._process_memory = lambda: 0  # asks for psutil, only to log
    _use_no_streams()
    _use_uneven_parts()


class Stream:
    """A CUDA stream on a machine that has none."""

    def __getattr__(self, _: str) -> Any:
        return lambda *_: self


def _use_no_streams() -> None:
    """Replace the streams that copy counts of tokens to the CPU, and the copies."""
    stream = Stream()
    torch.cuda.Stream = lambda *_, **__: stream
    torch.cuda.current_stream = lambda *_: stream
    torch.cuda.stream = lambda *_: nullcontext()
    token_dispatcher.maybe_move_tensor_to_cpu = lambda x, as_numpy=False, **_: (
        x.numpy() if as_numpy and torch.is_tensor(x) else x
    )


def _use_uneven_parts() -> None:
    """Gather and scatter parts of different sizes, which gloo does not, part by part."""

    def all_gather(parts: list[torch.Tensor], x: torch.Tensor, group: Any) -> None:
        parts[group.rank()].copy_(x)
        for rank, part in enumerate(parts):
            dist.broadcast(part, group=group, group_src=rank)

    def reduce_scatter(x: torch.Tensor, parts: list[torch.Tensor], group: Any) -> None:
        sums = [part.clone() for part in parts]
        for part in sums:
            dist.all_reduce(part, group=group)
        x.copy_(sums[group.rank()])

    dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter


def make_model(arguments: dict[str, Any], *, parallel_output: bool = False) -> GPTModel:
    swiglu, norm = arguments.get('swiglu', False), arguments.get('normalization', 'LayerNorm')
    config = TransformerConfig(
        num_layers=arguments['num_layers'],
        hidden_size=arguments['hidden_size'],
        num_attention_heads=arguments['num_attention_heads'],
        num_query_groups=arguments.get('num_query_groups'),
        ffn_hidden_size=arguments['ffn_hidden_size'],
        normalization=norm,
        gated_linear_unit=swiglu,
        activation_func=torch.nn.functional.silu if swiglu else torch.nn.functional.gelu,
        add_bias_linear=arguments.get('add_bias_linear', True),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        use_cpu_initialization=True,
        tensor_model_parallel_size=arguments['tensor_model_parallel_size'],
        pipeline_model_parallel_size=arguments['pipeline_model_parallel_size'],
        pipeline_dtype=torch.float32,
        num_moe_experts=arguments.get('num_experts'),
        expert_model_parallel_size=arguments.get('expert_model_parallel_size', 1),
        **{name: value for name, value in arguments.items() if name.startswith('moe_')},
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(arguments.get('num_experts'), normalization=norm),
        vocab_size=arguments['padded_vocab_size'],
        max_sequence_length=arguments['max_position_embeddings'],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=parallel_output,
        share_embeddings_and_output_weights=not arguments.get(
            'untie_embeddings_and_output_weights', False
        ),
        position_embedding_type=arguments.get('position_embedding_type', 'learned_absolute'),
    )


def randomise(model: GPTModel) -> None:
    """Give every vector values of its own, since biases of 0 and scales of 1 hide mistakes."""
    for name, param in model.named_parameters():
        generator = torch.Generator().manual_seed(sum(name.encode()))
        if param.dim() == 1:
            noise = torch.randn(4096, generator=generator)[: len(param)]
            if getattr(param, 'tensor_model_parallel', False):
                noise = noise * (1 + parallel_state.get_tensor_model_parallel_rank())
            param.data += 0.1 * noise
        else:
            param.data *= 5  # so that the logits differ from one another
        if '.experts.' in name:  # the same on all expert-parallel ranks until here
            param.data *= 1 + 0.3 * parallel_state.get_expert_model_parallel_rank()
    for name, bias in model.named_buffers():
        if name.endswith('expert_bias'):
            generator = torch.Generator().manual_seed(sum(name.encode()))
            bias += 0.1 * torch.randn(len(bias), generator=generator)


def inputs(token_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, positions, and the mask of what a token does not attend to."""
    future = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    return token_BS, torch.arange(LENGTH).expand_as(token_BS), future


def compute(model: GPTModel, token_BS: torch.Tensor) -> torch.Tensor | None:
    """Return the logits [B, S, V] on the last stage."""
    previous = parallel_state.get_pipeline_model_parallel_prev_rank()
    if not model.pre_process:
        x_SBD = torch.empty(LENGTH, len(token_BS), model.config.hidden_size)
        dist.recv(x_SBD, previous)
        model.set_input_tensor(x_SBD)
    y = model(*inputs(token_BS))
    if model.post_process:
        return y[:, :, :VOCAB]
    dist.send(y.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
    return None


def optimizer_state(model: GPTModel, weights: dict[str, Any]) -> dict[str, Any]:
    """AdamW's moments as megatron-core's optimizers shard them."""
    adam = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    before = [param.data.clone() for param in model.parameters()]
    adam.step()
    for param, value in zip(model.parameters(), before, strict=True):
        param.data.copy_(value)
    state = adam.state_dict()
    places = sharded.get_param_id_to_sharded_param_map(weights, model.parameters())
    sharded.optim_state_to_sharding_state(state, places, exclude_keys='step')
    return state


def write(name: str) -> None:
    arguments = ARGUMENTS | MODELS[name] | {'tensor_model_parallel_size': 2}
    parallel_state.initialize_model_parallel(
        2,
        arguments['pipeline_model_parallel_size'],
        expert_model_parallel_size=arguments.get('expert_model_parallel_size', 1),
    )
    torch.manual_seed(7)
    model = make_model(arguments).eval()
    randomise(model)
    token_BS = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        logit_BSV = compute(model, token_BS)
    whole = name in EACH_LAYER
    weights = model.sharded_state_dict(metadata={'singleton_local_shards': whole})
    state = {
        'args': argparse.Namespace(**arguments),
        'checkpoint_version': 3.0,
        'iteration': 5,
        'model': weights,
    }
    if name == 'gpt2':
        state['optimizer'] = optimizer_state(model, weights)
    folder = FOLDER / name / 'iter_0000005'
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
        (FOLDER / name / 'latest_checkpointed_iteration.txt').write_text('5')
    dist.barrier()
    dist_checkpointing.save(state, str(folder))
    last = parallel_state.is_pipeline_last_stage()
    if last and dist.get_rank() == dist.get_world_size() - 1:
        assert logit_BSV is not None
        np.savez(FOLDER / f'{name}.npz', tokens=token_BS, logits=logit_BSV)
    parallel_state.destroy_model_parallel()


if __name__ == '__main__':
    dist.init_process_group('gloo')
    use_the_cpu()
    models = sys.argv[1:] or list(MODELS)
    if dist.get_rank() == 0:
        for each in models:
            shutil.rmtree(FOLDER / each, ignore_errors=True)
    dist.barrier()
    for each in models:
        write(each)
    dist.barrier()
    if dist.get_rank() == 0:
        for each in models:
            shutil.make_archive(str(FOLDER / each), 'xztar', FOLDER / each)
            shutil.rmtree(FOLDER / each)
