"""Write tests/runtime/data/oracles/experts_tp2_ep2.npz: what megatron-core's MoELayer computes.

    torchrun --nproc_per_node 4 tests/interop/make_experts.py

writes the file with 2 tensor-parallel x 2 expert-parallel ranks, on which two sequences are two
data shards. With `--nproc_per_node 1` it compares the results of one rank with the file instead.

It needs torch and megatron-core; the stored file is of torch 2.10.0 and megatron-core 0.19.2, on a
CPU with gloo. `use_the_cpu` of make_torch_dist.py replaces what asks for a GPU and what gloo lacks.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from make_torch_dist import use_the_cpu
from megatron.core import parallel_state as ranks
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker, set_moe_metrics_tracker
from megatron.core.transformer.transformer_config import TransformerConfig

FILE = Path(__file__).parents[1] / 'runtime/data/oracles/experts_tp2_ep2.npz'
SEQUENCES, LENGTH, HIDDEN, EXPERTS, FFN, SHARED = 2, 16, 16, 8, 12, 20
SIGMOID: dict[str, Any] = {
    'moe_router_score_function': 'sigmoid',
    'moe_router_enable_expert_bias': True,
    'moe_router_topk_scaling_factor': 2.5,
}
CASES: dict[str, dict[str, Any]] = {
    'softmax': {'moe_router_pre_softmax': True},
    'chosen': {},
    'sigmoid': SIGMOID,
    'groups': SIGMOID | {'moe_router_num_groups': 2, 'moe_router_group_topk': 1},
    'sequence': {
        'moe_router_pre_softmax': True,
        'moe_router_load_balancing_type': 'seq_aux_loss',
        'moe_aux_loss_coeff': 0.1,
        'moe_z_loss_coeff': 0.02,
    },
    'groups_sequence': SIGMOID
    | {
        'moe_router_num_groups': 2,
        'moe_router_group_topk': 1,
        'moe_router_load_balancing_type': 'seq_aux_loss',
        'moe_aux_loss_coeff': 0.1,
    },
    'global': {
        'moe_router_load_balancing_type': 'global_aux_loss',
        'moe_aux_loss_coeff': 0.1,
    },
    'capacity': {'moe_expert_capacity_factor': 1.0},
    'shared': {'moe_shared_expert_intermediate_size': SHARED},
    'biases': {'add_bias_linear': True, 'expert_tensor_parallel_size': 1},
}
Arrays = dict[str, np.ndarray]


def make_inputs() -> Arrays:
    """Return the input [B, S, D], the gradient of the output, and all weights and biases."""
    rng = np.random.default_rng(48)

    def draw(scale: float, *shape: int) -> np.ndarray:
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    return {
        'x': draw(1, SEQUENCES, LENGTH, HIDDEN),
        'cotangent': draw(1 / (SEQUENCES * LENGTH), SEQUENCES, LENGTH, HIDDEN),
        'router': draw(HIDDEN**-0.5, EXPERTS, HIDDEN),
        'router_bias': draw(0.3, EXPERTS),
        'expert_bias': draw(0.2, EXPERTS),
        'fc1': draw(HIDDEN**-0.5, EXPERTS, 2 * FFN, HIDDEN),
        'fc1_bias': draw(0.3, EXPERTS, 2 * FFN),
        'fc2': draw(FFN**-0.5, EXPERTS, HIDDEN, FFN),
        'fc2_bias': draw(0.3, EXPERTS, HIDDEN),
        'shared_fc1': draw(HIDDEN**-0.5, 2 * SHARED, HIDDEN),
        'shared_fc2': draw(SHARED**-0.5, HIDDEN, SHARED),
    }


def make_layer(case: dict[str, Any], size: int) -> MoELayer:
    config = TransformerConfig(
        **{
            'num_layers': 1,
            'hidden_size': HIDDEN,
            'num_attention_heads': 4,
            'num_moe_experts': EXPERTS,
            'moe_ffn_hidden_size': FFN,
            'moe_router_topk': 2,
            'moe_router_load_balancing_type': 'none',
            'moe_token_dispatcher_type': 'alltoall',
            'gated_linear_unit': True,
            'activation_func': torch.nn.functional.silu,
            'add_bias_linear': False,
            'bias_activation_fusion': False,
            'use_cpu_initialization': True,
            'tensor_model_parallel_size': size,
            'expert_model_parallel_size': size,
            'expert_tensor_parallel_size': size,
            'sequence_parallel': size > 1,
        }
        | case
    )
    ranks.destroy_model_parallel()
    ranks.initialize_model_parallel(
        size,
        expert_model_parallel_size=size,
        expert_tensor_parallel_size=config.expert_tensor_parallel_size,
    )
    layer = get_moe_module_spec(use_te=False, num_experts=EXPERTS)(config=config, layer_number=1)
    layer.set_layer_number(1)
    return layer


def part_of(name: str, x: np.ndarray) -> np.ndarray:
    """Return a tensor-parallel rank's part of one expert's, or the shared expert's, weight."""
    rank, size = (
        ranks.get_tensor_model_parallel_rank(),
        ranks.get_tensor_model_parallel_world_size(),
    )
    if not name.startswith('shared'):
        rank = ranks.get_expert_tensor_parallel_rank()
        size = ranks.get_expert_tensor_parallel_world_size()
    if 'fc1' in name:
        return np.concatenate([np.split(half, size)[rank] for half in np.split(x, 2)])
    return x if 'bias' in name else np.split(x, size, axis=1)[rank]


def parameters_of(layer: MoELayer) -> dict[str, tuple[str, int | None]]:
    """Return the name in the file, and the expert, of each of the layer's own parameters."""
    first = ranks.get_expert_model_parallel_rank() * layer.num_local_experts
    names = {}
    for name, _ in layer.named_parameters():
        module, _, kind = name.rpartition('.')
        bias = '_bias' if kind == 'bias' else ''
        if module == 'router':
            names[name] = f'router{bias}', None
        elif module.startswith('shared_experts.linear_'):
            names[name] = f'shared_{module[-3:]}', None
        else:
            index = int(module.split('.')[2])
            names[name] = f'{module[-3:]}{bias}', first + index
    return names


def set_weights(layer: MoELayer, inputs: Arrays) -> None:
    for name, (key, expert) in parameters_of(layer).items():
        x = inputs[key] if expert is None else inputs[key][expert]
        part = x if key.startswith('router') else part_of(key, x)
        layer.get_parameter(name).data.copy_(torch.tensor(part))
    if layer.router.expert_bias is not None:
        layer.router.expert_bias.copy_(torch.tensor(inputs['expert_bias']))


def merged(key: str, parts: list[np.ndarray]) -> np.ndarray:
    """Merge the parts of all expert-tensor-parallel (or, if shared, tensor-parallel) ranks."""
    if 'fc1' in key:
        halves = zip(*(np.split(part, 2) for part in parts), strict=True)
        return np.concatenate([np.concatenate(half) for half in halves])
    return parts[0] if 'bias' in key else np.concatenate(parts, axis=1)


def gradients_of(layer: MoELayer) -> Arrays | None:
    """Return the gradients of all weights on the first rank, where they are merged."""
    place = (
        ranks.get_tensor_model_parallel_rank(),
        ranks.get_expert_tensor_parallel_rank(),
        ranks.get_expert_data_parallel_rank(),
        ranks.get_data_parallel_rank(),
    )
    own = [
        (key, expert, layer.get_parameter(name).main_grad.numpy().copy())
        for name, (key, expert) in parameters_of(layer).items()
    ]
    everyone = gathered((place, own))
    if everyone is None:
        return None
    parts: dict[tuple[str, int | None], dict[int, np.ndarray]] = {}
    for (tensor, expert_tensor, expert_data, data), its in everyone:
        for key, expert, grad in its:
            rank, copy = (tensor, data) if expert is None else (expert_tensor, expert_data)
            first = parts.setdefault((key, expert), {}).setdefault(rank, grad)
            np.testing.assert_allclose(first, grad, rtol=0, atol=1e-7, err_msg=f'{key} {copy}')
    grads: dict[str, Any] = {}
    for (key, expert), of_ranks in sorted(parts.items(), key=str):
        its = [of_ranks[rank] for rank in sorted(of_ranks)]
        if key.startswith('router'):
            grads[key] = its[0]
        elif expert is None:
            grads[key] = merged(key, its)
        else:
            grads.setdefault(key, []).append(merged(key, its))
    return {f'g/{key}': np.stack(x) if isinstance(x, list) else x for key, x in grads.items()}


def gathered(x: Any) -> list[Any] | None:
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(x, everyone)
    return everyone


def run(name: str, inputs: Arrays) -> Arrays | None:
    """Return the results of a case on the first rank."""
    size = 2 if dist.get_world_size() == 4 else 1
    layer = make_layer(CASES[name], size)
    set_weights(layer, inputs)
    model = DistributedDataParallel(
        layer.config, DistributedDataParallelConfig(overlap_grad_reduce=False), layer
    )
    shards = ranks.get_data_parallel_world_size()
    here = np.ix_(
        np.split(np.arange(SEQUENCES), shards)[ranks.get_data_parallel_rank()],
        np.split(np.arange(LENGTH), size)[ranks.get_tensor_model_parallel_rank()],
    )
    x_SBD, dy_SBD = (
        torch.tensor(inputs[key][here]).swapaxes(0, 1).contiguous() for key in ('x', 'cotangent')
    )
    x_SBD.requires_grad_()
    routed: list[torch.Tensor] = []
    layer.router.register_forward_hook(lambda _, __, result: routed.extend(result))
    set_moe_metrics_tracker(tracker := MoEMetricsTracker())
    y_SBD, _ = model(x_SBD)
    # Megatron-LM divides gradients by the number of data shards, because its loss is a mean.
    ((y_SBD * dy_SBD).sum() * shards).backward()
    finalize_model_grads([model])
    tracker._sync_metrics(list(tracker.metrics), None)
    probs_SBX, routed_SBX = (x.view(*y_SBD.shape[:2], EXPERTS) for x in routed)
    parts = {
        'output': y_SBD,
        'dx': x_SBD.grad / shards,
        'probs': probs_SBX,
        'routed': routed_SBX,
    }
    everyone = gathered((here, {key: x.detach().swapaxes(0, 1) for key, x in parts.items()}))
    grads = gradients_of(layer)
    if everyone is None or grads is None:
        return None
    whole: Arrays = {}
    for place, its in everyone:
        for key, x in its.items():
            shape = (SEQUENCES, LENGTH, x.shape[-1])
            whole.setdefault(key, np.zeros(shape, x.numpy().dtype))[place] = x
    if layer.router.expert_bias is not None:
        whole['expert_bias_after'] = layer.router.expert_bias.numpy()
    losses = {f'loss/{key}': entry.values.numpy() for key, entry in tracker.metrics.items()}
    return whole | grads | losses


def compare(results: Arrays) -> None:
    """Print the largest difference of each array from the stored one, relative to its largest."""
    with np.load(FILE) as file:
        for key, x in results.items():
            error = np.abs(x.astype(float) - file[key]).max() / np.abs(file[key]).max()
            print(f'{key:40} {error:.1e}')


if __name__ == '__main__':
    dist.init_process_group('gloo')
    use_the_cpu()
    arrays = make_inputs()
    results = dict(arrays)
    alone = dist.get_world_size() == 1
    for each in CASES:
        if alone and each in ('capacity', 'biases'):  # other groups of tokens; an in-place error
            continue
        found = run(each, arrays)
        results |= {f'{each}/{key}': x for key, x in (found or {}).items()}
    if alone:
        compare(results)
    elif dist.get_rank() == 0:
        np.savez_compressed(FILE, **results)
