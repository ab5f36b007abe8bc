"""The training step of Megatron's 1.2B model on one GPU, in bf16 with flash attention: `python benchmarks/gpu.py [key=value ...]`.

Prints TFLOP/s and MFU by the formula of Narayanan et al., 2021, with PyTorch's GPT-2 of the same size beside it where PyTorch sees the
GPU too. Takes the largest of megatron_1.2b, gpt2_345m and gpt2_124m that fits, and refuses to run without a GPU.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import megajax

PRESETS = ('megatron_1.2b', 'gpt2_345m', 'gpt2_124m')
# Dense bf16 peaks from the vendor's data sheets, in TFLOP/s.
PEAK = {'V100': 125.0, 'A100': 312.0, 'H100': 989.0, 'H200': 989.0, 'B200': 2250.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('overrides', nargs='*', help='config keys, for example train.batch_size=16')
    parser.add_argument('--steps', type=int, default=20, help='timed steps')
    arguments = parser.parse_args()
    device = jax.devices()[0]
    if device.platform != 'gpu':
        parser.error(f'jax has no GPU here, only {device.device_kind}: install megajax[cuda] on a GPU host, or run benchmarks/cpu.py')
    jax.set_mesh(megajax.make_mesh(1, 1))
    name, config, compiled, batch = largest_that_fits(arguments.overrides, device)
    state = megajax.init_state(config)

    def step() -> None:
        nonlocal state
        state, metrics = compiled(state, batch)
        jax.block_until_ready(metrics)

    print(f'{name} on {device.device_kind}, jax {jax.__version__}')
    show('megajax', config, timed(step, arguments.steps), device.device_kind)
    del state
    if torch_sees_gpu():
        show('PyTorch', config, timed(torch_step(config), arguments.steps), device.device_kind)


def largest_that_fits(overrides: list[str], device: jax.Device) -> tuple[str, megajax.Config, Callable[..., Any], Any]:
    """The first preset whose compiled step needs less than the GPU's memory."""
    limit = device.memory_stats()['bytes_limit']
    for name in PRESETS:
        settings = ['mesh.data=1', 'mesh.model=1', 'train.batch_size=8', 'train.dtype=bfloat16', 'train.recompute=none', 'model.dropout=0']
        config = megajax.load(name, [*settings, *overrides])
        train = config.train
        tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, (train.batch_size, train.seq_len + 1), np.int32)
        batch = megajax.place_batch(
            {'tokens': tokens[:, :-1], 'labels': tokens[:, 1:], 'loss_mask': np.ones((train.batch_size, train.seq_len), np.float32)}
        )
        compiled = megajax.make_train_step(config).lower(jax.eval_shape(lambda config=config: megajax.init_state(config)), batch).compile()
        memory = compiled.memory_analysis()
        needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        print(f'{name}: {needed / 1e9:.1f} GB of {limit / 1e9:.1f} GB')
        if needed < limit:
            return name, config, compiled, batch
    raise SystemExit('error: none of them fits: set a smaller train.batch_size, or train.recompute=full')


def timed(step: Callable[[], None], steps: int) -> float:
    for _ in range(3):
        step()
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def show(name: str, config: megajax.Config, seconds: float, kind: str) -> None:
    model, train = config.model, config.train
    hidden, layers, length = model.hidden_size, model.num_layers, train.seq_len
    terms = 1 + length / (6 * hidden) + model.padded_vocab_size / (12 * hidden * layers)
    rate = 72 * train.batch_size * length * layers * hidden**2 * terms / seconds / 1e12
    peak = next((peak for gpu, peak in PEAK.items() if gpu in kind), None)
    mfu = f'{rate / peak:.1%} MFU' if peak else f'no peak known for {kind}'
    print(f'{name:8s} {1e3 * seconds:8.1f} ms/step {train.batch_size * length / seconds:10,.0f} tokens/s {rate:7.1f} TFLOP/s  {mfu}')


def torch_sees_gpu() -> bool:
    try:
        import torch
        import transformers  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.is_available()


def torch_step(config: megajax.Config) -> Callable[[], None]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    model, train = config.model, config.train
    gpt2 = GPT2Config(
        vocab_size=model.padded_vocab_size, n_positions=model.max_seq_len, n_embd=model.hidden_size, n_layer=model.num_layers,
        n_head=model.num_heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation='sdpa',
    )  # fmt: skip
    network = torch.compile(GPT2LMHeadModel(gpt2).cuda().train())
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    tokens = torch.randint(0, model.vocab_size, (train.batch_size, train.seq_len), device='cuda')

    def step() -> None:
        with torch.autocast('cuda', torch.bfloat16):
            loss = network(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()

    return step


if __name__ == '__main__':
    main()
