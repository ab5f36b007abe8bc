"""Import modules by the names of earlier versions, such as `megajax.train.step`."""

import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

GROUPS = {
    'analysis': ('compare', 'inspect', 'plan', 'profile', 'report'),
    'base': ('files', 'render'),
    'core': ('config', 'counts', 'hardware', 'model', 'parallel', 'train'),
    'runtime': ('checkpoint', 'data', 'evaluate', 'generate', 'processes', 'run'),
    'xla': ('emulate', 'hlo', 'miscompiles'),
}
_GROUP_OF = {room: group for group, rooms in GROUPS.items() for room in rooms}
# Modules that were renamed, by package.
_FILES = """
analysis.compare:compared=api,order=site_names,sides=sources
analysis.inspect:culprit=step_run,kept_weights=zero3_lint,limits=tolerances
analysis.inspect:moves=pipeline_lint,reduce=minimize
analysis.plan:faults=goodput,held=live_memory,one_key=memory_fix
analysis.plan:verdicts_on_depth=verdicts,words=describe
analysis.report:facts=run_facts,learned=learning,thin=downsample,wrong=problems
core.config:combinations=conflicts
core.counts:passes=runs
core.model:at_rest=zero_sharding,gradient_slot=fp32_gradients
core.parallel:rotated=rotated_mesh,stages=pipeline_ops
runtime.checkpoint:companions=hf_files,quiet=log_filters
runtime.data:counted=loss_check,drawn=synthetic_corpus,picture_batches=synthetic_batches
runtime.data:picture_sheet=ocr_sheet,pictures=synthetic_images
runtime.data.text:rows=embedding_rows,spelled=spelled_tokens
runtime.generate:seen=prompt_images
runtime.processes:agree=consensus,greetings=handshake
runtime.run:kept_step=saved_step,limits=watchdog_limits,links=nvlink_check,named=infer_config
runtime.run:reader=ocr_eval,standing=status
xla.hlo:cpu_readings=cpu_collectives,makers=producers,paths=op_paths,runs=execution_counts
xla.hlo:stored=loop_residuals
xla.miscompiles:double_product=double_matmul,lost_places=lost_indices
"""
RENAMED = {
    f'megajax.{package}.{old}': f'megajax.{package}.{new}'
    for package, names in (line.split(':') for line in _FILES.split('\n') if line)
    for old, new in (name.split('=') for name in names.split(','))
}
# Names of the package, for good.
PUBLIC = 'megajax.compare', 'megajax.inspect', 'megajax.plan', 'megajax.train'


class OldNames(MetaPathFinder, Loader):
    """Imports an old name as the module that it names today, with a DeprecationWarning."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of an old name, and None for any other."""
        package, _, rest = fullname.partition('.')
        is_old = rest.partition('.')[0] in _GROUP_OF or fullname in RENAMED
        if package != 'megajax' or not is_old:
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module of today."""
        new = today(spec.name)
        if spec.name not in PUBLIC:
            message = f'{spec.name} has moved to {new}'
            warnings.warn(message, DeprecationWarning, stacklevel=2)
        module = import_module(new)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back, which the import has replaced."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def today(name: str) -> str:
    """Return the name that a module with an old name has today."""
    package, _, rest = name.partition('.')
    group = _GROUP_OF.get(rest.partition('.')[0])
    new = f'{package}.{group}.{rest}' if group else name
    return RENAMED.get(new, new)
