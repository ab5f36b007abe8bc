"""The Kubernetes example says what megajax reads: its command, its variables and its exit codes."""

import copy
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from megajax.base import errors
from megajax.core.config import load
from megajax.runtime.processes import environment
from megajax.runtime.processes.environment import Start, read_start
from megajax.runtime.processes.peers import RETRY
from megajax.runtime.run.watchdog import STALLED

ROOT = Path(__file__).parents[3]
KUBERNETES = '1.29', '1.33'  # the oldest release that the example names, and a newer one
# The fields that the example may have: one with a typing error is refused by a cluster alone.
FIELDS = {
    'Service': {'apiVersion', 'kind', 'metadata', 'spec'},
    'Service.spec': {'clusterIP', 'publishNotReadyAddresses', 'selector'},
    'Job': {'apiVersion', 'kind', 'metadata', 'spec'},
    'Job.spec': {
        'completionMode',
        'completions',
        'parallelism',
        'backoffLimitPerIndex',
        'maxFailedIndexes',
        'podFailurePolicy',
        'template',
    },
}


@pytest.fixture(scope='module')
def manifests() -> dict[str, dict[str, Any]]:
    """The manifests by their kind; the reader refuses a key that stands twice."""
    text = (ROOT / 'scripts/kubernetes.yaml').read_text()
    return {manifest['kind']: manifest for manifest in YAML(typ='safe').load_all(text)}


@pytest.fixture(scope='module')
def container(manifests: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (container,) = manifests['Job']['spec']['template']['spec']['containers']
    return container


def variables(container: dict[str, Any], index: int) -> dict[str, str]:
    """The variables of a pod, with those that Kubernetes adds."""
    given = {one['name']: one['value'] for one in container['env'] if 'value' in one}
    return given | {'MEGAJAX_TOKEN': 32 * '0', 'JOB_COMPLETION_INDEX': str(index)}


def starts(container: dict[str, Any], index: int) -> list[Start]:
    """Start the command of a pod with --dry-run; return each process's place in the run."""
    megajax, launch, *rest = container['command']
    assert (megajax, launch) == ('megajax', 'launch')
    environ = os.environ | variables(container, index) | {'JAX_PLATFORMS': 'cpu'}
    printed = subprocess.run(
        [sys.executable, '-m', 'megajax', launch, '--dry-run', *rest],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    places = []
    for line in printed.splitlines():
        settings = [word.partition('=') for word in shlex.split(line) if re.match('[A-Z_]+=', word)]
        start = read_start(environ | {name: value for name, _, value in settings})
        assert start is not None
        places.append(start)
    return places


def test_the_manifests_have_no_other_fields(manifests: dict[str, dict[str, Any]]) -> None:
    assert set(manifests) == {'Service', 'Job'}
    for kind, manifest in manifests.items():
        assert set(manifest) == FIELDS[kind]
        assert set(manifest['spec']) == FIELDS[f'{kind}.spec']
    assert manifests['Service']['apiVersion'] == 'v1'
    assert manifests['Job']['apiVersion'] == 'batch/v1'


def test_each_process_of_each_pod_has_a_gpu_and_its_place(
    manifests: dict[str, dict[str, Any]], container: dict[str, Any]
) -> None:
    job = manifests['Job']['spec']
    assert job['completionMode'] == 'Indexed'
    assert job['completions'] == job['parallelism']
    gpus = container['resources']['limits']['nvidia.com/gpu']
    for pod in (0, job['completions'] - 1):
        places = starts(container, pod)
        assert [place.index for place in places] == list(range(pod * gpus, (pod + 1) * gpus))
        assert {place.count for place in places} == {job['completions'] * gpus}
    config = load(*_config(container))
    assert config.mesh.num_devices == job['completions'] * gpus


def _config(container: dict[str, Any]) -> tuple[str, list[str]]:
    train = container['command'].index('train')
    source, *overrides = container['command'][train + 1 :]
    return source, overrides


def test_the_pods_meet_at_the_name_of_the_first(
    manifests: dict[str, dict[str, Any]], container: dict[str, Any]
) -> None:
    service, job = (manifests[kind]['metadata']['name'] for kind in ('Service', 'Job'))
    assert starts(container, 1)[0].host == f'{job}-0.{service}'
    pod = manifests['Job']['spec']['template']['spec']
    assert pod['subdomain'] == service
    assert manifests['Service']['spec']['selector'] == {'job-name': job}
    # A name in the cluster's DNS before all pods are ready, which they are when all have met.
    assert manifests['Service']['spec']['clusterIP'] == 'None'
    assert manifests['Service']['spec']['publishNotReadyAddresses'] is True


def test_the_user_of_the_image_may_write_to_the_claim(
    manifests: dict[str, dict[str, Any]],
) -> None:
    user = re.search(r'^USER (\d+):(\d+)$', (ROOT / 'Dockerfile').read_text(), re.MULTILINE)
    assert user is not None
    assert user[1] != '0'
    pod = manifests['Job']['spec']['template']['spec']
    context = pod['securityContext']
    ids = (context['runAsUser'], context['runAsGroup'], context['fsGroup'])
    assert ids == (int(user[1]), int(user[2]), int(user[2]))
    assert context['fsGroupChangePolicy'] == 'OnRootMismatch'


def test_the_pod_security_standard_restricted_admits_the_pods(
    manifests: dict[str, dict[str, Any]], container: dict[str, Any]
) -> None:
    pod = manifests['Job']['spec']['template']['spec']
    assert pod['securityContext']['runAsNonRoot'] is True
    assert pod['securityContext']['runAsUser'] != 0
    assert pod['securityContext']['seccompProfile'] == {'type': 'RuntimeDefault'}
    assert container['securityContext'] == {
        'allowPrivilegeEscalation': False,
        'capabilities': {'drop': ['ALL']},
    }
    assert not {'hostNetwork', 'hostPID', 'hostIPC'} & set(pod)
    kinds = {kind for volume in pod['volumes'] for kind in volume if kind != 'name'}
    assert kinds <= {'persistentVolumeClaim', 'emptyDir', 'secret', 'configMap', 'projected'}


def test_a_pod_requests_what_it_may_use(container: dict[str, Any]) -> None:
    resources = container['resources']
    assert resources['requests'] == resources['limits']
    assert {'cpu', 'memory', 'nvidia.com/gpu'} <= set(resources['requests'])


@pytest.mark.parametrize('release', KUBERNETES)
def test_the_schema_of_the_api_has_every_field(
    release: str, manifests: dict[str, dict[str, Any]]
) -> None:
    validate = pytest.importorskip('kubernetes_validate').validate
    for manifest in manifests.values():
        validate(manifest, release, strict=True)
    misspelt = copy.deepcopy(manifests['Job'])
    misspelt['spec']['template']['spec']['restartpolicy'] = 'Never'
    with pytest.raises(Exception, match='restartpolicy'):
        validate(misspelt, release, strict=True)


def test_the_corpus_has_to_be_named(container: dict[str, Any]) -> None:
    assert load(*_config(container)).data.corpus == '/runs/YOUR_CORPUS'


def test_its_variables_are_those_that_megajax_reads(container: dict[str, Any]) -> None:
    names = [one['name'] for one in container['env']]
    assert set(names) <= {environment.COORDINATOR, environment.TOKEN, environment.START_TIMEOUT}
    (secret,) = [one for one in container['env'] if 'valueFrom' in one]
    assert secret['name'] == environment.TOKEN
    assert secret['valueFrom']['secretKeyRef'] == {'name': 'megajax-token', 'key': 'token'}


def test_what_would_repeat_fails_the_job_and_what_a_restart_mends_does_not(
    manifests: dict[str, dict[str, Any]], container: dict[str, Any]
) -> None:
    job = manifests['Job']['spec']
    first, late, second = job['podFailurePolicy']['rules']
    assert first['action'] == 'FailJob'
    assert first['onExitCodes']['containerName'] == container['name']
    assert first['onExitCodes']['operator'] == 'In'
    repeat = 'ConfigError', 'NumericError', 'CheckpointError', 'CorruptionError'
    codes = {getattr(errors, name).exit_code for name in repeat}
    assert set(first['onExitCodes']['values']) == codes
    assert not codes & {RETRY, STALLED, errors.StopRequested.exit_code}
    # A pod that lost another, or waited in vain for one that came late, has not failed itself.
    assert late['action'] == 'Ignore'
    assert late['onExitCodes'] == {**first['onExitCodes'], 'values': [RETRY]}
    assert second == {
        'action': 'Ignore',
        'onPodConditions': [{'type': 'DisruptionTarget', 'status': 'True'}],
    }
    # A policy for failed pods is for pods that are not restarted in place.
    assert job['template']['spec']['restartPolicy'] == 'Never'
    # The number counts the failures of each pod, not of the Job.
    assert job['backoffLimitPerIndex'] == 10
    assert 'at most ten times per pod' in (ROOT / 'docs/hosts.md').read_text()
    assert job['maxFailedIndexes'] == 0


def test_every_volume_that_is_mounted_is_there(
    manifests: dict[str, dict[str, Any]], container: dict[str, Any]
) -> None:
    volumes = [one['name'] for one in manifests['Job']['spec']['template']['spec']['volumes']]
    mounts = {one['name']: one['mountPath'] for one in container['volumeMounts']}
    assert sorted(mounts) == sorted(volumes)
    assert '/dev/shm' in mounts.values()
    directory = load(*_config(container)).run.dir
    assert str(directory).startswith(f'{mounts["runs"]}/')
