"""A script is read as far as its text goes, and the rest is named with a way out."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from megajax.core.config import ConfigError
from megajax.interop.megatron.command_line.line import read_line
from megajax.interop.megatron.command_line.script import find_launch
from megajax.interop.megatron.command_line.to_config import from_megatron
from megajax.interop.shell_variables import plain

ARGUMENTS = (
    '--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 512 '
    '--micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --train-iters 10'
)
WAY_OUT = 'put `echo` before the command, run the script, and give its output'


def words_of(text: str) -> list[str]:
    return [plain(word) for word in find_launch(text, 'train.sh').words]


def converted(text: str, folder: Path) -> str:
    (folder / 'train.sh').write_text(text)
    return from_megatron(read_line([f'@{folder}/train.sh']))


def refused(text: str, folder: Path) -> str:
    with pytest.raises(ConfigError) as error:
        converted(text, folder)
    return str(error.value)


PLAIN = f'ARGS="{ARGUMENTS}"\ntorchrun --nproc_per_node 8 pretrain_gpt.py $ARGS\n'
SAME = {
    'a variable': f'set -x\nSCRIPT=pretrain_gpt.py\nA="{ARGUMENTS}"\n'
    'torchrun --nproc_per_node 8 $SCRIPT $A\n',
    'a guard': f'SCRIPT=pretrain_gpt.py\nif [[ ! -f "$SCRIPT" || -z $x ]]; then\n'
    f'  echo "no $SCRIPT: usage: torchrun $SCRIPT"\n  exit 1\nfi\n{PLAIN}',
    'comments': f'# torchrun pretrain_gpt.py --num-layers 9\n{PLAIN} # pretrain_gpt.py',
    'an array': f'A=(\n  --nproc_per_node 8 # GPUs\n  # --nnodes 2\n)\nB=({ARGUMENTS})\nC=()\n'
    'C+=("${B[@]}")\ntorchrun "${A[@]}" \\\n  pretrain_gpt.py ${C[@]} 2>&1 | tee log.txt\n',
    'defaults': 'N=${N:-8}; : "${L:=2}"\n'
    f'torchrun --nproc_per_node ${{N}} "${{P:-pretrain_gpt.py}}" {ARGUMENTS} --num-layers $L &> x',
    'a sum': 'G=4\nN=$(( $G * (1 + 1) ))\n'
    f'torchrun --nproc_per_node $N pretrain_gpt.py {ARGUMENTS}',
    'eval': f'C="torchrun --nproc_per_node 8 pretrain_gpt.py {ARGUMENTS} | tee x"\n'
    'echo ${C}\neval ${C}\n',
    'a shell': f'export L="python -m torch.distributed.run --nproc_per_node 8"\n'
    f'export C=" `pwd`/pretrain_gpt.py {ARGUMENTS}"\necho $C\n'
    "clear; srun --jobid $ID bash -c '$L --node_rank $SLURM_PROCID $C' 2>&1 | tee x.$ID",
    'a here-document': f'cat <<EOT > $config\n{{"train": pretrain_gpt.py, don\'t}}\nEOT\n{PLAIN}',
    'another program': f'python prepare.py --split train\n{PLAIN}',
    'a module': f'exec torchrun --nproc_per_node 8 --module pretrain_gpt {ARGUMENTS}',
    'sbatch': '#SBATCH --nodes=2 --ntasks-per-node=4  # GPUs\n'
    f'srun -l --output=x-%j.log sh -c "python -u pretrain_gpt.py {ARGUMENTS}"',
    'an assignment before': f'OMP_NUM_THREADS=4 {PLAIN.splitlines()[1]}'.replace(
        '$ARGS', ARGUMENTS
    ),
    'output of echo': f'torchrun --nproc_per_node 8 pretrain_gpt.py {ARGUMENTS}',
    'a set branch': f'if [ -n "$TB" ]; then\n  TB=tb\nfi\n{PLAIN[:-1]} --tensorboard-dir $TB/x',
}


@pytest.mark.parametrize(
    ('options', 'gpus'),
    [
        ('-N 4 --ntasks-per-node=8', 32),
        ('-N4 --ntasks-per-node=8', 32),
        ('--ntasks=32 --ntasks-per-node=8', 32),
        ('-n 32 --ntasks-per-node 8', 32),
        ('-N 4 -n32', 32),
        ('--ntasks=$SLURM_NTASKS --ntasks-per-node=8 --nodes=4', 32),
        ('--ntasks-per-node=8', 8),
    ],
)
def test_slurms_options_give_the_number_of_gpus(options: str, gpus: int, tmp_path: Path) -> None:
    arguments = ARGUMENTS.replace('--global-batch-size 8', '--global-batch-size 32')
    program = f'pretrain_gpt.py {arguments}'
    script = f'#SBATCH {options}\nsrun -l numactl -N 0 nice -n 10 python -u {program}'
    for text in (script, f'/usr/bin/srun {options} python {program}'):
        assert f'\n# {gpus} GPUs: ' in converted(text, tmp_path)
    nested = f'#SBATCH -N 4 -n 4\nsrun torchrun --nproc_per_node 8 {program}'
    assert '\n# 32 GPUs: ' in converted(nested, tmp_path)


@pytest.mark.parametrize(
    ('launcher', 'gpus'),
    [
        ('torchrun --nproc_per_node 8 --nnodes $WORLD_SIZE', 16),
        ('torchrun --nproc_per_node 8', 8),
        ('deepspeed --num_gpus 4', 4),
        ('torchrun --nproc_per_node $1', None),
        ('python', 2),
        ('srun python', 2),
    ],
)
def test_launchers_that_count_their_processes_do_not_read_the_world_size(
    launcher: str, gpus: int | None, tmp_path: Path
) -> None:
    arguments = ARGUMENTS.replace('--global-batch-size 8', '--global-batch-size 16')
    (tmp_path / 'train.sh').write_text(f'export WORLD_SIZE=2\n{launcher} pretrain.py {arguments}')
    assert read_line([f'@{tmp_path}/train.sh']).world_size == gpus


@pytest.mark.parametrize('name', SAME)
def test_forms_of_one_script_have_one_config(name: str, tmp_path: Path) -> None:
    expected = converted(PLAIN, tmp_path)
    text = converted(SAME[name], tmp_path)
    assert text.partition('\n# Without')[0].strip() == expected.strip()


@pytest.mark.parametrize(
    ('text', 'line'),
    [
        ('torchrun --nproc_per_node 8 pretrain_gpt.py\n  ' + ARGUMENTS.replace(' --', '\n--'), 2),
        ('torchrun --nproc_per_node 8 \\\n pretrain_gpt.py \\\n # --bf16 \\\n ' + ARGUMENTS, 4),
    ],
    ids=['no backslash', 'a comment'],
)
def test_arguments_that_bash_does_not_pass_are_read_and_said(
    text: str, line: int, tmp_path: Path
) -> None:
    expected, found = converted(PLAIN, tmp_path), converted(text, tmp_path)
    assert found.partition('model:')[2] == expected.partition('model:')[2]
    said = f'/train.sh:{line}: bash does not pass the arguments from this line on'
    assert said in ' '.join(found.replace('#', '').split())
    assert 'bash does not' not in expected
    assert 'bash does not' not in converted(ARGUMENTS.replace(' --', '\n--'), tmp_path)


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('if [ $1 = small ]; then\n' + PLAIN.replace('\ntorch', '\nfi\ntorch'),
         '$ARGS: its value is not in the text: `if` in line 1 sets it'),
        (f'L=2\nif $1; then L+=4; fi\nL+=0\ntorchrun pretrain_gpt.py {ARGUMENTS} --num-layers $L',
         '$L is not in the text: `if` in line 2 sets it'),
        (f'for L in 2 4; do\n torchrun pretrain_gpt.py {ARGUMENTS} --num-layers $L\ndone',
         "--num-layers '$L': the value of $L is not in the text: `for` in line 1 sets it"),
        (f'[ -z $L ] && L=4\ntorchrun pretrain_gpt.py {ARGUMENTS} --num-layers $L',
         'is not in the text: `&&` in line 1 sets it'),
        (f'case $1 in\n a) L=2 ;;\nesac\ntorchrun pretrain_gpt.py {ARGUMENTS} --num-layers $L',
         '`case` in line 1 sets it'),
        (f'if $1; then {{\n L=2\n}}; fi\ntorchrun pretrain_gpt.py {ARGUMENTS} --num-layers $L',
         '`if` in line 1 sets it'),
        (f'[ -z $1 ] &&\n L=2\ntorchrun pretrain_gpt.py {ARGUMENTS} --num-layers $L',
         '`&&` in line 2 sets it'),
        (f'f() {{ L=2; }}\n$1 && f\ntorchrun pretrain_gpt.py {ARGUMENTS} --num-layers $L',
         '`&&` in line 2 sets it'),
        (f'torchrun pretrain_gpt.py {ARGUMENTS} --seed $(date +%s)',
         "--seed '$(date +%s)': the value of $(date +%s) is not in the text: the output of a"),
        (f'S=$1\ntorchrun pretrain_gpt.py {ARGUMENTS} --save $S',
         "--save '$1': the value of $1 is not in the text: an argument of the script"),
        (f'torchrun pretrain_gpt.py "$@" {ARGUMENTS}', '$@: its value is not in the text'),
        (f'torchrun pretrain_gpt.py {ARGUMENTS} --manual-gc $MORE',
         '$MORE: its value is not in the text: the text does not set it'),
        (f'torchrun pretrain_gpt.py {ARGUMENTS} --save ${{X%/}}', 'a rewriting of a variable'),
        (f'torchrun pretrain_gpt.py {ARGUMENTS} --seed $(( 2 ** 3 ))', 'a sum of numbers'),
    ],
)  # fmt: skip
def test_what_only_a_shell_knows_is_named_with_the_way_out(
    text: str, message: str, tmp_path: Path
) -> None:
    said = refused(text, tmp_path)
    assert message in said
    assert WAY_OUT in said.splitlines()[-1]


@pytest.mark.skipif(shutil.which('bash') is None, reason='bash is not installed')
@pytest.mark.parametrize(
    'scope',
    [
        '(L=4)', '( L=4; M=5 ) > x', '(L=4; (M=5); N=6)', 'if true; then (L=4); fi',
        '(\nL=4\ncase $L in a) M=5 ;; (b) N=6 ;; esac\n)\nM=8', 'A=(L=4 5)\nM=7',
        'case $L in (3) L=4; M=5; esac\nL=6; M=7', 'true x; (L=4)',
        'f() { g() { L=4; }; }\nf\nL=5\ng',
        'shopt -s extglob\nls @(x|y); L=4',
        'L=4 | cat', 'echo 4 | read L', 'L=4 &', '{ L=4; M=5; } | cat', '{ L=4; } &',
        'echo 4 | while read x; do L=$x; done', 'for M in 5 6; do L=4; done | cat',
        'echo 4 |\n{ read L; M=5; }', '{ L=4; M=$L; }', '{ L=4\n}\n(M=$L)\nN=$L',
        'bash -c "L=4"', 'eval "L=4"', 'M=$(L=4; echo 5)\nM=7', 'L=4 true',
        'cat <(L=4) > /dev/null',
        'f() { L=4; }', 'f() { L=4; }\nf', 'function f { local L=4; M=$L; }\nf', 'f() (L=4)\nf',
        'function f\n{\n L=4\n local M=5 N\n}\nf', 'f() { g() { L=4; }; g; }; f',
        '(f() { L=4; }; f)',
        'f() { M=$L; }\nL=4\nf\nL=5', 'f() { M=$L; }\nL=4 f',
        'f() { L=4; }\nf | cat', 'f() { L=4; }\n(f)',
        'f()\n{\n L=4\n}\nf', 'function f() { L=4; }\nf',
        '{ function f\n{ L=4; }\nM=2; }',
        'f() {\n if true; then\n  N=1; fi\n L=4\n}\nN=2',
        'f() { declare L=4; g; }\ng() { M=$L; }\nf',
        'A=(1)\n(A+=(2))\nL=${#A}${A[*]}\nL=${A[*]}', 'f() { L=4; if false; then f; fi; }\nf',
        'f() { L=${1:-4}; M=$#; }\nf 5 6', 'f() { L=${1:-4}; }\nf', 'f() { L=4$1; }\nf',
        'f() { g; }\ng() { L=${1:-4}; }\nf 5', 'f() { g 6; L=${1:-4}; }\ng() { M=${1:-4}; }\nf 5',
        'f() { g "$@"; }\ng() { L=$1; M=$2; N="$*"; }\nf 5 "6 7" 8', 'f() { L=$2; }\nM=5 f $M 6',
        'set -- 5\nL=${1:-4}', 'set -- 5 6\nf() { set -- 7; L=$1; }\nf 8\nM=$1',
        '(set -- 5)\nL=${1:-4}',
        'eval "set -- 5 6"\nL=$2',
        'f() { L=${1:-4}; }\nf "$@"', 'f() { g "$@"; }\ng() { L=${2:-4}; }\nf $@',
        'set -- "$@"\nL=${1:-4}',
        'for ((i=0; i<2; i++)); do :; done\n(L=4)', '[[ $L =~ (3|4) ]] && :\n(L=4)',
    ],
)  # fmt: skip
def test_variables_have_the_scopes_that_bash_gives_them(scope: str, tmp_path: Path) -> None:
    text = f'L=3; M=1; N=2\n{scope}\n'
    shown = 'pretrain.py $L $M $N'
    done = subprocess.run(
        ['bash', '-c', f'{text}echo {shown}'], capture_output=True, text=True, cwd=tmp_path
    )
    assert words_of(f'{text}python {shown}') == ['python', *done.stdout.split()]


def test_a_function_reads_the_variables_of_its_call() -> None:
    body = 'run() { python pretrain.py --num-layers $L; }\n'
    for text in (
        f'L=2\n{body}L=4\nrun\nL=6',
        f'{body}L=4\nsrun bash -c run',
        f'{body}L=4',
        f'L=4\n{body}',
    ):
        assert words_of(text)[-2:] == ['--num-layers', '4']


@pytest.mark.skipif(shutil.which('bash') is None, reason='bash is not installed')
@pytest.mark.parametrize(
    'text',
    [
        "bash -c 'echo pretrain.py ${1:-4} $2' _ 5", "L=5 bash -c 'echo pretrain.py $L'",
        "env L=5 bash -c 'echo pretrain.py $L'", "set -- 5\nbash -c 'echo pretrain.py ${1:-4}'",
        'bash -c "echo pretrain.py \\${1:-4}" _ "$@"',
    ],
)  # fmt: skip
def test_a_shell_has_its_own_arguments_and_variables(text: str) -> None:
    done = subprocess.run(['bash', '-c', f'L=3\n{text}'], capture_output=True, text=True)
    found = words_of(f'L=3\n{text}'.replace('echo', 'python'))
    assert found[found.index('python') + 1 :] == done.stdout.split()


@pytest.mark.parametrize('variable', ['$L', '${L:-3}', '${M:-3}'])
@pytest.mark.parametrize(
    'change',
    ['source x.sh', '. ./x.sh 4', 'source $DIR/x.sh', 'export $(grep -v "^#" .env | xargs)',
     'while read k v; do\nexport "$k=$v"; done < .env', 'eval $(python config.py)',
     'source $WORK/conda/args.sh', 'source ${ROOT}/envs/mamba/args.sh activate',
     '. /usr/local/megatron/args.sh', 'source /etc/megatron/args.sh',
     'for A in $X "$@"; do export $A; done', 'f() { for A; do export $A; done; }\nf $X',
     'eval "$(cat x)"', '[ -f x.sh ] && . x.sh', 'f() { source x.sh; }\nf'],
)  # fmt: skip
def test_a_text_that_is_not_seen_may_set_every_variable(
    variable: str, change: str, tmp_path: Path
) -> None:
    launch = f'torchrun --nproc_per_node 8 pretrain_gpt.py {ARGUMENTS} --num-layers'
    text = f'L=3\n{change}\n{launch} {variable}'
    assert re.search(r'is not in the text: `.*` in line \d may set it', refused(text, tmp_path))
    name = re.sub(r'\W|:.*', '', variable)
    text = f'L=3\n{change}\n{name}+=4\n{launch} {variable}'
    assert re.search(r'is not in the text: `.*` in line \d may set it', refused(text, tmp_path))
    again = f'{change}\nL=\nM=3\n{launch} {variable}'
    assert 'num_layers: 3' in converted(again.replace('L=', 'L=3'), tmp_path)


@pytest.mark.parametrize(
    'kept',
    ['source venv/bin/activate', 'source ~/.bashrc', '. /etc/profile.d/modules.sh',
     'eval "$(conda shell.bash hook)"', 'source activate megatron', '(source x.sh)', 'A[0]=4',
     'export "A=$X" "L=3" -n', 'eval "A=$X"', 'export "A=$X"\nexport A', 'source x.sh | cat',
     'source /opt/conda/etc/profile.d/mamba.sh', 'source $LMOD_PKG/init/bash',
     'source $(conda info --base)/bin/activate megatron', 'source $HPCX_HOME/hpcx-init-ompi.sh',
     'source spack/share/spack/setup-env.sh', 'source /opt/rh/gcc-toolset-12/enable',
     'source ~/.zshrc', 'source "$HOME/.bash_profile"', 'source /opt/intel/setvars.sh --force',
     'eval "$(spack load --sh nccl)"',
     'eval `/usr/bin/lmod bash load cuda`', 'C="$(/opt/bin/conda hook)"\neval "$C"',
     'for A in "$@"; do\nK=$(echo $A | cut -d= -f1)\nexport "$K"="${A:4}"\ndone',
     'for A; do export $A; L=4; done', 'if true; then for A in $*; do\nexport $A\ndone; fi',
     'f() { for A in "$@"; do export $A; done; }\nf "$@"'],
)  # fmt: skip
def test_a_text_that_sets_no_other_variable_changes_none(kept: str, tmp_path: Path) -> None:
    launch = f'torchrun --nproc_per_node 8 pretrain_gpt.py {ARGUMENTS} --num-layers'
    for variable in ('$L', '${M:-3}'):
        assert 'num_layers: 3' in converted(f'L=3\n{kept}\n{launch} {variable}', tmp_path)


def test_an_array_whose_element_is_set_is_not_known(tmp_path: Path) -> None:
    launch = f'torchrun --nproc_per_node 8 pretrain_gpt.py {ARGUMENTS} ${{A[@]}}'
    for change in ('A[1]=4', 'A["1"]=4', 'A[$i]+=4', 'declare A[1]=4'):
        for more in ('', 'A+=(--bf16)'):
            said = refused(f'A=(--num-layers 3)\n{change}\n{more}\n{launch}', tmp_path)
            assert '${A[@]}: its value is not in the text: line 2 sets an element of it' in said


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('f() { LAUNCH ${1:-4}; }', '${1:-4} is not in the text: the text does not call f'),
        ('f() { LAUNCH ${2:-4}; }\nf $X 5', 'before it may be several words'),
        ('source x.sh\nLAUNCH $$', '$$ is not in the text: an argument of the script'),
        ('f() { LAUNCH $1; }\nf "$@"', '$1 is not in the text: an argument of the script'),
        ('A=$@\nf() { g $A; }\ng() { LAUNCH ${1:-4}; }\nf 5', '$@ is not in the text: an argu'),
        ('$X && set -- 5\nf() { LAUNCH ${1:-4}; }\nf "$@"', '`&&` in line 1 sets it'),
        ('f() { shift; LAUNCH ${1:-4}; }\nf 5 6', '`shift` in line 1 changes it'),
        ('$X && set -- 5\nLAUNCH ${1:-4}', '`&&` in line 1 sets it'),
        ('L=$(date)\nL=5 bash -c "LAUNCH $L"', '$(date) is not in the text: the output of a'),
        ('L=5 bash -c "LAUNCH $L"', '$L is not in the text: line 1 sets it for one command'),
        ('bash -c "LAUNCH $1" _ 5', '$1 is not in the text: an argument of the script'),
        ('f() { LAUNCH $1; }\nf 4\nf 5', 'line 1 starts a program with different arguments'),
    ],
)
def test_an_argument_that_is_not_known_has_no_default(
    text: str, message: str, tmp_path: Path
) -> None:
    launch = f'torchrun pretrain_gpt.py {ARGUMENTS} --num-layers'
    assert message in refused(text.replace('LAUNCH', launch), tmp_path)


@pytest.mark.parametrize(
    'change',
    ['let L=4', 'let "N = 2" L++', '(( L += 2 ))', 'M=$((--L))', 'read -r M L < file',
     'printf -v L %d 4', 'mapfile -t L < file', 'unset L'],
)  # fmt: skip
def test_a_variable_that_a_command_changes_is_not_known(change: str, tmp_path: Path) -> None:
    launch = f'torchrun --nproc_per_node 8 pretrain_gpt.py {ARGUMENTS} --num-layers $L'
    for more in ('', 'L+=5'):
        assert ' changes it' in refused(f'L=3\n{change}\n{more}\n{launch}', tmp_path)
    for kept in ('(( L >= 2 && L != 5 )) || exit 1', 'let M=L*2', 'read M', 'printf %d L'):
        assert 'num_layers: 3' in converted(f'L=3\n{kept}\n{launch}', tmp_path)


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('bash train_llama.sh $X', 'no command in it starts pretrain_gpt.py or pretrain_bert.py'),
        (
            'if $A; then\n  torchrun pretrain_gpt.py --lr 1\nelse\n  torchrun pretrain_gpt.py\nfi',
            'lines 2 and 4 each start a program',
        ),
        ('echo "a', 'is not the text of a command: " is not closed'),
        ('A=(1 2', 'is not the text of a command: ( is not closed'),
        ('A=${B', 'is not the text of a command: { is not closed'),
    ],
)
def test_a_script_without_one_launch_is_refused(text: str, message: str, tmp_path: Path) -> None:
    assert message in refused(text, tmp_path)


@pytest.mark.parametrize(
    'quoted',
    [
        '--num-experts 4 --moe-layer-freq "([0]*1+[1]*1)"', '--window-size "(127,0)"',
        '--num-experts 4 --moe-layer-freq="([0]*1)+([1] * 1)" --moe-router-topk 3',
        '--num-experts 4 --disable-bias-linear --moe-layer-freq "(([1]*1)*2)"',
    ],
)  # fmt: skip
def test_what_echo_prints_is_read_as_what_it_was_given(quoted: str, tmp_path: Path) -> None:
    for text in (f'torchrun pretrain_gpt.py {ARGUMENTS} {quoted}', f'{quoted} {ARGUMENTS}'):
        expected = converted(text, tmp_path)
        assert converted(text.replace('"', ''), tmp_path) == expected
        assert converted(f'echo begin :(\n{text}'.replace('"', ''), tmp_path) == expected


def test_a_placeholder_is_named(tmp_path: Path) -> None:
    text = f'D=<Path to data>_text\ntorchrun pretrain_gpt.py {ARGUMENTS} --save "$D"'
    said = refused(text, tmp_path)
    assert "--save '<Path to data>_text': is a placeholder: put a value there" in said


def test_words_are_those_of_a_shell() -> None:
    text = r"""
    A=1; B="two words" # not $A
    C=('x y' "$B" $B z\ z "a\"b" 'c"d' $A$A ${A}0 "" )
    python run.py --a "${C[@]}" --b "$B" --c ${NO:-${A}5} '$A' > out 2>&1 < in &
    """
    found = find_launch(text, 'x').words
    assert found == shlex.split(
        r"""python run.py --a 'x y' 'two words' two words 'z z' 'a"b' 'c"d' 11 10 '' """
        """--b 'two words' --c 15 '$A'"""
    )


@pytest.mark.parametrize(
    'text',
    [
        '"$(' * 5000,
        'if ' * 20_000,
        '${A:-' * 5000 + '}' * 5000,
        "A='eval $B; eval $B'\nB='eval $A; eval $A'\neval $A",
        'A=$((' + '1+' * 100_000 + '1))',
        '(' * 20_000,
        'f0() { :; }\n' + ''.join(f'f{i + 1}() {{ f{i}; f{i}; }}\n' for i in range(40)) + 'f40',
    ],
)
def test_a_script_that_is_nested_without_end_is_refused(text: str, tmp_path: Path) -> None:
    assert refused(text, tmp_path)
