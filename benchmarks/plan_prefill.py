"""Compare what `megajax plan --generate` says of a prefill's memory with its compiled program:
`python benchmarks/plan_prefill.py`.

Each row is a program for H100s. It needs XLA's GPU compiler (the extra `gpu-compile`), no GPU.
"""

from typing import NamedTuple

import jax
import numpy as np

from megajax.analysis.plan.generation import plan_generation
from megajax.core.config import Config, load
from megajax.core.counts.prompts import padded_length, slots_of_cache
from megajax.core.hardware.targets import compile_without_gpu, gpu_devices
from megajax.core.parallel.mesh import concrete, mesh_of
from megajax.core.train.step import make_params
from megajax.runtime.generate.engine import Engine
from megajax.runtime.generate.prompt_images import PromptBatch
from megajax.runtime.generate.sampling import Sampling
from megajax.runtime.generate.weights import make_weights

GPU, TOKENS = 'h100', 64
HEADER = 'model | layers | GPUs | prompts | predicted MB | compiled MB | compiled / predicted'
LONG = 'model.max_seq_len=131072'


class Case(NamedTuple):
    """Prompts for the first layers of a preset on tensor-parallel GPUs."""

    preset: str
    layers: int
    gpus: int
    batch: int
    prompt: int
    overrides: tuple[str, ...] = ()

    @property
    def config(self) -> Config:
        sizes = f'model.num_layers={self.layers}', f'mesh.model={self.gpus}', 'mesh.data=1'
        one_group = ('mesh.experts=1',) if load(self.preset).model.experts else ()
        return load(self.preset, ['train.dtype=bfloat16', *one_group, *sizes, *self.overrides])


CASES = (
    Case('llama3_8b', 8, 1, 8, 2048),
    Case('llama3_8b', 8, 2, 4, 8000),
    Case('llama3_8b', 8, 4, 8, 2048),
    Case('llama3_8b', 32, 4, 8, 2048),
    Case('llama3_8b', 8, 8, 8, 2048),
    Case('llama3_8b', 8, 8, 1, 1024),
    Case('llama3_8b', 4, 4, 1, 120000, (LONG,)),
    Case('qwen3_8b', 8, 2, 16, 2048),
    Case('gpt2_124m', 12, 1, 16, 900),
    Case('megatron_8.3b', 6, 8, 16, 900),
    Case('olmo3_7b', 8, 4, 4, 8000),
    Case('gemma3_1b', 26, 1, 4, 8000),
    Case('gemma3_27b', 7, 4, 4, 8000),
    Case('qwen3_30b_a3b', 3, 4, 4, 4096),
    Case('mixtral_8x7b', 3, 4, 4, 4096),
    Case('qwen3_vl_8b', 6, 4, 4, 4096),
)


def compiled_bytes(case: Case) -> int:
    """The bytes per GPU of a prefill's arrays, without weights and the cache."""
    config, rows = case.config, case.batch
    length = padded_length(case.prompt, config.model.max_seq_len)
    of_rows = np.zeros(rows, np.int32)
    prompts = PromptBatch(np.zeros((rows, length), np.int32), of_rows)
    mesh = mesh_of(gpu_devices(GPU, hosts=1, per_host=case.gpus), config.mesh.sizes)
    with jax.set_mesh(mesh):
        engine = Engine(config, GPU)
        params = concrete(jax.eval_shape(lambda: make_params(engine.config)))
        lowered = engine.read.lower(
            concrete(jax.eval_shape(lambda: make_weights(engine.config, params))),
            *(prompts, of_rows, of_rows, np.uint32(0), np.zeros(1, np.int32)),
            num_slots=slots_of_cache(length + TOKENS),
            sampling=Sampling(temperature=0.0),
        )
        compiled = compile_without_gpu(lambda options: lowered.compile(options), {})
    analysis = compiled.memory_analysis()
    return int(analysis.temp_size_in_bytes)


def predicted_bytes(case: Case) -> int:
    """The bytes that the plan adds to weights and cache."""
    planned = plan_generation(
        case.config, gpu=GPU, gpus=case.gpus, prompt=case.prompt, tokens=TOKENS, batch=case.batch
    )
    (line,) = (line for line in planned.lines if line.model == case.gpus)
    return line.prefill


def main() -> None:
    print(
        f'jax {jax.__version__}\n\n| {HEADER} |',
        '|---' * len(HEADER.split('|')),
        sep='\n',
        end='|\n',
    )
    for case in CASES:
        predicted, compiled = predicted_bytes(case), compiled_bytes(case)
        prompts = f'{case.batch} x {case.prompt:,}'
        sizes = f'{predicted / 1e6:,.0f} | {compiled / 1e6:,.0f} | {compiled / predicted:.2f}'
        print(f'| {case.preset} | {case.layers} | {case.gpus} | {prompts} | {sizes} |', flush=True)


if __name__ == '__main__':
    main()
