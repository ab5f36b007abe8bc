"""Write torch_dist/NAME_steps.npz: training steps that megatron-core makes from its checkpoints.

    python tests/interop/make_dist_steps.py [FOLDER]

needs torch, megatron-core, and the archives of make_torch_dist.py. The keys are those of
tests/runtime/data/oracles/README.md, beside the arguments of the optimizer.

A checkpoint of two tensor-parallel ranks is loaded by one, which does not pad the vocabulary: the
softmax of megatron-core counts padding, that of megajax does not.
"""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from make_torch_dist import (
    ARGUMENTS,
    EACH_LAYER,
    FOLDER,
    LENGTH,
    MODELS,
    VOCAB,
    inputs,
    make_model,
    use_the_cpu,
)
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.overrides import TorchFunctionMode

ONE_RANK = {
    'tensor_model_parallel_size': 1,
    'pipeline_model_parallel_size': 1,
    'expert_model_parallel_size': 1,
    'padded_vocab_size': VOCAB,
}
# Of a model with experts, in training.
BALANCE = {
    'moe_router_load_balancing_type': 'seq_aux_loss',
    'moe_aux_loss_coeff': 0.1,
    'moe_z_loss_coeff': 0.01,
    'moe_router_bias_update_rate': 0.02,
}
STEPPED = 'gpt2', 'llama', 'experts'
STEPS = 3
# The gradients' norm is above `clip_grad`, and `adam_eps` is of the size of a gradient, so that the
# first update depends on clipping and on the bias corrections, and no update on rounding.
OPTIMIZER = {
    'lr': 1e-2,
    'weight_decay': 0.01,
    'adam_beta1': 0.9,
    'adam_beta2': 0.95,
    'adam_eps': 1e-3,
    'clip_grad': 0.5,
}


class NoGPU(TorchFunctionMode):
    """Makes tensors on the CPU that are asked for on a GPU, and calls those of fp32 a GPU's."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get('device') == 'cuda':
            kwargs['device'] = 'cpu'
        result = function(*args, **kwargs)
        is_name = function is torch.Tensor.type and isinstance(result, str)
        return result.replace('torch.', 'torch.cuda.') if is_name else result


def load(name: str) -> GPTModel:
    """The model of a stored checkpoint, by megatron-core's own reader."""
    balance = BALANCE if 'num_experts' in MODELS[name] else {}
    model = make_model(ARGUMENTS | MODELS[name] | ONE_RANK | balance, parallel_output=True)
    whole = name in EACH_LAYER
    weights = model.sharded_state_dict(metadata={'singleton_local_shards': whole})
    with tempfile.TemporaryDirectory() as folder:
        shutil.unpack_archive(FOLDER / f'{name}.tar.xz', folder, filter='data')
        state = dist_checkpointing.load({'model': weights}, f'{folder}/iter_0000005')
    model.load_state_dict(state['model'])
    return model


def make_optimizer(shard: DistributedDataParallel) -> MegatronOptimizer:
    optimizer = get_megatron_optimizer(OptimizerConfig(**OPTIMIZER), [shard])
    lr, weight_decay = OPTIMIZER['lr'], OPTIMIZER['weight_decay']
    OptimizerParamScheduler(  # which exempts biases and norms from weight decay
        optimizer,
        init_lr=lr,
        max_lr=lr,
        min_lr=lr,
        lr_warmup_steps=0,
        lr_decay_steps=STEPS,
        lr_decay_style='constant',
        start_wd=weight_decay,
        end_wd=weight_decay,
        wd_incr_steps=STEPS,
        wd_incr_style='constant',
    )
    return optimizer


def train(model: GPTModel, token_BS: torch.Tensor, label_BS: torch.Tensor) -> dict[str, Any]:
    """Losses and norms of steps on one batch, the gradients of the first, the weights after all."""
    shard = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    optimizer = make_optimizer(shard)
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        shard.zero_grad_buffer()
        optimizer.zero_grad()
        loss = shard(*inputs(token_BS), labels=label_BS).mean()
        loss.backward()
        finalize_model_grads([shard])  # which moves the biases of experts too
        if step == 0:
            gradients = {f'g/{name}': x.main_grad.clone() for name, x in model.named_parameters()}
        losses.append(loss.item())
        norms.append(optimizer.step()[1])
    weights = {f'pf/{name}': x.detach() for name, x in model.state_dict().items() if x is not None}
    return {'train_losses': losses, 'train_gnorms': norms, **gradients, **weights}


def main(folder: Path) -> None:
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    use_the_cpu()
    parallel_state.initialize_model_parallel()
    for name in STEPPED:
        token_BS = torch.randint(VOCAB, (4, LENGTH + 1), generator=torch.Generator().manual_seed(5))
        batch = token_BS[:, :-1], token_BS[:, 1:]
        model = load(name)
        with NoGPU():
            steps = train(model, *batch)
        np.savez_compressed(
            folder / f'{name}_steps.npz', tokens=batch[0], labels=batch[1], **OPTIMIZER, **steps
        )


if __name__ == '__main__':
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
