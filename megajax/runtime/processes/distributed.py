"""Join many processes into one jax: each process sees all devices. If one ends early, all end."""

import atexit
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax._src.xla_bridge import backends_are_initialized  # jax has no public way to ask

from megajax.core.config import ConfigError, RunError, StopRequested
from megajax.runtime.processes.certificates import JAX_OPTION, check_certificates
from megajax.runtime.processes.environment import LOCAL_DEVICES, Start, check_host_name, read_start
from megajax.runtime.processes.peers import RETRY, Peers, end
from megajax.runtime.processes.rendezvous import gather

# Seconds until a process that is alive but frozen counts as lost; only jax's heartbeats detect such
# a process.
HEARTBEAT_TIMEOUT = 30
# Environment variables for proxies, as gRPC reads them.
PROXIES = 'grpc_proxy', 'https_proxy', 'http_proxy'
NO_PROXIES = 'no_grpc_proxy', 'no_proxy'
# The errors by which jax, Gloo and NCCL report that processes did not reach each other in time.
# Errors that would recur after a restart (an invalid NCCL argument, a CUDA error, too little
# memory) do not match.
UNREACHED = re.compile(
    r'(DEADLINE_EXCEEDED|UNAVAILABLE): |[A-Z_]+: .*?(Gloo [\w -]+ failed: '
    r'|NCCL operation .* failed: '
    r'(unhandled system error|remote process exited|NCCL operation in progress))',
    re.DOTALL,
)
LAST_WORDS = 3  # seconds that the exit handlers get, because they may be waiting for a lost process


@contextmanager
def processes(start: Start | None = None) -> Iterator[None]:
    """Join the processes that the environment names into one jax while the block runs.

    `start` describes this process if its environment has been read already. If the environment
    names no processes, the block runs in this process alone. If a process leaves the block with an
    exception, the others exit too: with its code if that is from 2 to 5, otherwise with 75. If
    `launch` started them, they exit with 82 to 85 instead of 2 to 5. `SystemExit(75)` and
    `StopRequested` must be raised by all processes. Processes that did not reach each other in time
    also exit with code 75. Raises ConfigError as `initialize` does.
    """
    peers = initialize(start)
    try:
        yield
    except BaseException as error:
        if peers:
            _end_if_unreached(peers, error)
        code = _exit_code(error)
        # all processes stop here, as they do after a checkpoint on SIGTERM
        if peers and code in (0, RETRY) and isinstance(error, SystemExit | StopRequested):
            peers.done()
        elif peers:
            own = isinstance(error, RunError | KeyboardInterrupt | SystemExit)
            peers.failed(_one_line(error), own=own, code=code)
            _exit_without_waiting(peers, code)
        raise
    if peers:
        peers.done()


def initialize(start: Start | None = None) -> Peers | None:
    """Start `jax.distributed` if the environment names other processes.

    Call it before the first use of jax's devices. The process exits with code 75 if the other
    processes do not all connect in time, or if one is lost later. Raises ConfigError if the
    environment is invalid or jax is already in use.
    """
    # The platforms may have been set in jax.config rather than in the environment.
    platforms: str = jax.config.jax_platforms or ''  # type: ignore[attr-defined]
    environ = {**os.environ, 'JAX_PLATFORMS': platforms}
    start = start or read_start(environ)
    if start is None or jax.distributed.is_initialized():
        return None
    if backends_are_initialized():
        raise ConfigError(
            f'jax is already in use, so this process cannot join the run of {start.count} '
            "processes: join it (megajax.train) before the first use of jax's devices"
        )
    check_host_name()
    check_certificates(
        os.environ, jax=jax.__version__, has_mutual_tls=hasattr(jax.config, JAX_OPTION)
    )
    peers, port = gather(start, environ)
    _avoid_proxies(start)
    jax.config.update('jax_cpu_collectives_implementation', 'gloo')
    try:
        jax.distributed.initialize(
            _address(start.host, port),
            start.count,
            start.index,
            local_device_ids=None if LOCAL_DEVICES in os.environ else start.gpus,
            # Detection would give a Slurm task only one GPU, however many belong to it.
            cluster_detection_method='deactivate',
            initialization_timeout=int(start.timeout),
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
            coordinator_bind_address=_address(start.bind, port) if start.bind else None,
        )
    except jax.errors.JaxRuntimeError as error:
        _end_if_unreached(peers, error)
        raise
    return peers


def _avoid_proxies(start: Start) -> None:
    # gRPC would use a web proxy even to reach this host. jax warns about every such variable,
    # including the one that prevents this.
    if any(os.environ.get(name) for name in PROXIES):
        without = next((os.environ[name] for name in NO_PROXIES if os.environ.get(name)), '')
        os.environ[NO_PROXIES[0]] = f'{without},{start.host}'.lstrip(',')
    jax.config.update('jax_check_proxy_envs', False)


def _address(host: str, port: int) -> str:
    return f'[{host}]:{port}' if ':' in host else f'{host}:{port}'


def _end_if_unreached(peers: Peers, error: BaseException) -> None:
    """End this process with exit code 75 if `error` says that another process was not reached.

    If another process has reported why it ended, that reason is printed instead of this one.
    """
    # jax raises a ValueError for a failure in a collective that was dispatched earlier.
    if isinstance(error, jax.errors.JaxRuntimeError | ValueError) and UNREACHED.match(str(error)):
        why = _one_line(error)
        peers.failed(why, own=False)
        peers.wait(LAST_WORDS)
        end(
            f'the processes did not reach each other in time ({why}): '
            'start the run again to continue from its last checkpoint'
        )


def _exit_without_waiting(peers: Peers, code: int) -> None:
    """Exit as soon as the error is printed, without jax's own exit handler.

    That handler waits for all processes, but processes that learn of the error never reach it.
    """

    def leave() -> None:
        peers.wait(LAST_WORDS)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)

    atexit.register(leave)
    # Threads are joined before registered functions run, and a thread may be waiting for a lost
    # process.
    timer = threading.Timer(2 * LAST_WORDS, os._exit, (code,))
    timer.daemon = True
    timer.start()


def _exit_code(error: BaseException) -> int:
    match error:
        case RunError():
            return error.exit_code
        case KeyboardInterrupt():
            return 130
        case SystemExit(code=int(code)):
            return code
        case SystemExit(code=None):
            return 0
    return 1


def _one_line(error: BaseException) -> str:
    text = str(error).strip().partition('\n')[0]
    return f'{type(error).__name__}: {text}' if text else type(error).__name__
