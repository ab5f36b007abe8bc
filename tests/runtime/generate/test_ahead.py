"""The images of the next prompts are encoded while the all-reduces of these are under way."""

import jax
import numpy as np
import pytest
from support import slow
from vlm import vlm

from megajax.core.config import Config
from megajax.core.hardware.targets import WITHOUT_GPU, gpu_devices, has_compiler
from megajax.core.parallel.mesh import concrete, mesh_of
from megajax.core.train.step import init_state
from megajax.runtime.generate.engine import Engine
from megajax.runtime.generate.image_prompts import PromptImages, stack
from megajax.runtime.generate.prompt_images import PromptBatch
from megajax.runtime.generate.sampling import Sampling
from megajax.runtime.generate.weights import make_weights
from megajax.xla.hlo.collectives import collectives
from megajax.xla.hlo.products import flops
from megajax.xla.hlo.program import Program
from megajax.xla.hlo.schedule import span
from megajax.xla.hlo.text import program_text

ROWS, LENGTH = 4, 16


def batch(config: Config) -> PromptBatch:
    vision = config.vision
    images = PromptImages(
        np.zeros((vision.images, vision.max_patches, vision.patch_size**2 * 3), np.uint8),
        np.zeros((vision.images, 2), np.int32),
        np.full(LENGTH, -1, np.int32),
        np.zeros((LENGTH, 3), np.int32),
    )
    beside = stack([images] * ROWS, ROWS, LENGTH)
    return PromptBatch(np.zeros((ROWS, LENGTH), np.int32), np.full(ROWS, LENGTH), *beside)


def all_reduces_beside_the_encoder(config: Config, *, following: bool) -> int:
    """How many all-reduces of H100s run while products of the encoder do."""
    mesh = mesh_of(gpu_devices('h100', hosts=1, per_host=4), config.mesh.sizes)
    numbers = np.zeros(ROWS, np.int32)
    with jax.set_mesh(mesh):
        engine, prompts = Engine(config, 'h100'), batch(config)
        params = concrete(jax.eval_shape(lambda: init_state(config))).params
        weights = concrete(jax.eval_shape(lambda: make_weights(config, params)))
        ahead = (concrete(jax.eval_shape(engine.look, weights, prompts)), prompts)
        compiled = engine.read.lower(
            weights, prompts, numbers, numbers, np.uint32(0), np.zeros(1, np.int32),
            *(ahead if following else ()), num_slots=64, sampling=Sampling(temperature=0.0),
        ).compile(WITHOUT_GPU)  # fmt: skip
        program = Program(program_text(compiled))
    return sum(
        any('vision' in other.op_name and flops(program, home, other) for other in between)
        for home, between in under_way(program, dict(mesh.shape))
    )


def under_way(program: Program, mesh: dict[str, int]):
    """The instructions between the start and the end of each all-reduce."""
    for one in collectives(program, mesh):
        home = program.computations[one.computation]
        found = span(program, home, home.by_name[one.instruction])
        if one.kind == 'all-reduce' and found is not None:
            yield found.home, found.home.instructions[found.begin + 1 : found.end]


@slow
@pytest.mark.skipif(
    not has_compiler(), reason="needs XLA's GPU compiler: pip install 'megajax[gpu-compile]'"
)
def test_the_encoder_of_the_next_prompts_runs_beside_all_reduces_and_that_of_these_does_not() -> (
    None
):
    # XLA's Triton cannot tile every product of smaller heads.
    sizes = {'head_dim': 64, 'hidden_size': 256, 'mrope_section': (16, 8, 8)}
    config = vlm(
        1, 4, model=sizes, vision={'hidden_size': 256, 'ffn_size': 512}, train={'dtype': 'bfloat16'}
    )
    assert all_reduces_beside_the_encoder(config, following=True) >= 2
    assert all_reduces_beside_the_encoder(config, following=False) == 0
