"""The page on the command line is written from the commands, and its codes are the errors' own."""

import re

from support import ROOT, load_script
from typer.main import get_command

from megajax.base.errors import RunError
from megajax.commands.main import app
from megajax.runtime.checkpoint.open import open_model
from megajax.runtime.run.watchdog import STALLED

PAGE = (ROOT / 'docs/cli.md').read_text()
cli_page = load_script('cli_page', 'scripts')


def test_the_page_is_what_the_commands_say() -> None:
    assert cli_page.page() == PAGE, 'python scripts/cli_page.py > docs/cli.md'


def test_every_error_has_its_exit_code_on_the_page() -> None:
    codes = {int(code) for code in re.findall(r'^\| (\d+) \|', PAGE, flags=re.MULTILINE)}
    assert codes == {0, STALLED, *(error.exit_code for error in RunError.__subclasses__())}


def test_a_checkpoint_has_one_name_in_the_help() -> None:
    for text in (PAGE, open_model.__doc__ or ''):
        assert 'RUN/STEP' in text
        assert 'checkpoints/STEP' not in text


def test_a_hidden_command_and_a_hidden_option_are_left_out() -> None:
    root = get_command(app)
    (train, doctor) = (root.commands[name] for name in ('train', 'doctor'))
    train.hidden = doctor.params[0].hidden = True
    assert 'megajax train' not in [path for path, _ in cli_page.commands(root)]
    assert '--dir' not in cli_page._section('megajax doctor', doctor)
