"""How the GPUs of a host are linked, according to `nvidia-smi topo -m`.

`NV#` is a number of NVLinks between two GPUs; every other word is a path over PCIe, from PIX (one
switch) to SYS (between the sockets of the host). Imports no jax.
"""

import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

COMMAND = ['nvidia-smi', 'topo', '-m']
TIMEOUT = 30.0  # seconds; a driver that hangs would never answer
_UNDERLINED = re.compile(r'\x1b\[[0-9;]*m')


@dataclass(frozen=True)
class Topology:
    """The links between the GPUs of a host: `links[a][b]` is the word that nvidia-smi prints."""

    links: tuple[tuple[str, ...], ...]

    def has_nvlink(self, a: int, b: int) -> bool:
        """Whether two GPUs are linked by NVLink; true for a GPU with itself."""
        return a == b or self.links[a][b].startswith('NV')

    @property
    def nvlink_groups(self) -> list[list[int]]:
        """Return the GPUs in groups, in order; all GPUs of a group have NVLinks to each other.

        NCCL's rings inside such a group do not use PCIe.
        """
        groups: list[list[int]] = []
        for gpu in range(len(self.links)):
            joined = next((g for g in groups if all(self.has_nvlink(gpu, x) for x in g)), None)
            if joined is None:
                groups.append([gpu])
            else:
                joined.append(gpu)
        return groups

    def words(self, between: Iterable[tuple[int, int]]) -> str:
        """Return the words of these links, each word once, in alphabetical order."""
        return ', '.join(sorted({self.links[a][b] for a, b in between}))

    def over_pcie(self, gpus: Sequence[int]) -> list[tuple[int, int]]:
        """Return the pairs among `gpus` without NVLink; unlisted GPUs count as having none."""
        known = [gpu for gpu in gpus if gpu < len(self.links)]
        return [(a, b) for a in known for b in known if a < b and not self.has_nvlink(a, b)]


def read_topology(text: str) -> Topology | None:
    """Return the links in the output of `nvidia-smi topo -m`, or None if it lists no GPUs."""
    lines = [_UNDERLINED.sub('', line).split() for line in text.splitlines()]
    rows = [words for words in lines if words and re.fullmatch(r'GPU\d+', words[0])]
    header = next(iter(rows), [])
    count = sum(bool(re.fullmatch(r'GPU\d+', word)) for word in header)
    links = tuple(tuple(words[1 : 1 + count]) for words in rows[1 : 1 + count])
    if not count or len(links) != count or any(len(row) != count for row in links):
        return None
    return Topology(links)


def topology_of_host() -> Topology | None:
    """Return the links of this host's GPUs; None if nvidia-smi does not report them."""
    try:
        done = subprocess.run(
            COMMAND, capture_output=True, text=True, timeout=TIMEOUT, check=False, errors='replace'
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return read_topology(done.stdout)
