"""The record that each of the long proofs leaves, with date, machine and versions."""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PACKAGES = ('jax', 'jaxlib', 'flax', 'orbax-checkpoint', 'numpy')


def circumstances(command: Sequence[str]) -> dict[str, Any]:
    """The command, and when, on what machine and with which versions it runs."""
    cpuinfo = Path('/proc/cpuinfo').read_text()
    processor = re.search(r'model name\s*: (.*)', cpuinfo)
    commit = subprocess.run(
        ['git', 'rev-parse', '--short', 'HEAD'],
        cwd=Path(__file__).parent,
        check=False,
        capture_output=True,
        text=True,
    )
    return {
        'command': ' '.join(command),
        'date': datetime.date.today().isoformat(),
        'commit': commit.stdout.strip(),
        'machine': f'{os.cpu_count()} cores of {processor[1] if processor else "an unknown CPU"}',
        'versions': {'python': platform.python_version()}
        | {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def write_record(path: Path, about: Mapping[str, Any], **results: Any) -> None:
    """Write JSON: one line for each key, and one for each entry of a list."""
    lines = []
    for key, value in {**about, **results}.items():
        if isinstance(value, list) and value:
            entries = ',\n'.join(f'  {json.dumps(entry)}' for entry in value)
            lines.append(f' {json.dumps(key)}: [\n{entries}\n ]')
        else:
            lines.append(f' {json.dumps(key)}: {json.dumps(value)}')
    path.write_text('{\n' + ',\n'.join(lines) + '\n}\n')
