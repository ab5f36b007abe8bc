"""The GPU compiler's last module, without the machine code of its kernels.

XLA has no option to stop after its passes. It writes the last module to a folder before it reads
its cache of kernels, so a cache that it cannot read ends the compilation at this point.
"""

import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

# jax has no public way to parse HLO text.
from jax._src.lib import hlo  # type: ignore[attr-defined]

from megajax.xla.hlo.errors import HloError

# jax 0.10's XLA reads the cache only with this option, which jax 0.12's XLA does not have.
_READ_CACHE = 'xla_gpu_enable_llvm_module_compilation_parallelism'
_LAST = '*_gpu_after_optimizations.txt'
_NO_CACHE = b'\xff'  # no serialized protocol buffer begins like this
_ELEMENT = re.compile(r'%[\w.\-]+#\d')


def last_module(compile_with: Callable[[dict[str, Any]], Any], options: Mapping[str, Any]) -> str:
    """Call `compile_with` with compiler options, and return the text of the last module.

    Raises the compiler's error if it fails before the last module.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(options.get('xla_dump_to', name))
        known = {*folder.glob(_LAST)}
        cache = Path(name, 'cache')
        cache.write_bytes(_NO_CACHE)
        own: dict[str, Any] = {
            'xla_dump_to': str(folder),
            'xla_dump_hlo_as_text': True,
            'xla_dump_large_constants': True,
            'xla_gpu_kernel_cache_file': str(cache),
        }
        try:
            compiled = _with_cache(compile_with, {**options, **own})
        except jax.errors.JaxRuntimeError:
            if not (found := {*folder.glob(_LAST)} - known):
                raise
            return dumped(found.pop())
        return full_text(compiled.xla_executable.hlo_modules()[0])


def _with_cache(compile_with: Callable[[dict[str, Any]], Any], options: dict[str, Any]) -> Any:
    try:
        return compile_with({**options, _READ_CACHE: True})
    except jax.errors.JaxRuntimeError as error:
        if _READ_CACHE not in str(error):
            raise
        return compile_with(options)


def full_text(module: hlo.HloModule) -> str:
    """Return the text of a module with all constants."""
    printed = hlo.HloPrintOptions()
    printed.print_large_constants = True
    return module.to_string(printed)


def dumped(path: Path) -> str:
    """Return the text of a module in one of XLA's dumps, with a line for each instruction.

    Raises HloError if XLA cannot read it.
    """
    return _rewritten(path.read_text(), path.name)


def with_elements(text: str) -> str:
    """Return the text of a program with a line for each element of a tuple that it uses.

    Raises HloError if elements are without a line and the installed XLA cannot read the text.
    """
    if not _ELEMENT.search(text):
        return text
    try:
        return _rewritten(text, 'the text')
    except HloError as error:
        raise HloError(f'{error} use the version of jax that wrote the text') from error


def _rewritten(text: str, name: str) -> str:
    try:
        return full_text(hlo.hlo_module_from_text(readable(text)))
    except jax.errors.JaxRuntimeError as error:
        raise HloError(f'XLA cannot read {name}: {str(error).splitlines()[0]}') from error


def readable(text: str) -> str:
    """Return a module's text without control predecessors that it does not define.

    jax 0.12's XLA writes an element of a tuple as `%tuple#1` where it is used, without a line of
    its own, but names it as a control predecessor, and cannot read that. A scheduled module runs in
    the order of its lines with or without control predecessors.
    """
    defined = {*re.findall(r'^\s+(?:ROOT )?(%?[^\s=]+) = ', text, re.MULTILINE)}

    def present(found: re.Match[str]) -> str:
        names = [name for name in found['names'].split(', ') if name in defined]
        return f', control-predecessors={{{", ".join(names)}}}' if names else ''

    return re.sub(r', control-predecessors=\{(?P<names>[^}]*)\}', present, text)
