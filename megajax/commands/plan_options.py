"""The arguments and options of `megajax plan`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from megajax.core.hardware.records import record_name

# No value may be infinite.
MOST_BYTES = 10**18  # per second
MOST_COST = 10**6
MOST_GPUS = 2**20
MOST_HOURS = 10**12
MOST_SEQUENCES = 10**6
MOST_TOKENS = 10**18

ConfigSource = Annotated[
    str | None, typer.Argument(metavar='CONFIG', help='A preset or a YAML file.')
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar='KEY=VALUE', help='For example train.seq_len=4096.'),
]
Gpu = Annotated[
    str,
    typer.Option(
        callback=record_name,
        help='a100, b200, h100, ..., or a YAML file from plan calibrate.',
    ),
]
NumGpus = Annotated[
    int | None,
    typer.Option(
        min=1, max=MOST_GPUS, help="Number of GPUs; default: the size of the config's mesh."
    ),
]
GpusPerHost = Annotated[
    int | None,
    typer.Option(
        min=1, max=MOST_GPUS, help='GPUs per host; default: the usual number for the GPU.'
    ),
]
LinkOption = Annotated[
    Literal['nvlink', 'pcie'] | None,
    typer.Option(help='Link between the GPUs of a host; default: the usual one for the GPU.'),
]
NumTokens = Annotated[
    float | None,
    typer.Option(
        min=1,
        max=MOST_TOKENS,
        help='Tokens to train on, such as 300e9; with --generate, to generate.',
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(min=1, max=MOST_SEQUENCES, help='Sequences per step; default: train.batch_size.'),
]
Program = Annotated[
    Literal['megajax', 'megatron', 'torchtitan', 'maxtext'],
    typer.Option(help='Software whose step is timed: megajax, Megatron-Core, torchtitan, MaxText.'),
]
Price = Annotated[
    float | None,
    typer.Option(min=0.01, max=MOST_COST, help='Price of one GPU-hour, in any currency.'),
]
StorageRate = Annotated[
    float | None,
    typer.Option(
        min=1,
        max=MOST_BYTES,
        help='Bytes/s that all hosts write in total; default: 1e9 per host.',
    ),
]
GpuHoursToFailure = Annotated[
    float | None,
    typer.Option(
        min=1,
        max=MOST_HOURS,
        help='Mean GPU-hours between failures; default: as reported for Llama 3.',
    ),
]
VerifyOption = Annotated[
    bool,
    typer.Option(
        '--verify', help='Compile the step for the GPU and compare its memory with the plan.'
    ),
]
JsonFile = Annotated[Path | None, typer.Option(help='Write the complete result to this file.')]
LayoutFile = Annotated[
    Path | None, typer.Option(help='Write the fastest layout to this file as a config.')
]
RooflinePlot = Annotated[
    Path | None,
    typer.Option(help='Plot the matmuls under the roofline: .png, .svg or .pdf.'),
]
SchedulePlot = Annotated[
    Path | None,
    typer.Option(help='Plot the pipeline schedule: .png, .svg or .pdf.'),
]
ScalingPlot = Annotated[Path | None, typer.Option(help='Plot MFU against the number of GPUs.')]
TableName = Annotated[
    str | None,
    typer.Option(help="Compare a published table with predictions; 'all' summarizes all tables."),
]
Imbalance = Annotated[
    float | None,
    typer.Option(
        min=1,
        max=MOST_GPUS,
        help='Tokens of the busiest device of an expert-parallel group over the mean; default: '
        'expert_load of the run, if CONFIG is the config.yaml of a run, else 1.',
    ),
]
CompareOption = Annotated[
    str | None,
    typer.Option(
        metavar='GPU[=PRICE],...',
        help='Compare GPUs, with prices of a GPU-hour: h100=2.5,h200=3.2.',
    ),
]
WhatIfOption = Annotated[
    bool,
    typer.Option(
        '--what-if', help='Also say what 8-bit moments and activations in host memory would save.'
    ),
]
GenerateOption = Annotated[
    bool,
    typer.Option('--generate', help='Plan text generation: memory and latency.'),
]
PromptTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        help='Prompt length in tokens, with --generate; default: 1024, or what the model supports.',
    ),
]
NumPrompts = Annotated[
    int | None, typer.Option(min=1, help='Prompts per batch, with --generate; default: 1.')
]
