"""The names of modules before the package had groups, such as `megajax.train.step`."""

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
RENAMED = {'megajax.analysis.compare.compared': 'megajax.analysis.compare.api'}
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
