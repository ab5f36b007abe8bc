"""What overlaps when a folder of pictures is answered: `python benchmarks/answer_folder.py`.

`megajax generate --images` reads a batch of prompts with a compiled function that also encodes the
pictures of the next batch. Compiled for eight H100s (model=8) in bf16, with that batch and without:
the seconds of the matrix products, those that all-reduces take on the wire, the share of them that
products hide, and the number of all-reduces beside which the encoder or the scorers run. No GPU is
needed (`pip install 'megajax[gpu-compile]'`).
"""

import argparse
import os
import re

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'

import jax
import numpy as np

import megajax
from megajax.analysis.inspect.overlap import product_seconds
from megajax.core.config import Config
from megajax.core.hardware.records import hardware
from megajax.core.hardware.targets import WITHOUT_GPU, gpu_devices
from megajax.core.parallel.mesh import concrete, mesh_of
from megajax.core.train.step import init_state
from megajax.runtime.data.synthetic_corpus import row_shape
from megajax.runtime.generate.engine import Engine
from megajax.runtime.generate.image_prompts import PromptImages, stack
from megajax.runtime.generate.prompt_images import PromptBatch
from megajax.runtime.generate.sampling import Sampling
from megajax.runtime.generate.weights import make_weights
from megajax.xla.hlo.collectives import Collective, collectives
from megajax.xla.hlo.products import flops, products
from megajax.xla.hlo.program import Program
from megajax.xla.hlo.schedule import Sent, hidden_seconds, span
from megajax.xla.hlo.text import program_text

TARGET, DEVICES = 'h100', 8
PRESETS = 'qwen3_vl_8b', 'arr_coc_32b'
# of the source of an instruction: what comes before the layers of the decoder
BEFORE_LAYERS = re.compile(r'\b(vision|relevance)\b')
TEXT = 64  # tokens beside those of the picture


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('presets', nargs='*', default=PRESETS)
    parser.add_argument('--rows', type=int, default=8, help='prompts of a batch')
    arguments = parser.parse_args()
    print('| preset | reads | matmuls | all-reduces | hidden | overlapping the encoder |')
    print('|---|---|---|---|---|---|', flush=True)
    for preset in arguments.presets:
        for name, following in ('one batch', False), ('with the next', True):
            found = measure(preset, arguments.rows, following=following)
            print(f'| {preset} | {name} | {found} |', flush=True)


def measure(preset: str, rows: int, *, following: bool) -> str:
    overrides = [f'mesh.model={DEVICES}', 'mesh.data=1', 'train.dtype=bfloat16']
    overrides += ['mesh.sequence_parallel=true', 'optim.shard=none']
    config = megajax.load(preset, overrides)
    mesh = mesh_of(gpu_devices(TARGET, hosts=1, per_host=DEVICES), config.mesh.sizes)
    with jax.set_mesh(mesh):
        program = Program(program_text(compile_read(config, rows, following=following)))
    gpu = hardware(TARGET)
    reduces = [
        one
        for one in collectives(program, dict(mesh.shape))
        if one.times and one.kind == 'all-reduce' and not one.is_scalar
    ]
    seconds = [one.wire_bytes / gpu.inside_host.bandwidth for one in reduces]
    sent = {
        (one.computation, one.instruction): Sent('model', each)
        for one, each in zip(reduces, seconds, strict=True)
    }
    hidden = hidden_seconds(program, sent, lambda product: product_seconds(product, gpu))
    beside = sum(encodes_beside(program, one) for one in reduces)
    in_all = sum(
        times * product_seconds(product, gpu) for product, _, _, times in products(program)
    )
    return (
        f'{1e3 * in_all:.1f} ms | {1e3 * sum(seconds):.1f} ms | '
        f'{sum(hidden.values()) / sum(seconds):.0%} | {beside} of {len(reduces)}'
    )


def compile_read(config: Config, rows: int, *, following: bool) -> jax.stages.Compiled:
    """Compile the function that reads prompts of one picture each."""
    engine = Engine(config, TARGET)
    params = concrete(jax.eval_shape(lambda: init_state(config))).params
    weights = concrete(jax.eval_shape(lambda: make_weights(config, params)))
    batch = prompts(config, rows)
    start = concrete(jax.eval_shape(engine.look, weights, batch)) if following else None
    numbers = np.zeros(rows, np.int32)
    lowered = engine.read.lower(
        weights,
        batch,
        numbers,
        numbers,
        np.uint32(0),
        np.int32(0),
        start,
        batch if following else None,
        num_slots=batch.token_BS.shape[1] + 64,
        sampling=Sampling(temperature=0.0),
    )
    return lowered.compile(WITHOUT_GPU)


def prompts(config: Config, rows: int) -> PromptBatch:
    """Return prompts of the largest picture and some text."""
    shape = row_shape(config)
    vision = config.vision
    assert vision is not None
    count = shape.patches.tokens(shape.patches.grid or (1, vision.max_patches))
    length = -(-(count + TEXT) // 128) * 128
    images = PromptImages(
        np.zeros((1, vision.max_patches, shape.patches.patch_size**2 * 3), np.uint8),
        np.zeros((1, 2), np.int32),
        np.full(length, -1, np.int32),
        np.zeros((length, 3), np.int32) if shape.mrope else np.zeros(length, np.int32),
    )
    beside = stack([images] * rows, rows, length)
    return PromptBatch(np.zeros((rows, length), np.int32), np.full(rows, length), *beside)


def encodes_beside(program: Program, collective: Collective) -> bool:
    """Whether products of the encoder or of relevance run while a collective is under way."""
    computation = program.computations[collective.computation]
    under_way = span(program, computation, computation.by_name[collective.instruction])
    if under_way is None:
        return False
    home, begin, end = under_way
    return any(
        flops(program, home, instruction) and BEFORE_LAYERS.search(instruction.op_name)
        for instruction in home.instructions[begin + 1 : end]
    )


if __name__ == '__main__':
    main()
