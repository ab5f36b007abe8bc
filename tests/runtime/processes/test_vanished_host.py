"""A host that vanishes from the network, between two network namespaces of this machine."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

NETWORK = ['unshare', '--map-root-user', '--net']  # runs a command in a network of its own
LINK = 'ip link add near type veth peer name far'


def has_networks() -> bool:
    if not (shutil.which('unshare') and shutil.which('ip')):
        return False
    done = subprocess.run([*NETWORK, *LINK.split()], capture_output=True, check=False)
    return done.returncode == 0


pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not has_networks(), reason='needs iproute2 and network namespaces'),
]

FAR = """
import socket, subprocess, sys
from megajax.runtime.processes.peers import Connection, Peers

print('here', flush=True)
sys.stdin.readline()
subprocess.run('ip addr add 10.9.9.2/24 dev far; ip link set far up', shell=True, check=True)
with socket.create_server(('10.9.9.2', 5000)) as server:
    print('listens', flush=True)
    Peers(1, [Connection(server.accept()[0], 'process 0 on near')]).watch()
    sys.stdin.readline()
    subprocess.run('ip addr flush dev far', shell=True, check=True)
    print('gone', flush=True)
    sys.stdin.read()
"""

NEAR = f"""
import socket, subprocess, sys, time
from megajax.runtime.processes.peers import Connection, Peers

far = subprocess.Popen(
    ['unshare', '--net', sys.executable, 'far.py'],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
)
assert far.stdout.readline() == 'here\\n'
link = f'{LINK}; ip link set far netns {{far.pid}}; ip link set near up; '
subprocess.run(link + 'ip addr add 10.9.9.1/24 dev near', shell=True, check=True)
far.stdin.write('go on\\n')
far.stdin.flush()
assert far.stdout.readline() == 'listens\\n'
link = Connection(socket.create_connection(('10.9.9.2', 5000)), 'process 1 on far')
Peers(0, [link]).watch()
time.sleep(3)  # a sign of life is answered
far.stdin.write('vanish\\n')
far.stdin.flush()
assert far.stdout.readline() == 'gone\\n'
print('gone', flush=True)
time.sleep(60)
"""


def test_a_host_that_vanishes_is_noticed_within_seconds(tmp_path: Path) -> None:
    (tmp_path / 'far.py').write_text(FAR)
    command = [*NETWORK, sys.executable, '-c', NEAR]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as near:
        assert near.stdout is not None
        assert near.stdout.readline() == 'gone\n'
        gone = time.monotonic()
        try:
            _, said = near.communicate(timeout=20)
        finally:
            near.kill()
    assert time.monotonic() - gone < 10
    assert (near.returncode, said.startswith('error: process 1 on far was lost')) == (75, True)
