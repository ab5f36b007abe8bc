"""`python -m megajax.xla.reduce DUMPS FOLDER`: reduce a program that XLA miscompiles for a GPU.

DUMPS is a folder that XLA wrote with the options of `megajax.xla.emulate.bisect.dump_options`.
"""

import argparse
import json
from pathlib import Path

import jax

from megajax.core.config import ConfigError
from megajax.core.hardware.records import record_name
from megajax.core.hardware.targets import GPUS, check_target
from megajax.xla.emulate.bisect import modules
from megajax.xla.emulate.last_module import dumped
from megajax.xla.hlo.program import Program
from megajax.xla.reduce.execute import Compiler
from megajax.xla.reduce.folder import reduce_dumps


def main() -> None:
    """Reduce the program, and print the number of instructions that are left."""
    parser = argparse.ArgumentParser(prog='python -m megajax.xla.reduce')
    parser.add_argument('dumps', type=Path, help='folder with the module after each pass')
    parser.add_argument('folder', type=Path, help='folder to write')
    parser.add_argument('--target', default='h100', type=record_name, help='GPU to compile for')
    parser.add_argument(
        '--options', type=json.loads, default={}, help='compiler options that were used, as JSON'
    )
    given = parser.parse_args()
    try:
        if given.target not in GPUS:
            parser.error(f'target {given.target}: choose among {", ".join(GPUS)}')
        given.folder.mkdir(parents=True, exist_ok=True)
        num_devices = Program(dumped(modules(given.dumps)[0])).num_devices
        check_target(given.target)
    except OSError as error:
        parser.error(f'{error.filename}: {error.strerror}')
    except (ValueError, ConfigError) as error:
        parser.error(str(error))
    jax.config.update('jax_num_cpu_devices', num_devices)
    compiler = Compiler(given.target, num_devices, given.options)
    summary = reduce_dumps(
        given.dumps, given.folder, compiler, say=lambda line: print(line, flush=True)
    )
    print(f'{summary["instructions"]} instructions' if summary else 'no part is faulty')


if __name__ == '__main__':
    main()
