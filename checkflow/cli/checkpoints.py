"""Commands on checkpoints: ``checkflow ls | verify | diff | export | memory | import``."""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Annotated

import typer

from checkflow.cli import options
from checkflow.cli.console import print_json, print_line, print_parts
from checkflow.cli.progress import working

_WHERE = "a directory of checkpoints, one of them, DIRECTORY@STEP, or DIRECTORY@best"
Where = Annotated[str, typer.Argument(metavar="PATH", help=_WHERE)]
DAMAGED = DIFFERENT = 1


class ExportFormat(enum.StrEnum):
    TORCH = "torch"
    SAFETENSORS = "safetensors"
    DCP = "dcp"


def ls(directory: Where = ".", as_json: options.Json = False) -> int:
    """List the checkpoints of a directory: steps, sizes, age, and whether each can be restored. Exit code 1 if one
    cannot.

    Reads names, sizes and manifests, not the data: ``verify`` does that.
    """
    from checkflow.cli.tables import checkpoints as checkpoints_table
    from checkflow.runtime.inspect import home_of, list_directory, running_job
    from checkflow.runtime.memory_tier.orphans import left_step

    listed, running = list_directory(directory), running_job(home_of(directory))
    left = left_step(home_of(directory)) if running is None else None
    if as_json:
        print_json(checkpoints_table.listed_json(directory, listed, running, left))
    else:
        print_parts(checkpoints_table.listed_tables(directory, listed, running, left))
    return DAMAGED if any(one.fault for one in listed if one.kind == "checkpoint") else 0


def verify(path: Where = ".", as_json: options.Json = False) -> int:
    """Compare every byte with its checksum. Exit code 1 if one is damaged."""
    from checkflow.cli.tables import checkpoints as checkpoints_table
    from checkflow.core.units import format_size
    from checkflow.runtime.inspect import choose_all, size_of
    from checkflow.runtime.inspect import verify as hold

    done = []
    read_bytes = 0
    with working("verifying") as say:
        chosen = choose_all(path)
        whole_bytes = sum(map(size_of, chosen))

        def progress(size_bytes: int) -> None:
            nonlocal read_bytes
            read_bytes += size_bytes
            words = f"{one.name}, {format_size(read_bytes)} of {format_size(whole_bytes)}"
            say(words, read_bytes, max(whole_bytes, read_bytes))

        for one in chosen:
            found = hold(one, progress)
            if not found.fault or one.exists():  # a running job may have deleted it meanwhile
                done.append(found)
    if as_json:
        print_json(checkpoints_table.verified_json(done))
    else:
        for line in checkpoints_table.verified_lines(done):
            print_line(line)
    return DAMAGED if any(one.fault for one in done) else 0


def diff(
    first: Where,
    second: Where,
    as_json: options.Json = False,
    quiet: Annotated[bool, typer.Option("--exit-code", help="exit with 1 if they differ")] = False,
) -> int:
    """Compare two checkpoints: tensors that differ and by how much, and other differences."""
    from checkflow.cli.tables import checkpoints as checkpoints_table
    from checkflow.runtime.inspect import choose, compare

    with working("comparing") as say:
        found = compare(choose(first), choose(second), say)
    if as_json:
        print_json(checkpoints_table.differences_json(found))
    else:
        print_parts(checkpoints_table.differences_tables(found))
    return DIFFERENT if quiet and (found.tensors or found.extra) else 0


def export(
    path: Where,
    output: Annotated[
        Path,
        typer.Option("-o", "--output", metavar="FILE", help="FILE.pt, FILE.safetensors, or a folder for DCP"),
    ],
    form: Annotated[ExportFormat | None, typer.Option("--format", help="default: as the file's name says")] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="for safetensors: which of several models")
    ] = None,
    flat: Annotated[bool, typer.Option("--flat", help="for DCP: names without a prefix, as torchtitan saves")] = False,
    force: Annotated[bool, typer.Option("--force", help="replace an existing file or folder")] = False,
) -> None:
    """Write a checkpoint as other tools read it, with every checksum verified.

    torch: model and optimizer state dicts for torch.load. safetensors: one model, for serving. dcp: a folder for
    torch.distributed.checkpoint.
    """
    from checkflow.runtime.format.manifest import owner_of
    from checkflow.runtime.inspect import choose
    from checkflow.runtime.store.reader import open_checkpoint
    from checkflow.runtime.weights import exporter

    chosen = exporter.format_of(output) if form is None else form.value
    if chosen is None:
        raise typer.BadParameter(f"{output} does not say in which format to write: pass --format")
    if flat and chosen != "dcp":
        raise typer.BadParameter(f"--flat is for a folder of DCP, and {output} is for {chosen}")
    with working(f"exporting to {output}") as say, open_checkpoint(choose(path)) as checkpoint:
        exporter.export(checkpoint, output, chosen, model=model, replace=force, flat=flat, progress=say)
    print_line(f"{checkpoint.path} written to {output}")
    owners = map(owner_of, checkpoint.manifest.tensors)
    if own := {name for rank, name in owners if rank is not None}:
        whose = "1 tensor has values of its own" if len(own) == 1 else f"{len(own)} tensors have values of their own"
        print_line(f"{whose} on each rank: those of the lowest rank are written")


def memory(
    directory: Annotated[
        str | None, typer.Argument(metavar="[DIRECTORY]", help="show only this checkpoint directory's job")
    ] = None,
    free: Annotated[bool, typer.Option("--free", help="free what your dead jobs hold (root: all dead jobs)")] = False,
    force: Annotated[bool, typer.Option("--force", help="with --free: free what storage lacks, too")] = False,
    as_json: options.Json = False,
) -> None:
    """List the shared memory of jobs, dead ones first, and free it.

    The next run in a dead job's directory resumes from its memory. Memory of a living process is never freed; what
    storage lacks is freed only with --force.
    """
    from checkflow.cli.tables import checkpoints as checkpoints_table
    from checkflow.runtime.memory_tier.orphans import list_left
    from checkflow.runtime.memory_tier.recovery import free as give_back

    if force and not free:
        raise typer.BadParameter("--force is for --free")
    found = list_left()
    if directory is not None:
        found = tuple(one for one in found if one.directory == os.path.realpath(directory))
    outcomes = [give_back(one, force=force) for one in found] if free else None
    if as_json:
        print_json(checkpoints_table.memory_json(found, outcomes))
    else:
        print_parts(checkpoints_table.memory_tables(found, outcomes))


def import_(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="a safetensors file or its index, a DCP folder, a torch.save file, or a checkpoint"
        ),
    ],
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="a checkpoint directory, made if missing")],
    step: Annotated[int, typer.Option("--step", metavar="N", min=0, max=10**18, help="the checkpoint's step")] = 0,
    form: Annotated[ExportFormat | None, typer.Option("--format", help="default: as the name says")] = None,
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="the job's name for the model")] = "model",
    optimizer: Annotated[
        str, typer.Option("--optimizer", metavar="NAME", help="the job's name for the optimizer")
    ] = "optimizer",
    weights_only: Annotated[bool, typer.Option("--weights-only", help="leave the optimizer's state out")] = False,
    key: Annotated[
        str | None, typer.Option("--key", metavar="NAME", help="which part of a source with several models")
    ] = None,
    keep_names: Annotated[bool, typer.Option("--keep-names", help="keep a leading module. in every name")] = False,
    as_json: options.Json = False,
) -> None:
    """Make a checkpoint of weights from elsewhere, for a job to start from.

    A job with resume="auto" takes from it the weights and, if SOURCE is a DCP folder with them, its optimizer's
    moments. Schedulers, place in the data and random numbers start anew. No existing checkpoint is replaced.
    """
    from checkflow.cli.tables import checkpoints as checkpoints_table
    from checkflow.runtime.weights import importer
    from checkflow.runtime.weights.source import open_weights
    from checkflow.runtime.weights.weights import clean, without_optimizer

    with (
        working(f"importing {source}") as say,
        open_weights(source, None if form is None else form.value, key=key) as weights,
    ):
        done = importer.import_weights(
            clean(without_optimizer(weights) if weights_only else weights, strip=not keep_names),
            directory, step=step, model=model, optimizer=optimizer, progress=say,
        )  # fmt: skip
    if as_json:
        print_json(checkpoints_table.imported_json(done))
    else:
        for line in checkpoints_table.imported_lines(done):
            print_line(line)
