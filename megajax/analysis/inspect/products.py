"""Compare the matmuls of a compiled step with those that its config requires."""

from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import Any

from megajax.analysis.inspect.result import Finding, Products
from megajax.core.config import Config
from megajax.core.counts import products as counts
from megajax.core.counts.expert_kernels import KERNEL_STEP
from megajax.core.counts.expert_rows import rows_with_unused
from megajax.core.counts.flash import uses_flash
from megajax.core.counts.muon import newton_schulz
from megajax.core.counts.product import Product
from megajax.core.hardware.records import Hardware, hardware
from megajax.core.hardware.targets import GPUS
from megajax.core.parallel.layout import Layout
from megajax.xla.hlo.products import is_rematerialized, products
from megajax.xla.hlo.program import Program

TOLERANCE = 1e-3
# XLA pads each size of a cuBLAS matmul to a multiple of so many elements: in 16 bits, and in FP8.
PADDED, PADDED_FP8 = 8, 16
TILE, MULTIPROCESSORS = 64, 132  # edge of a tile of a matmul's result; count of an H100
LEAST_PART = 24  # fewest elements in each part of a contraction that XLA splits


def count_products(
    config: Config, program: Program, target: str, gpu: Hardware | None = None
) -> Products:
    """Count the FLOPs of a step on one device, in the compiled program and required by the config.

    XLA computes exactly the matmuls that `core/counts/products.py` and `muon.py` list, for every
    family, layout and kind of recomputation. A CPU has no flash attention. `gpu` is the GPU that
    the step runs on, by default the target's.
    """
    flash = target in GPUS and uses_flash(config, (gpu or hardware(target)).compute_capability)
    required = [*counts.products(config, flash=flash), *newton_schulz(config)]
    expected = sum(product.times * product.flops for product in required)
    compiled = rematerialized = 0
    for product, computation, instruction, times in products(program):
        compiled += times * product.flops
        if is_rematerialized(program, computation, instruction):
            rematerialized += times * product.flops
    return Products(compiled=compiled, expected=expected, rematerialized=rematerialized)


def padding(config: Config) -> int:
    """Return the FLOPs that XLA may add on one device by padding 16-bit matmuls for cuBLAS.

    XLA pads sizes to multiples of 8, or of 16 in FP8. It also pads each part of a contraction that
    it splits because the result is too small for all multiprocessors. Such sizes are rare: the
    first tokens of BERT's sequences, the pixels of an image patch, and tiny models.
    """
    if config.train.dtype == 'float32':
        return 0
    is_fp8 = config.train.dtype == 'fp8'

    def padded(product: Product) -> int:
        is_narrow = is_fp8 and product.has_fp8_operands
        return _padded(product.sizes, PADDED_FP8 if is_narrow else PADDED)

    return sum(
        product.times * 2 * product.batch * (padded(product) - prod(product.sizes))
        for product in (
            *counts.products(config, flash=uses_flash(config)),
            *newton_schulz(config),
        )
        if product.where != 'attention'
    )


def of_unused_blocks(config: Config, smallest: int = 0) -> int:
    """Return the FLOPs on one device of the blocks of expert rows that a balanced load skips.

    Without a capacity, a program has blocks for every distribution of the tokens, and a condition
    skips the unused ones. The program's FLOPs include them. `smallest` is the number of rows of a
    block, if the blocks may be larger than the config's.
    """
    experts, layout = config.model.experts, Layout.of(config)
    if experts is None or experts.capacity is not None:
        return 0
    tokens = config.microbatch_rows * config.train.seq_len // config.mesh.context
    tokens //= config.overlap.num_parts  # each part has its own blocks
    rows, used = rows_with_unused(config, tokens, layout.shards), tokens * experts.active
    rows += (experts.count // layout.num_shards('X') + 1) * smallest
    return sum(
        product.times * product.flops * (rows - used) // used
        for product in counts.products(config, flash=False)
        if product.of_experts
    )


def _padded(sizes: tuple[int, int, int], multiple: int) -> int:
    m, n, k = (-(-size // multiple) * multiple for size in sizes)
    if -(-m // TILE) * -(-n // TILE) < MULTIPROCESSORS:
        parts = [count for count in (2, 4, 8, 16) if sizes[2] >= count * LEAST_PART]
        each = (count * multiple for count in (1, *parts))
        k = max(k, *(-(-sizes[2] // size) * size for size in each))
    return m * n * k


def products_run_twice(config: Config, program: Program, products: Products) -> Iterator[Finding]:
    """Yield an error if the compiled step computes more than its config requires.

    Matmuls that XLA repeats to save memory yield a note.
    """
    if products.rematerialized:
        message = (
            f'XLA repeats {products.rematerialized / 1e9:,.1f} GFLOP of matmuls because the step '
            'does not fit in device memory: use more devices or microbatches, or recompute more '
            '(train.recompute)'
        )
        yield Finding(level='note', rule='matmuls rematerialized', message=message)
    wanted = products.compiled - products.rematerialized
    allowed = padding(config) + of_unused_blocks(config, KERNEL_STEP)
    if wanted - allowed <= products.expected * (1 + TOLERANCE):
        return
    more = (wanted - products.expected) / 1e9
    again = _repeated(program)
    which = f'; duplicated: {", ".join(again)}' if again else ''
    message = (
        f'each device computes {more:,.1f} GFLOP of matmuls more than the config requires '
        f'({products.ratio:.3f}x){which}: jax 0.11 clones a matmul whose result is both used and '
        'stored; set XLA_FLAGS=--xla_gpu_enable_dynamic_slice_fusion=false'
    )
    yield Finding(level='error', rule='matmuls run twice', message=message)


def _repeated(program: Program, limit: int = 3) -> list[str]:
    """Return the largest matmuls that have the same path and the same arrays as another matmul."""
    seen = set[tuple[Any, ...]]()
    again = Counter[str]()
    for product, computation, instruction, times in products(program):
        arrays = [computation.by_name[name].results[0] for name in instruction.operands]
        key = instruction.op_name, tuple(arrays), instruction.results[0]
        if key in seen and instruction.op_name:
            source = ' < '.join(program.source(instruction).split(' < ')[:2])
            again[f'{instruction.op_name} ({source})'] += times * product.flops
        seen.add(key)
    return [f'{place}, {flops / 1e9:,.1f} GFLOP' for place, flops in again.most_common(limit)]
