"""The files that one training step enters, in order: `python benchmarks/reading_path.py`.

Traces the step of `tiny` with two layers on a mesh 1x2, as a CPU runs it, and prints as Markdown
how many of each file's functions and lines it enters, and the same in total for a GPU's schedule.
"""

import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('JAX_NUM_CPU_DEVICES', '2')

import jax

import megajax
from megajax.core.config import Config
from megajax.core.parallel.mesh import concrete, mesh_for
from megajax.core.train.feed import abstract_batch

PACKAGE = Path(megajax.__file__).parent
TINY = ['mesh.data=1', 'mesh.model=2', 'model.num_layers=2']
STEPS = {
    'a CPU': ['train.overlap=none'],
    'a CPU, ZeRO-3': ['train.overlap=none', 'optim.shard=weights', 'mesh.data=2', 'mesh.model=1'],
    'a GPU': ['train.overlap=batch_split', 'train.unroll=true', 'mesh.sequence_parallel=true'],
}


def main() -> None:
    entered = {name: of_step(megajax.load('tiny', TINY + keys)) for name, keys in STEPS.items()}
    print('| file | functions | lines entered | lines |\n|---|---|---|---|')
    for file, functions in by_file(entered['a CPU']).items():
        print(f'| `{file}` | {len(functions)} | {num_lines(functions)} | {length(file)} |')
    print('\n| step of | files | functions | lines entered |\n|---|---|---|---|')
    for name, functions in entered.items():
        files = len(by_file(functions))
        print(f'| {name} | {files} | {len(functions)} | {num_lines(functions):,} |')


def of_step(config: Config) -> list[CodeType]:
    """The functions of the package that tracing a step enters, in order, each once."""
    found: dict[CodeType, None] = {}

    def look(frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        if event == 'call' and code.co_filename.startswith(f'{PACKAGE}{os.sep}'):
            found.setdefault(code)

    with jax.set_mesh(mesh_for(config)):
        state = concrete(jax.eval_shape(lambda: megajax.init_state(config)))
        traced: Callable[..., Any] = megajax.make_train_step(config).trace
        batch = abstract_batch(config)
        sys.setprofile(look)
        try:
            traced(state, batch)
        finally:
            sys.setprofile(None)
    return list(found)


def by_file(functions: list[CodeType]) -> dict[str, list[CodeType]]:
    """The functions of each file, in the order in which the files are entered."""
    files: dict[str, list[CodeType]] = {}
    for code in functions:
        files.setdefault(str(Path(code.co_filename).relative_to(PACKAGE)), []).append(code)
    return files


def num_lines(functions: list[CodeType]) -> int:
    """The lines of these functions, those of a function inside another one once."""
    return len(
        {
            (code.co_filename, code.co_firstlineno + i)
            for code in functions
            for i in range(len(inspect.getsourcelines(code)[0]))
        }
    )


def length(file: str) -> int:
    return len((PACKAGE / file).read_text().splitlines())


if __name__ == '__main__':
    main()
