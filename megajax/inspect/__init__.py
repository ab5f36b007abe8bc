"""What XLA inserted, beside what Megatron places by hand.

`megajax.inspect(config)` compiles the training step and says what it sends; `megajax.inspect.assert_collectives` holds any function
to its collectives in a test.
"""

import sys
import types
from typing import Any

from megajax.config import Config, ConfigError
from megajax.hardware.gpu import check_target, num_hosts
from megajax.inspect.result import Inspection

__all__ = ['Inspection', 'assert_collectives', 'inspect', 'known_miscompiles']


def inspect(config: Config, *, target: str = 'cpu', hosts: int | None = None, run: bool = False) -> Inspection:
    """Compile the training step of `config` for its mesh of `target` devices and compare it with Megatron's; nothing is allocated.

    `hosts` are as few as the mesh needs with at most 8 devices each, unless given. With `run` the program of a GPU is executed too, on
    simulated CPU devices, and compared with one device. Raises ConfigError for a target or hosts that cannot be.
    """
    if run and target == 'cpu':
        raise ConfigError("run=True executes the program of a GPU: give target='h100', or a100, h200, b200")
    inspection, _ = inspect_with_text(config, target=target, hosts=hosts)
    if not run:
        return inspection
    from megajax.inspect.step_run import run_in_child

    runs = run_in_child(config, target, bisect=False, reduce=False, say=lambda line: None)
    return inspection.model_copy(update={'runs': runs})


def inspect_with_text(config: Config, *, target: str, hosts: int | None) -> tuple[Inspection, str]:
    """As `inspect`, with the compiled HLO."""
    check_target(target)
    hosts = num_hosts(config.mesh.data * config.mesh.model, hosts)
    from megajax.inspect.audit import audit  # here, because it imports jax
    from megajax.inspect.compile import compile_in_child

    compiled = compile_in_child(config, target, hosts)
    return audit(config, compiled, target), compiled.text


def assert_collectives(
    function: Any,
    /,
    *args: Any,
    mesh: Any = None,
    trip_count: int | None = None,
    permutes: dict[str, Any] | None = None,
    **expected: dict[str, int],
) -> None:
    """Raise AssertionError unless the compiled `function(*args)` has these collectives a run and no others.

    `function` is any function, jitted or not, with `args` that are arrays or `jax.ShapeDtypeStruct`s with shardings; or, without any, a
    `jax.stages.Lowered` or `Compiled`. The mesh is that of the arguments, or `mesh`, or the current one. Each keyword is a mesh axis, or
    several joined by `_and_`, with counts of arrays by kind: `model={'all-reduce': 2}`. Single numbers are not counted. Of a branch that
    hangs on data the one that sends most counts each time.

    `trip_count` is how often a loop runs whose length XLA does not know; without it such a loop that sends something is an error.

    A permute that leaves a device without a source hands it zeros, and is an error unless `permutes` declares it: by mesh axis
    'chain' (i to i + 1 without wrapping), 'ring' (complete, in either direction), pairs of positions along the axis, or a list of
    these: `permutes={'stage': [(0, 1), (1, 2)]}`. Permutes along a declared axis have these pairs and no others.
    """
    from megajax.inspect.check import check_collectives

    check_collectives(function, args, expected, mesh=mesh, trip_count=trip_count, permutes=permutes)


def known_miscompiles(program: Any) -> list[str]:
    """A line for each instruction of a compiled program that shows what XLA is known to compile wrongly.

    `program` is a text of compiled HLO or what `jax.jit(f).lower(...).compile()` returns. `docs/miscompiles.md` lists what is known,
    and which findings a right program may show too.
    """
    from megajax.miscompiles import detect

    text = program if isinstance(program, str) else program.as_text()
    return [str(finding) for finding in detect(text)]


class _Inspect(types.ModuleType):
    """The package, which can be called: `megajax.inspect(config)`."""

    def __call__(self, config: Config, *, target: str = 'cpu', hosts: int | None = None, run: bool = False) -> Inspection:
        return inspect(config, target=target, hosts=hosts, run=run)


sys.modules[__name__].__class__ = _Inspect
