"""Cache whether compilers have each bug: one small file per repro and compiler."""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
from pathlib import Path
from typing import Any

import jax

from megajax.base.files.json_file import parse_json
from megajax.base.files.outputs import replace_file
from megajax.base.source import source_digest
from megajax.core.hardware.cpu_flags import LIMIT
from megajax.core.hardware.records import hardware
from megajax.xla.miscompiles.entry import Miscompile

# XLA flags that do not change the compiled program.
_IRRELEVANT = (
    '--xla_dump',
    LIMIT,
    '--xla_force_host_platform_device_count',
    '--xla_gpu_cuda_data_dir',
    '--xla_gpu_kernel_cache_file',
    '--xla_gpu_enable_llvm_module_compilation_parallelism',
)
# Options of jax that change a program, with jax's defaults; not every jax has each of them.
_OPTIONS: dict[str, Any] = {
    'jax_accurate_erf_inv': False,
    'jax_auto_pcast': True,
    'jax_compiler_enable_remat_pass': True,
    'jax_custom_jvp3': False,
    'jax_custom_vjp3': False,
    'jax_default_matmul_precision': None,
    'jax_default_prng_impl': 'threefry2x32',
    'jax_enable_pgle': False,
    'jax_enable_x64': False,
    'jax_exec_time_optimization_effort': 0.0,
    'jax_memory_fitting_effort': 0.0,
    'jax_memory_fitting_level': 'O2',
    'jax_optimization_level': 'UNKNOWN',
    'jax_ragged_dot_use_gpu_pallas_triton_lowering': False,
    'jax_ragged_dot_use_ragged_dot_instruction': True,
    'jax_remat3': False,
    'jax_remat_barrier_no_cotangents': False,
    'jax_remove_size_one_mesh_axis_from_type': False,
    'jax_scan3': False,
    'jax_softmax_custom_jvp': False,
    'jax_threefry_gpu_kernel_lowering': False,
    'jax_threefry_partitionable': True,
    'jax_use_direct_linearize': True,
    'jax_use_hlo_logistic_lowering': None,
    'jax_use_shardy_partitioner': True,
    'jax_use_simplified_jaxpr_constants': False,
    'jax_xla_profile_version': 0,
}
_FIELDS = {'is_faulty', 'workaround', 'why'}
Identity = dict[str, Any]


def identity(entry: Miscompile, target: str) -> Identity:
    """Return what an answer depends on: the compiler, and the source that asks it."""
    return {
        'entry': entry.name,
        'source': source_digest('xla/hlo', 'xla/miscompiles'),
        **compiler(target if entry.platform == 'gpu' else 'cpu'),
    }


def compiler(target: str, *, with_times: bool = True) -> Identity:
    """Return what a compiled program depends on: the compiler for a target, and its settings.

    Without `with_times`, it is the same where the same libraries were installed at different times.
    """
    flags = os.environ.get('XLA_FLAGS', '').split()
    on_gpu = target != 'cpu'
    options = _changed_options()
    return {
        'jax': importlib.metadata.version('jax'),
        'jaxlib': importlib.metadata.version('jaxlib'),
        'compiler': _plugins(with_times) if on_gpu else [platform.machine(), str(os.cpu_count())],
        'target': repr(hardware(target).compiler) if on_gpu else 'cpu',
        'is_optimized': not jax.config.read('jax_disable_most_optimizations'),
        'XLA_FLAGS': sorted(flag for flag in flags if not flag.startswith(_IRRELEVANT)),
        **({'options': options} if options else {}),  # stored fuzz cases have no empty ones
    }


def _changed_options() -> dict[str, str]:
    """Return the options of jax that change a program and do not have their default values."""
    values = jax.config.values
    return {
        name: str(values[name])
        for name, default in _OPTIONS.items()
        if name in values and values[name] != default
    }


def read(wanted: Identity) -> dict[str, Any] | None:
    """Return the stored answer; None if there is none or its file is broken."""
    try:
        kept = parse_json(_file(wanted).read_bytes())
        answer = kept['answer'] if kept['identity'] == wanted else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return answer if isinstance(answer, dict) and answer.keys() == _FIELDS else None


def write(wanted: Identity, answer: dict[str, Any]) -> None:
    """Store an answer. If the directory is not writable, the next process probes again."""
    text = json.dumps({'identity': wanted, 'answer': answer}, indent=1)
    try:
        replace_file(_file(wanted), text.encode())
    except OSError:
        return


def folder() -> Path:
    """Return the directory of the answers, under $XDG_CACHE_HOME or ~/.cache."""
    cache = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
    return Path(cache) / 'megajax' / 'miscompiles'


def digest(identity: Identity) -> str:
    """Return a short text that differs for different identities."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


def _file(wanted: Identity) -> Path:
    return folder() / f'{digest(wanted)}.json'


def _plugins(with_times: bool) -> list[str]:
    """Return every jax plugin with its version and its libraries, which may be built by hand."""
    plugins = importlib.metadata.entry_points(group='jax_plugins')
    stamps = {f'{plugin.dist.name} {plugin.dist.version}' for plugin in plugins if plugin.dist}
    for plugin in plugins:
        spec = importlib.util.find_spec(plugin.module)
        for place in spec.submodule_search_locations or () if spec else ():
            stamps |= {_stamp(library, with_times) for library in Path(place).glob('*.so')}
    return sorted(stamps)


def _stamp(library: Path, with_times: bool) -> str:
    status = library.stat()
    times = f' {status.st_mtime_ns}' if with_times else ''
    return f'{library.name} {status.st_size}{times}'
