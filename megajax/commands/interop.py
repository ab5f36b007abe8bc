"""The subcommands of `megajax import` and `megajax export`: parse, call, render."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from megajax.base.errors import ConfigError
from megajax.base.render.logs import log_to_terminal
from megajax.interop.huggingface.families import ARCHITECTURES
from megajax.runtime.checkpoint.hf_files import TEMPLATE

DEFAULT_SHARD_GB = 5
import_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Import another project's checkpoint as a run.",
)
export_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help='Export a checkpoint for another project.'
)

Model = Annotated[
    str,
    typer.Argument(metavar='DIR | ORG/NAME', help='A directory, or a repository on the Hub.'),
]
Folder = Annotated[Path, typer.Argument(metavar='DIR', help='The directory of the checkpoint.')]
NewRun = Annotated[Path, typer.Argument(metavar='OUT', help='The run directory to create.')]
Source = Annotated[
    Path,
    typer.Argument(
        metavar='RUN',
        help="A run's directory (newest checkpoint), or RUN/STEP.",
    ),
]
NewFolder = Annotated[Path, typer.Argument(metavar='OUT', help='The directory to create.')]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar='KEY=VALUE',
        help='Overrides for the run, for example mesh.model=8 train.dtype=bfloat16.',
    ),
]
if TYPE_CHECKING:
    Family = str
else:
    Family = Literal[tuple(ARCHITECTURES)]
TransformerImpl = Literal['transformer_engine', 'local']
Dtype = Literal['float32', 'bfloat16', 'float16']


@import_app.command('hf')
def import_hf(
    source: Model,
    out: NewRun,
    overrides: Overrides = None,
    revision: Annotated[
        str | None,
        typer.Option(help='Branch, tag or commit of the repository; default: main.'),
    ] = None,
) -> None:
    """Create a run at step 0 from a Hugging Face model.

    The model is a directory with config.json, *.safetensors and tokenizer.json, or a repository on
    the Hub, given as ORG/NAME. Repositories are downloaded with huggingface_hub, which reads
    HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE.
    """
    log_to_terminal()
    from megajax.interop.folder import check_new
    from megajax.interop.huggingface.directories import import_huggingface
    from megajax.interop.huggingface.hub import find_source

    check_new(out)  # fails before the download
    folder, repository = find_source(source, revision)
    import_huggingface(folder, out, overrides or (), repository=repository)
    if repository is not None:
        print(f'repository {repository}')
    print(f'run        {out}\ncheckpoint {out}/checkpoints/0')
    if (out / TEMPLATE).is_file():
        print(f'chat       {out / TEMPLATE}, the default for training and generate --chat')


@export_app.command('hf')
def export_hf(
    source: Source,
    out: NewFolder,
    family: Annotated[
        Family | None,
        typer.Option(
            help='Default: the family of the import with which the training began, otherwise the '
            'first that fits.'
        ),
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help='Default: the dtype of an import that was not trained, otherwise float32.'
        ),
    ] = None,
    shard_gb: Annotated[
        float | None,
        typer.Option(min=0, help=f'Maximum file size in GB; default: {DEFAULT_SHARD_GB}.'),
    ] = None,
    adapter: Annotated[
        bool, typer.Option('--adapter', help='Write only the LoRA adapters, in PEFT format.')
    ] = False,
    base: Annotated[
        str | None, typer.Option(help='With --adapter: the base model for PEFT.')
    ] = None,
) -> None:
    """Write a Hugging Face directory for transformers and vLLM.

    The directory appears only when it is complete. Adapters are merged into the weights.
    """
    merged = {'--dtype': dtype, '--shard-gb': shard_gb}
    for option, value in (merged if adapter else {'--base': base}).items():
        if value is not None:
            fix = 'with --adapter: remove it' if adapter else 'without --adapter: add --adapter'
            raise ConfigError(f'{option} {value} has no effect {fix}')
    _on_the_host()
    if adapter:
        from megajax.interop.huggingface.adapters import export_adapters

        print(f'{out}: adapters of {export_adapters(source, out, base=base, family=family)}')
        return
    from megajax.interop.huggingface.directories import export_huggingface

    as_family, in_dtype = export_huggingface(
        source,
        out,
        family=family,
        dtype=dtype,
        shard_bytes=_bytes(DEFAULT_SHARD_GB if shard_gb is None else shard_gb),
    )
    print(f'{out}: {as_family} in {in_dtype}')


@import_app.command('megatron')
def import_megatron_lm(
    folder: Folder,
    out: NewRun,
    overrides: Overrides = None,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(min=1, help='Expected tensor-parallel size; default: not checked.'),
    ] = None,
    pipeline_parallel: Annotated[
        int | None,
        typer.Option(min=1, help='Expected number of pipeline stages; default: not checked.'),
    ] = None,
    finetune: Annotated[
        bool,
        typer.Option(
            '--finetune', help="Begin a new corpus: do not store the checkpoint's consumed samples."
        ),
    ] = False,
) -> None:
    """Create a run at step 0 from a Megatron-LM checkpoint.

    The checkpoint is a torch_dist checkpoint, or one with a file per rank. The files
    mp_rank_TT/model_optim_rng.pt of all ranks are merged, including pipeline stages
    (mp_rank_TT_PPP) and virtual stages.
    """
    log_to_terminal()
    from megajax.interop.megatron.ranks import ITERATION, import_megatron
    from megajax.runtime.checkpoint.record import read_record

    import_megatron(
        folder,
        out,
        overrides or (),
        ranks=tensor_parallel,
        stages=pipeline_parallel,
        finetune=finetune,
    )
    record = read_record(out / 'checkpoints' / '0')
    missing = 'not stored (--finetune)' if finetune else 'not in the checkpoint'
    consumed = missing if record.samples is None else f'{record.samples:,}'
    print(f'iteration  {record.data.get(ITERATION, 0)}, consumed samples: {consumed}')
    print(f'run        {out}\ncheckpoint {out}/checkpoints/0')


@export_app.command('megatron')
def export_megatron_lm(
    source: Source,
    out: NewFolder,
    tensor_parallel: Annotated[int, typer.Option(min=1, help='Tensor-parallel size.')],
    pipeline_parallel: Annotated[int, typer.Option(min=1, help='Number of pipeline stages.')] = 1,
    virtual_stages: Annotated[
        int, typer.Option(min=1, help='Number of chunks of layers per stage.')
    ] = 1,
    transformer_impl: Annotated[
        TransformerImpl,
        typer.Option(help="The --transformer-impl of Megatron-LM, which names a layer's tensors."),
    ] = 'transformer_engine',
) -> None:
    """Write one checkpoint file per Megatron-LM rank.

    The files are mp_rank_TT/model_optim_rng.pt; with several pipeline stages, the folders are
    mp_rank_TT_PPP. The directory appears when it is complete. The command prints the arguments that
    Megatron-LM needs to load the files.
    """
    _on_the_host()
    from megajax.interop.megatron.export import export_megatron

    arguments = export_megatron(
        source,
        out,
        ranks=tensor_parallel,
        stages=pipeline_parallel,
        virtual_stages=virtual_stages,
        transformer_impl=transformer_impl,
    )
    of_stages = f' x {pipeline_parallel} pipeline stages' if pipeline_parallel > 1 else ''
    print(f'{out}: {tensor_parallel} ranks{of_stages} in float32')
    print(f'load with  {arguments}')


def _bytes(gigabytes: float) -> int:
    return int(min(gigabytes * 1e9, sys.maxsize))  # infinite if there is no limit


def _on_the_host() -> None:
    os.environ['JAX_PLATFORMS'] = 'cpu'  # no device is needed, and a run may be using them
    log_to_terminal()
