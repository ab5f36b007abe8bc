"""One measurement of `benchmarks/gpu.py`: `python benchmarks/gpu_measurements.py NAME FOLDER` ends
with a JSON line.
"""

import functools
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpu_commands
import gpu_deterministic
import gpu_mosaic
import gpu_numerics
import gpu_overlap
import gpu_rank
from gpu_step import SMALL, STEP, TINY, UNTRACED, Sensors, config_of, prepared, query, timed


def main() -> None:
    name, out = sys.argv[1], Path(sys.argv[2])
    kind, _, size = name.partition('-')
    found = {'machine': machine, 'products': products, 'attention': attention, 'losses': losses}
    found |= {'overlap': gpu_overlap.overlap, 'deterministic': gpu_deterministic.deterministic}
    found |= {'numerics': gpu_numerics.numerics, 'mosaic': gpu_mosaic.mosaic}
    found |= {'newcomer': gpu_commands.newcomer, 'repeated': gpu_commands.repeated}
    if kind in found:
        print(json.dumps(found[kind]()))
    elif kind == 'rank':
        print(json.dumps(gpu_rank.rank(size)))
    elif kind == 'torch':
        print(json.dumps(torch_step(size)))
    else:
        for line in step(size, out / size):
            print(json.dumps(line), flush=True)


def machine() -> dict[str, Any]:
    import jax

    device = jax.devices()[0]
    if device.platform != 'gpu' and not SMALL:
        raise SystemExit(
            f'jax has no GPU here, only {device.device_kind}: '
            'install megajax[cuda] on a GPU host, or give --small'
        )
    versions = {
        name: version(name) for name in ('jax', 'jaxlib', 'flax', 'optax', 'torch', 'transformers')
    }
    memory = (device.memory_stats() or {}).get('bytes_limit')
    return {
        'device': device.device_kind,
        'gigabytes': memory / 0.92 / 1e9
        if memory
        else 1000.0,  # of a CPU, enough for what is small
        'python': sys.version.split()[0],
        'versions': versions,
        'driver': query('driver_version'),
        'power_limit_w': query('power.limit'),
        'max_clock_mhz': query('clocks.max.sm'),
    }


def version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def products() -> dict[str, Any]:
    """TFLOP/s of a layer and the head of the 1.2B model and of Llama 3 8B: 8,192 tokens forward."""
    import jax
    import jax.numpy as jnp

    tokens = 256 if SMALL else 8192
    sizes = {
        '1.2b': {
            'qkv': (1536, 4608),
            'out': (1536, 1536),
            'up': (1536, 6144),
            'down': (6144, 1536),
            'head': (1536, 51200),
        },
        'llama': {
            'qkv': (4096, 6144),
            'out': (4096, 4096),
            'up': (4096, 28672),
            'down': (14336, 4096),
            'head': (4096, 128256),
        },
        'square': {'4096': (4096, 4096), '8192': (8192, 8192)},
    }
    multiply = jax.jit(lambda x, w: x @ w)
    found = {}
    for model, shapes in sizes.items():
        for name, (k, n) in shapes.items():
            k, n = (min(size, 256) for size in (k, n)) if SMALL else (k, n)
            x = jax.random.normal(jax.random.key(0), (tokens, k), jnp.bfloat16)
            w = jax.random.normal(jax.random.key(1), (k, n), jnp.bfloat16)
            median = timed(functools.partial(in_turn, multiply, x, w))['median_ms'] / TURNS
            found[f'{model} {name}'] = round(2 * tokens * k * n / median / 1e9, 2)
    x = jnp.zeros(1 << (20 if SMALL else 29), jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    rate = 2 * x.nbytes / (timed(functools.partial(in_turn, copy, x))['median_ms'] / TURNS) / 1e6
    return {'tflops': found, 'copy_gb_per_s': round(rate, 1)}


TURNS = 8  # kernels between two synchronizations, so that none waits for its launch


def in_turn(function: Callable[..., Any], *arguments: Any) -> None:
    result = None
    for _ in range(TURNS):
        result = function(*arguments)
    result.block_until_ready()


def attention() -> dict[str, Any]:
    """TFLOP/s of what the causal mask leaves, forward, and forward with backward."""
    import jax
    import jax.numpy as jnp

    implementation = 'xla' if SMALL else 'cudnn'
    found = {}
    for rows, length, heads, kv_heads, dim in ((8, 1024, 16, 16, 96), (2, 8192, 32, 8, 128)):
        length = 64 if SMALL else length
        q = jax.random.normal(jax.random.key(0), (rows, length, heads, dim), jnp.bfloat16)
        k = jax.random.normal(jax.random.key(1), (rows, length, kv_heads, dim), jnp.bfloat16)
        attend = functools.partial(
            jax.nn.dot_product_attention, is_causal=True, implementation=implementation
        )
        forward = jax.jit(lambda q, k, v, attend=attend: attend(q, k, v))
        both = jax.jit(
            jax.grad(
                lambda q, k, v, attend=attend: attend(q, k, v).astype(jnp.float32).sum(), (0, 1, 2)
            )
        )
        flops = 2 * rows * length**2 * heads * dim
        name = f'{rows}x{length}x{heads}x{dim}'
        ahead = timed(lambda f=forward, q=q, k=k: jax.block_until_ready(f(q, k, k)))['median_ms']
        whole = timed(lambda f=both, q=q, k=k: jax.block_until_ready(f(q, k, k)))['median_ms']
        found[name] = {
            'forward': round(flops / ahead / 1e9, 1),
            'both': round(3.5 * flops / whole / 1e9, 1),
        }
    return {'tflops': found, 'implementation': implementation}


def step(size: str, folder: Path) -> Iterator[dict[str, Any]]:
    """The training step as a run takes it, on one GPU; then the same with the files of two more
    steps under the profiler.
    """
    folder.mkdir(parents=True)
    if not SMALL:
        choices = f'--xla_gpu_dump_autotune_results_to={folder}/autotune.txt'
        os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {choices}'.strip()
    import jax

    from megajax.core.counts.flops import step_flops

    config = config_of(size)
    compiled, state, batch, compile_seconds = prepared(config)
    held: list[Any] = [state, None]
    del state

    def run() -> None:
        held[0], held[1] = compiled(held[0], batch)
        jax.block_until_ready(held[1])

    with Sensors() as sensors:
        times = timed(run)
    device, flops = jax.devices()[0], step_flops(config)
    calls = re.findall(r'custom_call_target="([^"]+)"', compiled.as_text() or '')
    line = {
        'device': device.device_kind,
        'jax': jax.__version__,
        'compile_s': round(compile_seconds, 1),
        **rates(config, times, flops.model, 3 * flops.attention, device.device_kind),
        **sensors.result(),
        'peak_bytes': (device.memory_stats() or {}).get('peak_bytes_in_use'),
        'loss': float(held[1]['loss']),
        'calls': dict(Counter(calls)),
    }
    yield line
    if size not in UNTRACED:
        yield {**line, 'files': kept(config, compiled, held, batch, folder)}


def rates(
    config: Any, times: dict[str, float], flops: int, attention: int, kind: str
) -> dict[str, Any]:
    """Tokens a second of a step, and its share of the peak with attention in full and as a causal
    mask leaves it.
    """
    from megajax.core.hardware.records import hardware_of

    known, seconds = hardware_of(kind), times['median_ms'] / 1e3
    peak = known.peak_flops['bfloat16'] if known else None
    return {
        **times,
        'rows': config.train.batch_size,
        'microbatches': config.train.microbatches,
        'tokens_per_s': config.train.batch_size * config.train.seq_len / seconds,
        'tflops': flops / seconds / 1e12,
        'mfu': flops / seconds / peak if peak else None,
        'mfu_causal': (flops - attention / 2) / seconds / peak if peak else None,
    }


def losses() -> dict[str, Any]:
    """Five steps of a small model in fp32, bf16 and fp8, here and on the CPU."""
    here, there = own_losses(), None
    if os.environ.get('JAX_PLATFORMS') != 'cpu':
        environment = {**os.environ, 'JAX_PLATFORMS': 'cpu'}
        command = [sys.executable, __file__, 'losses', '.']
        said = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout
        there = json.loads(said.splitlines()[-1])['losses']
    differences = {
        dtype: max(abs(a - b) / abs(b) for a, b in zip(here[dtype], there[dtype], strict=True))
        if there
        else None
        for dtype in here
    }
    return {'losses': here, 'difference': differences}


def own_losses() -> dict[str, list[float]]:
    import megajax

    found: dict[str, list[float]] = {}
    for dtype in ('float32', 'bfloat16', 'fp8'):
        config = megajax.load('tiny', [*STEP, *TINY, 'train.batch_size=4', f'train.dtype={dtype}'])
        compiled, state, batch, _ = prepared(config)
        found[dtype] = []
        for _ in range(5):
            state, metrics = compiled(state, batch)
            found[dtype].append(float(metrics['loss']))
    return found


def torch_step(size: str) -> dict[str, Any]:
    """PyTorch's model of the same size, as transformers writes it, compiled, with fused AdamW."""
    import torch

    from megajax.core.counts.flops import step_flops

    config = config_of(size)
    model, train = config.model, config.train
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    network = transformers_model(model).to(device).train()
    network = network if SMALL else torch.compile(network)
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=1e-4, weight_decay=0.1, fused=device == 'cuda'
    )
    tokens = torch.randint(0, model.vocab_size, (train.batch_size, train.seq_len), device=device)

    def run() -> None:
        with torch.autocast(device, torch.bfloat16):
            loss = network(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device == 'cuda':
            torch.cuda.synchronize()

    with Sensors() as sensors:
        times = timed(run)
    flops, kind = step_flops(config), torch.cuda.get_device_name() if device == 'cuda' else 'cpu'
    peak = torch.cuda.max_memory_allocated() if device == 'cuda' else None
    found = rates(config, times, flops.model, 3 * flops.attention, kind)
    return {
        'device': kind,
        'torch': torch.__version__,
        **found,
        **sensors.result(),
        'peak_bytes': peak,
    }


def transformers_model(model: Any) -> Any:
    """Return GPT-2 or Llama with the sizes of `model`, in fp32 with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if model.position == 'rope':
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=model.padded_vocab_size,
                max_position_embeddings=model.max_seq_len,
                hidden_size=model.hidden_size,
                intermediate_size=model.ffn_size,
                num_hidden_layers=model.num_layers,
                num_attention_heads=model.num_heads,
                num_key_value_heads=model.num_kv_heads,
                rope_theta=model.rope_theta,
                attn_implementation='sdpa',
            )
        )
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=model.padded_vocab_size,
            n_positions=model.max_seq_len,
            n_embd=model.hidden_size,
            n_layer=model.num_layers,
            n_head=model.num_heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            attn_implementation='sdpa',
        )
    )


def kept(config: Any, compiled: Any, held: list[Any], batch: Any, folder: Path) -> dict[str, int]:
    """Trace two more steps into an archive that `megajax profile` reads once it is unpacked; the
    choices of the autotuner lie there too.
    """
    import jax

    from megajax.core.config import dump
    from megajax.runtime.run.infer_config import CONFIG
    from megajax.runtime.run.profile import Profiler

    (folder / CONFIG).write_text(dump(config))
    with Profiler(folder, config) as profiler:
        profiler.compiled = compiled
        for number in (1, 2):
            with profiler.step(number):
                held[0], held[1] = compiled(held[0], batch)
                jax.block_until_ready(held[1])
    archive = Path(shutil.make_archive(str(folder), 'gztar', folder))
    shutil.rmtree(folder)
    return {archive.name: archive.stat().st_size}


if __name__ == '__main__':
    main()
