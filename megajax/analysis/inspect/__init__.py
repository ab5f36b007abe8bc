"""Compare the collectives that XLA inserted with those that Megatron-LM issues.

`megajax.inspect(config)` compiles the training step and lists its collectives.
`megajax.inspect(function, *args)` lists the collectives of any function.
`megajax.inspect.assert_collectives` checks the collectives of any function in a test.
`megajax.inspect.run` executes the GPU program of any function and checks its results.
`megajax.inspect.known_miscompiles` and `gathered_experts` read any compiled program.
"""

import functools
import importlib
import sys
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, overload

from megajax.analysis.inspect.child import compile_in_child
from megajax.analysis.inspect.result import Inspection
from megajax.core.config import Config, ConfigError
from megajax.core.config.overlap_rules import in_a_loop, resolved
from megajax.core.hardware.targets import GPUS, hosts_of

if TYPE_CHECKING:
    from megajax.analysis.inspect.function import FunctionInspection
    from megajax.xla.emulate.arguments import AnyMesh
    from megajax.xla.emulate.result import GpuRun

__all__ = [
    'Inspection',
    'assert_collectives',
    'gathered_experts',
    'inspect',
    'known_miscompiles',
    'run',
]


def inspect(
    config: Config,
    *,
    target: str = 'cpu',
    hosts: int | None = None,
    run: bool = False,
    scan: bool = False,
) -> Inspection:
    """Compile the training step of `config` for its mesh and compare its collectives to Megatron's.

    The mesh has `target` devices; nothing is allocated. `hosts` defaults to the fewest hosts that
    the mesh needs, with at most 8 devices each. With `run`, the GPU program is also executed on
    simulated CPU devices and compared with one device. With `scan`, the layers are in a loop even
    if a run would compile each layer separately; a loop compiles faster. A target can be a TPU
    (`docs/inspect.md`). Raises ConfigError for an impossible target or number of hosts, and for
    settings that the target does not support.
    """
    if run and target not in GPUS:
        raise ConfigError(
            "run=True executes the program for a GPU: give target='h100', or a100, h200, b200"
        )
    inspection, _ = inspect_with_text(config, target=target, hosts=hosts, scan=scan)
    if not run:
        return inspection
    from megajax.analysis.inspect.step_run import run_in_child

    runs = run_in_child(config, target, bisect=False, minimize=False, say=lambda line: None)
    return inspection.model_copy(update={'runs': runs})


def inspect_with_text(
    config: Config, *, target: str, hosts: int | None, scan: bool = False
) -> tuple[Inspection, str]:
    """Do the same as `inspect`, and also return the compiled HLO."""
    hosts = hosts_of(config, target, hosts)
    on_gpu = target in GPUS
    config = resolved(config, on_gpu=on_gpu)
    is_quick = scan and config.train.unroll is True
    if is_quick:
        config = in_a_loop(config, on_gpu=on_gpu)
    compiled = compile_in_child(config, target, hosts, meanwhile=_import_audit)
    from megajax.analysis.inspect.audit import audit  # not at the top, because it imports jax

    inspection = audit(config, compiled, target)
    return inspection.model_copy(update={'scan': is_quick}), compiled.text


def _import_audit() -> None:
    importlib.import_module('megajax.analysis.inspect.audit')


def assert_collectives(
    function: Any,
    /,
    *args: Any,
    mesh: Any = None,
    trip_count: int | None = None,
    permutes: dict[str, Any] | None = None,
    **expected: dict[str, int],
) -> None:
    """Raise AssertionError unless the compiled `function(*args)` has exactly these collectives.

    `function` is any function, jitted or not, with `args` that are arrays or
    `jax.ShapeDtypeStruct`s with shardings; or, without `args`, a `jax.stages.Lowered` or
    `Compiled`. The mesh is `mesh`, or the mesh of the arguments, or the current mesh. Each keyword
    is a mesh axis, or several joined by `_and_`, with counts of arrays per run by kind:
    `model={'all-reduce': 2}`. Scalars are not counted; an array with one element on each device is
    none. If the data decides which branch runs, the branch that sends the most is counted each
    time.

    `trip_count` is the number of steps of loops whose length XLA does not know; without it, such a
    loop is an error if it communicates.

    A permute that leaves a device without a source fills it with zeros, and is an error unless
    `permutes` declares it. By mesh axis, `permutes` has 'chain' (i to i + 1 without wrapping),
    'ring' (complete, in either direction), pairs of positions along the axis, or a list of these:
    `permutes={'stage': [(0, 1), (1, 2)]}`. Permutes along a declared axis must have these pairs and
    no others.
    """
    from megajax.analysis.inspect.check import check_collectives

    check_collectives(function, args, expected, mesh=mesh, trip_count=trip_count, permutes=permutes)


def known_miscompiles(program: Any) -> list[str]:
    """Return a line for each instruction of a compiled program that matches a known XLA miscompile.

    `program` is compiled HLO text or the result of `jax.jit(f).lower(...).compile()`.
    `docs/miscompiles.md` lists the known miscompiles. A match that a correct program can have as
    well is left out if the installed compiler does not have the bug. If that is unknown, the line
    says so. The compiler is asked for the GPU of the compiled program, or for an H100 if `program`
    is a text or for CPUs. Some bugs show only in a table with an entry for each device, which
    `as_text()` abbreviates as `{...}` from 11 devices on: give the compiled program, or a text
    printed with `print_large_constants`.
    """
    from megajax.xla.emulate.arguments import of_jax
    from megajax.xla.miscompiles.guard import compiled_target

    target = 'cpu' if isinstance(program, str) else compiled_target(of_jax(program))
    return _known_miscompiles(_text(program), target)


def _known_miscompiles(text: str, target: str) -> list[str]:
    from megajax.xla.miscompiles import confirmed, detect

    return [str(finding) for finding in confirmed(detect(text), target)]


def gathered_experts(program: Any) -> list[str]:
    """Return a line for each all-gather of experts' weights that moves more bytes than the tokens.

    `program` is compiled HLO text or the result of `jax.jit(f).lower(...).compile()`, of any
    project. A line names the all-gather, the matmul and its source line. Weights are found if a
    batched matmul, or a grouped matmul kernel in Mosaic GPU, reads the weights of all experts, if
    they are gathered along the dim of the experts, and if they have more than twice the bytes of
    the rows that they multiply: an all-to-all sends each row there and back.
    """
    from megajax.analysis.inspect.expert_gathers import expert_gathers
    from megajax.xla.hlo.program import Program

    return expert_gathers(Program(_text(program)))


def _text(program: Any) -> str:
    from megajax.xla.emulate.arguments import of_jax
    from megajax.xla.emulate.last_module import with_elements
    from megajax.xla.hlo.text import program_text

    return with_elements(program) if isinstance(program, str) else program_text(of_jax(program))


def run(
    function: Any,
    /,
    *args: Any,
    target: str = 'h100',
    mesh: 'AnyMesh | None' = None,
    reference: Callable[..., Any] | None = None,
    exact: bool = False,
    limit: float | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    bisect: bool = False,
    seed: int = 0,
) -> 'GpuRun':
    """Compile `function(*args)` with XLA's GPU compiler, execute the program and check its outputs.

    No GPU is needed: the program runs on simulated CPU devices, as many as the mesh has (see
    `docs/verify.md`). The mesh is the mesh of the arguments, or else `mesh`, or the
    mesh of `jax.set_mesh`; an AbstractMesh will do.

    Args:
        function: a result of `jax.jit`, or a plain function, which is jitted.
        args: arrays, or `jax.ShapeDtypeStruct`s with shardings, whose floating-point numbers are
            drawn from a normal distribution by `seed`.
        target: the GPU to compile for.
        mesh: the mesh to use if the arguments have none.
        reference: a correct function of the same arguments, run on one device. The default is
            `function` itself on one device, or, if it has a `jax.shard_map`, on the mesh.
        exact: compute in fp32 wherever either program uses 8- or 16-bit types.
        limit: the largest error that passes; the default is 1e-5, or 3e-2 with 16-bit types, 0.4
            with FP8, or 2e-5 with `exact`.
        compiler_options: XLA's options for the GPU program.
        bisect: if an output is wrong, find the compiler pass after which it is wrong.
        seed: the seed of the random arguments.

    Raises ConfigError if XLA's GPU compiler is missing, HloError if an instruction of the program
    has no translation, and ValueError or TypeError for arguments that cannot be run.
    """
    from megajax.xla.emulate.jitted import run as run_jitted

    return run_jitted(
        function,
        args,
        target=target,
        mesh=mesh,
        reference=reference,
        exact=exact,
        limit=limit,
        compiler_options=compiler_options,
        bisect=bisect,
        seed=seed,
        detect=functools.partial(_known_miscompiles, target=target),
    )


class Inspect(types.ModuleType):
    """The type of this package, which makes it callable: `megajax.inspect(config)`."""

    assert_collectives = staticmethod(assert_collectives)
    gathered_experts = staticmethod(gathered_experts)
    known_miscompiles = staticmethod(known_miscompiles)
    run = staticmethod(run)

    @overload
    def __call__(
        self,
        subject: Config,
        /,
        *,
        target: str = 'cpu',
        hosts: int | None = None,
        run: bool = False,
        scan: bool = False,
    ) -> Inspection: ...

    @overload
    def __call__(
        self,
        subject: Any,
        /,
        *args: Any,
        mesh: 'AnyMesh | None' = None,
        target: str = 'cpu',
        trip_count: int | None = None,
    ) -> 'FunctionInspection': ...

    def __call__(self, subject: Any, /, *args: Any, **options: Any) -> Any:
        """Inspect the training step of a config (`inspect`), or any function."""
        if isinstance(subject, Config):
            return inspect(subject, *args, **options)
        from megajax.analysis.inspect.function import inspect_function

        return inspect_function(subject, args, **options)


sys.modules[__name__].__class__ = Inspect
