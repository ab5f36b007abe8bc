"""What the README and the pages promise to a reader who tries it."""

import ast
import importlib
import inspect
import math
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from reference import auto_model
from reference import megatron_by_hand as by_hand
from support import exhaustive, slow
from typer.core import TyperCommand
from typer.main import get_command

from megajax.analysis.plan.planning import plan
from megajax.commands.main import app
from megajax.core.config import Config, load
from megajax.core.config.overrides import KEYS
from megajax.core.counts.parameters import num_parameters
from megajax.core.hardware.targets import has_compiler
from megajax.core.model.mlp import MLP

ROOT = Path(__file__).parents[1]
README = ROOT / 'README.md'
PAGES = sorted([*ROOT.glob('*.md'), *ROOT.glob('docs/*.md')])
SHELF = 'megajax|tests|benchmarks|docs|scripts|configs|notebooks|\\.ci|\\.github'
for_each_page = pytest.mark.parametrize('page', PAGES, ids=lambda page: page.stem)


def run_python(code: str, timeout: float = 120, folder: Path = ROOT) -> str:
    command = [sys.executable, '-c', code]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def blocks(page: Path, language: str = '') -> list[str]:
    found = re.findall(r'^```(\w*)\n(.*?)^```$', page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def prose(page: Path) -> str:
    """The page without its blocks of code and output."""
    return re.sub(r'^```.*?^```$', '', page.read_text(), flags=re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[str]:
    """Every line `megajax ...` of a block, without its comment."""
    lines = [line for block in blocks(page) for line in block.splitlines()]
    return [line.partition('  #')[0] for line in lines if re.match('megajax [a-z]', line)]


def spans(page: Path) -> list[str]:
    """Every `megajax ...` inside a sentence, which may leave out arguments."""
    text = ' '.join(prose(page).split())
    return [line for line in re.findall(r'`([^`]+)`', text) if line.startswith('megajax ')]


def headings(page: Path) -> set[str]:
    """The anchors that GitHub makes of the headings."""
    found = re.findall(r'^#+ (.*)$', prose(page), flags=re.MULTILINE)
    return {re.sub(r'[^\w\- ]', '', name.lower()).replace(' ', '-') for name in found}


class ParsedError(Exception):
    """Ends a command whose words were read."""


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with the README's my.yaml, in which commands are read and not run."""

    def stop(_: TyperCommand, context: Any) -> None:
        raise ParsedError(context.command_path, context.params)

    monkeypatch.setattr(TyperCommand, 'invoke', stop)
    monkeypatch.chdir(tmp_path)
    (example,) = blocks(README, 'yaml')
    (tmp_path / 'my.yaml').write_text(example)
    return tmp_path


def read_command(line: str) -> tuple[str, list[str]]:
    """The verb and the plain words of a command; fails where an option or a verb is unknown."""
    with pytest.raises(ParsedError) as caught:
        app(shlex.split(line)[1:], standalone_mode=False)
    verb, params = caught.value.args
    values = [x if isinstance(x, list | tuple) else [x] for x in params.values()]
    return verb, [word for group in values for word in group if isinstance(word, str)]


def overrides_in(words: list[str]) -> list[str]:
    return [word for word in words if re.match(r'[a-z]+\.\w+=', word)]


def sources_in(words: list[str]) -> list[str]:
    return [x for x in words if x == 'my.yaml' or (ROOT / f'configs/{x}.yaml').exists()]


def config_of(words: list[str]) -> Config:
    """The config that the plain words of a command name, or `tiny`, with their overrides."""
    return load((sources_in(words) or ['tiny'])[0], overrides_in(words))


def config_of_command(line: str) -> Config:
    return config_of(read_command(line)[1])


@pytest.mark.parametrize(
    ('page', 'line'), [(page, line) for page in PAGES for line in commands(page)],
    ids=lambda value: value.stem if isinstance(value, Path) else value,
)  # fmt: skip
def test_a_command_of_a_page_is_one_that_megajax_reads(page: Path, line: str, reader: Path) -> None:
    verb, words = read_command(line)
    assert {word.partition('=')[0] for word in overrides_in(words)} <= KEYS.keys()
    if verb.split()[-1] in ('train', 'step', 'for', 'show', 'launch'):
        config_of(words)


def test_the_page_on_installing_trains_on_one_gpu_and_on_eight(reader: Path) -> None:
    lines = [line for line in commands(ROOT / 'docs/start.md') if 'train gpt2_124m' in line]
    configs = {each.mesh.num_devices: each for each in map(config_of_command, lines)}
    assert configs.keys() == {1, 8}
    smaller = configs[1].changed(train=configs[1].train.changed(microbatches=64))
    needed, less = (
        f'{sum(line.bytes for line in plan(each, gpu="a100").memory) / 1e9:.1f} GB'
        for each in (configs[1], smaller)
    )
    text = ' '.join(prose(ROOT / 'docs/start.md').split())
    assert f'The first command needs {needed} of GPU memory' in text
    assert f'use `train.microbatches=64`, which needs {less}.' in text


@for_each_page
def test_a_fine_tune_with_the_config_of_an_import_sets_its_learning_rate(page: Path) -> None:
    text = '\n'.join(blocks(page)).replace('\\\n', '')
    lines = [*spans(page), *re.findall('megajax .*', text)]
    for line in (line for line in lines if 'train run.start_from=' in line):
        rate = re.search(r'optim\.lr=(\S+)', line)
        assert rate, line
        if float(rate[1]) < 1e-4:  # a rate for the weights of a large model
            assert 'optim.min_lr=' in line, line
            assert 'optim.warmup_steps=' in line, line


def test_a_folder_that_an_example_checks_is_made_before() -> None:
    texts = [block for page in PAGES for block in blocks(page) if 'doctor --dir ' in block]
    assert texts
    for text in texts:
        before, _, after = text.partition('doctor --dir ')
        assert f'mkdir -p {after.split()[0]}\n' in before


def slurm_jobs(pages: list[Path] = PAGES) -> Iterator[tuple[str, list[str], int]]:
    """The config, the overrides and the GPUs of each job that a page or a comment submits."""
    script = (ROOT / 'scripts/slurm.sbatch').read_text()
    nodes, gpus = (
        int(re.search(rf'^#SBATCH --{option}=(\d+)', script, re.MULTILINE)[1])
        for option in ('nodes', 'gpus-per-node')
    )
    files = [*pages, ROOT / 'scripts/slurm.sbatch', *ROOT.glob('configs/recipes/*.yaml')]
    lines = (line.partition('  #')[0] for file in files for line in file.read_text().splitlines())
    for line in lines:
        if found := re.match(r'(?:# +)?(?:\w+=\S+ )*sbatch (.*)scripts/slurm\.sbatch (.*)', line):
            asked = re.search(r'--nodes=(\d+)', found[1])
            config, *keys = shlex.split(found[2])
            yield config, keys, gpus * (int(asked[1]) if asked else nodes)


def test_a_job_of_slurm_has_a_mesh_of_all_its_gpus(reader: Path) -> None:
    jobs = [job for job in slurm_jobs() if job[0] not in ('CONFIG', 'fast.yaml')]
    assert len(jobs) >= 5
    for config, keys, gpus in jobs:
        assert load(config, keys).mesh.num_devices == gpus, (config, keys)


@for_each_page
def test_a_corpus_of_a_page_is_for_models_of_one_vocabulary(page: Path, reader: Path) -> None:
    corpora = re.findall(r'^megajax data build (\S+)', page.read_text(), flags=re.MULTILINE)
    if not corpora:
        return
    jobs = [[config, *keys] for config, keys, _ in slurm_jobs([page])]
    runs = [*jobs, *(read_command(line)[1] for line in commands(page))]
    configs = [config_of(words) for words in runs if sources_in(words)]
    for corpus in corpora:
        sizes = {each.model.vocab_size for each in configs if each.data.corpus == corpus}
        assert len(sizes) <= 1, corpus


@for_each_page
def test_a_command_inside_a_sentence_has_known_verbs_and_options(page: Path, reader: Path) -> None:
    for line in spans(page):
        words = shlex.split(line)[1:]
        verbs = [word for word in words if re.fullmatch(r'[a-z][a-z-]*', word)]
        if words[-1].startswith('-'):
            continue  # an option without its value
        known = options_of(verbs)
        assert {word for word in words if word.startswith('--')} <= known, line


def options_of(verbs: list[str]) -> set[str]:
    """The options of the command that the first words name."""
    command: Any = get_command(app)
    for verb in [*verbs, '']:
        if not hasattr(command, 'commands'):
            break
        default = getattr(command, 'default', None)  # a config stands for it
        assert default or verb in command.commands, verb
        command = command.commands.get(verb) or command.commands[default]
    return {option for param in command.params for option in param.opts}


@for_each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r'\]\(([^)\s]+)\)', prose(page)):
        if target.startswith(('https://', 'http://')):
            continue
        file, _, anchor = target.partition('#')
        found = (page.parent / file).resolve() if file else page
        assert found.exists(), target
        assert not anchor or anchor in headings(found), target


@for_each_page
def test_files_that_a_page_names_are_there(page: Path) -> None:
    new = re.findall(r'^--- /dev/null\n\+\+\+ b/(\S+)', page.read_text(), flags=re.MULTILINE)
    for name in re.findall(rf'`((?:{SHELF})/[\w./*-]+)`', prose(page)):
        assert name in new or any(ROOT.glob(name.rstrip('/'))), name


def test_targets_of_make_that_pages_and_workflows_name_are_there() -> None:
    makefile = (ROOT / 'Makefile').read_text()
    files = [*PAGES, *ROOT.glob('.github/workflows/*.yml'), ROOT / '.ci/run', ROOT / '.ci/full']
    for file in files:
        for target in re.findall(r'(?:^|`|run: )make ([a-z-]+)', file.read_text(), re.MULTILINE):
            assert f'\n{target}:' in makefile, (file.name, target)


@for_each_page
def test_lines_of_prose_have_at_most_a_hundred_columns(page: Path) -> None:
    for line in prose(page).splitlines():
        assert len(line) <= 100 or line.startswith('|'), line


@for_each_page
def test_names_of_the_package_in_python_are_there(page: Path) -> None:
    for code in blocks(page, 'python'):
        ast.parse(code)
        for name in set(re.findall(r'\bmegajax(?:\.\w+)+', code)):
            resolve(name)


def resolve(name: str) -> Any:
    found: Any = importlib.import_module('megajax')
    for part in name.split('.')[1:]:
        found = getattr(found, part, None) or importlib.import_module(f'{found.__name__}.{part}')
    return found


def test_the_readme_is_short_and_its_first_screen_has_its_commands_and_a_collective() -> None:
    lines = README.read_text().splitlines()
    assert 150 <= len(lines) <= 220
    first, table = blocks(README)[:2]
    words = [line.split()[:2] for line in first.splitlines()]
    assert words == [
        *(['make', x] for x in ('train', 'test')),
        *(['megajax', x] for x in ('inspect', 'plan')),
    ]
    assert table.startswith('site  ')
    assert lines.index(table.splitlines()[-1]) < 40


def test_the_readmes_commands_write_where_git_ignores_it() -> None:
    (example,) = blocks(README, 'yaml')
    text = '\n'.join([example, *commands(README)])
    outputs = r'(?:run\.dir=|run: \{dir: |--out |data build |(?:im|ex)port \w+ \S+ )([^\s}]+)'
    written = re.findall(outputs, text)
    assert len(written) >= 10
    assert {'runs/', '/my.yaml'} <= {*(ROOT / '.gitignore').read_text().splitlines()}
    assert [path for path in written if not path.startswith('runs/')] == []


def test_the_readmes_config_has_the_parameters_that_it_says(reader: Path) -> None:
    (example,) = blocks(README, 'yaml')
    count = int(re.search(r'([\d,]+) parameters', example)[1].replace(',', ''))
    assert num_parameters(load('my.yaml').model) == count


def test_the_picture_of_the_architecture_has_the_floors_that_lint_checks() -> None:
    picture = (ROOT / 'docs/floors.svg').read_text()
    at = {
        name: int(y)
        for y, name in re.findall(r'<text class="name" x="[\d.]+" y="(\d+)">(\w+)</text>', picture)
    }
    floors = tomllib.loads((ROOT / 'pyproject.toml').read_text())['tool']['importlinter']
    (layers,) = (one['layers'] for one in floors['contracts'] if one['type'] == 'layers')
    assert at.keys() == {name for floor in layers for name in floor_of(floor)}
    lines = [{at[name] for name in floor_of(floor)} for floor in layers]
    assert all(len(line) == 1 for line in lines)
    assert [*map(min, lines)] == sorted(map(min, lines))


def floor_of(floor: str) -> Iterator[str]:
    for name in floor.replace(':', '|').split('|'):
        yield name.strip().rpartition('.')[2]


def test_the_page_on_the_api_lists_every_name_of_the_package() -> None:
    page = (ROOT / 'docs/api.md').read_text()
    for name in importlib.import_module('megajax').__all__:
        assert re.search(rf'^\|.*`{name}\b', page, flags=re.MULTILINE), name


def test_the_page_on_the_api_has_every_name_of_the_package_and_no_other() -> None:
    page = (ROOT / 'docs/api.md').read_text()
    paths = re.findall(r'^::: (megajax\S+)', page, flags=re.MULTILINE)
    package = importlib.import_module('megajax')
    packages = package, package.inspect, package.compare
    names = {name for each in packages for name in each.__all__} | {'profile', 'write_report'}
    assert {path.rpartition('.')[2] for path in paths} == names - {'Decoder', 'Inspection'}
    for path in paths:
        module, _, name = path.rpartition('.')
        assert getattr(importlib.import_module(module), name).__doc__, path


def test_the_page_on_installing_has_every_extra_and_no_other() -> None:
    page = (ROOT / 'docs/start.md').read_text()
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
    named = re.findall(r'^\| `([\w-]+)` \|', page, flags=re.MULTILINE)
    assert set(named) == project['optional-dependencies'].keys()
    assert len(named) == len(set(named))


def test_types_are_published() -> None:
    assert (ROOT / 'megajax' / 'py.typed').is_file()


@pytest.mark.slow
def test_the_example_prints_the_loss_of_a_model_that_has_learned_nothing() -> None:
    (example,) = blocks(README, 'python')
    vocab_size = load('tiny').model.vocab_size
    assert float(run_python(example)) == pytest.approx(math.log(vocab_size), abs=0.5)


@pytest.mark.slow
def test_the_model_of_the_page_on_the_api_has_the_logits_that_it_says() -> None:
    code = blocks(ROOT / 'docs/api.md', 'python')[0]
    (shape,) = re.findall(r'# (\(.*?\)):', code)
    assert run_python(code).strip() == shape


@pytest.mark.slow
@pytest.mark.parametrize('start', [exhaustive('random'), 'loaded'])
def test_the_custom_loop_of_the_page_learns_its_batch(start: str, tmp_path: Path) -> None:
    _, loop, shardings, loading = blocks(ROOT / 'docs/api.md', 'python')
    parts = re.split(r'^(optimizer = .*)$', loop, flags=re.MULTILINE)
    if start == 'random':
        # With the optimizer's update inside `auto_axes`, which serves every optimizer.
        head, rest = loop.split('@partial')
        code = f'{head}{shardings}@partial{rest}'.replace('= optimizer.update(', '= update(')
    else:
        write_run = """
from pathlib import Path
from megajax.runtime.checkpoint.checkpoints import Checkpoints
from megajax.core.config import dump
run = Path('runs/mine')
with Checkpoints(run / 'checkpoints', config) as checkpoints:
    checkpoints.save(megajax.init_state(config), 0)
(run / 'config.yaml').write_text(dump(config))
"""
        code = ''.join([parts[0], write_run, loading, *parts[1:]])
    lines = run_python(code, folder=tmp_path).splitlines()
    losses = [float(line.split()[1]) for line in lines]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 1


def test_the_import_is_light() -> None:
    seconds, imported = run_python(
        'import sys, time; start = time.process_time(); import megajax; '
        'print(time.process_time() - start); '
        'print("jax" in sys.modules or "pydantic" in sys.modules)'
    ).split()
    assert float(seconds) < 0.3
    assert imported == 'False'


def test_the_source_that_a_notebook_shows_is_that_of_its_functions() -> None:
    cells = nbformat.read(ROOT / 'notebooks/02_what_xla_inserted.ipynb', as_version=4).cells
    outputs = [output for cell in cells for output in cell.get('outputs', ())]
    shown = ''.join(output.get('text', '') for output in outputs)
    hand = by_hand.f, by_hand.g, by_hand.row_parallel_linear, by_hand.mlp
    for function in (MLP.update, auto_model.mlp, *hand):
        assert inspect.getsource(function) in shown, function.__name__


IN_CI = '06_pictures'  # the cheapest
OF_OTHERS = {'07_an_equinox_step': 'equinox', '08_a_maxtext_step': 'maxtext'}


@pytest.mark.parametrize(
    'notebook',
    [
        (slow if path.stem == IN_CI else exhaustive)(path)
        for path in sorted((ROOT / 'notebooks').glob('*.ipynb'))
    ],
    ids=lambda path: path.stem,
)
def test_the_notebook_runs_from_top_to_bottom(
    notebook: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = OF_OTHERS.get(notebook.stem)
    if package and not (find_spec(package) and has_compiler()):
        pytest.skip(f"needs {package} and XLA's GPU compiler")
    # as conftest.py does: the kernel is a process of its own
    monkeypatch.setenv('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')
    cells = nbformat.read(notebook, as_version=4)
    NotebookClient(cells, timeout=300, resources={'metadata': {'path': str(ROOT)}}).execute()
