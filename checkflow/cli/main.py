"""The command line: reads options, calls the planner or the runtime, prints tables, and turns errors into exit codes.

:func:`main` is the only place where errors become one line and an exit code. Heavy imports wait until they are needed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from checkflow.cli import checkpoints, demo, options, planning, probe, report, simulate, torture
from checkflow.cli.console import (
    FAILED,
    FOUND,
    INFEASIBLE,
    STOPPED,
    USAGE,
    complain,
    expect_page,
    print_json,
    print_line,
    print_parts,
    stoppable,
    warnings_shown,
    write_page,
    write_trace,
)
from checkflow.cli.options import Formulation, GranularityName, PolicyName, SolverName
from checkflow.cli.progress import working
from checkflow.core.errors import CheckflowError, CorruptCheckpointError, InfeasibleError, StoppedError
from checkflow.core.paths import refuse_url

# What typer's argument parser raises; typer does not export the class.
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="checkflow",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Plan and prove checkpoints of every training iteration.",
)


class _Command(TyperCommand):
    """Every command: a URL is refused before the command does anything, whichever argument or option has it."""

    def invoke(self, context: Any) -> Any:
        for name, given in context.params.items():
            if name != "command":  # of torture: what another program gets is its own affair
                for value in given if isinstance(given, list | tuple) else (given,):
                    if isinstance(value, str | Path):
                        refuse_url(value)
        return super().invoke(context)


def entry() -> None:
    code = main()
    if code > STOPPED:
        # A solver's thread may still run, and C++ aborts when such a thread is destroyed. All clean-up is done.
        with contextlib.suppress(OSError):  # the reader may have been stopped, too
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code.

    0: done, or a plan that keeps all limits. 1: an error, one line on standard error. 2: wrong usage. 3: no plan keeps
    the limits; the explanation is on standard error, and in the JSON. 130: interrupted by Ctrl-C; 143 and 129: ended by
    SIGTERM and SIGHUP. ``torture`` has its own 3 and 4.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    ours = arguments.index("--") if "--" in arguments else len(arguments)  # the rest is another command
    debug = "--debug" in arguments[:ours]
    if debug:
        arguments = [argument for argument in arguments[:ours] if argument != "--debug"] + arguments[ours:]
    try:
        with stoppable(), warnings_shown():
            code = typer.main.get_command(app).main(args=arguments, prog_name="checkflow", standalone_mode=False)
            sys.stdout.flush()
    except BrokenPipeError:
        # Our output's reader has gone; Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except StoppedError as stopped:
        complain("interrupted" if stopped.number == signal.SIGINT else "terminated")
        return STOPPED + stopped.number
    except (KeyboardInterrupt, typer.Abort):  # outside of our handlers, or from a library
        complain("interrupted")
        return STOPPED + signal.SIGINT
    except OSError as error:  # our files raise CheckflowError: this is the output
        complain(f"cannot write the answer: {error.strerror or error}")
        return FAILED
    except Exception as error:  # noqa: BLE001 - the one place where errors become exit codes
        if debug:
            traceback.print_exc()
        return _report(error, debug, command=next(iter(arguments), ""))
    return code if isinstance(code, int) else FOUND


def _report(error: Exception, debug: bool, command: str) -> int:
    """Print an error as one line on standard error, and return its exit code."""
    if isinstance(error, USAGE_ERROR):
        complain(_usage_text(error))
        return USAGE
    if isinstance(error, CheckflowError):
        complain(f"{error}{_next_command(error, command)}")
        return INFEASIBLE if isinstance(error, InfeasibleError) else FAILED
    hint = "" if debug else " (--debug shows where)"
    complain(f"internal error: {type(error).__name__}: {' '.join(str(error).split())}{hint}")
    return FAILED


def _next_command(error: CheckflowError, command: str) -> str:
    """What to run next, where the error itself does not name it."""
    of_directory = command in ("diff", "export", "ls", "verify")  # import: of another program's files, too
    if of_directory and isinstance(error, CorruptCheckpointError) and "checkflow verify" not in str(error):
        return "; checkflow verify DIRECTORY shows which checkpoints are whole"
    return ""


def _usage_text(error: Any) -> str:
    text = " ".join(error.format_message().split()).rstrip(".")
    context = getattr(error, "ctx", None)
    return f"{text}; see: {context.command_path if context else 'checkflow'} --help"


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="show the traceback of an error; any position")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="print the versions of checkflow, Python, torch and the solvers")
    ] = False,
) -> None:
    if version:
        for line in _versions():
            print_line(line)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(USAGE)


def _versions() -> list[str]:
    """Checkflow's version, which scripts cut from the first line, and those of what its answers depend on."""
    import platform
    from importlib import metadata

    import checkflow

    # Imports would take seconds.
    found = [f"checkflow {checkflow.__version__}", f"Python {platform.python_version()}"]
    for name, package in (("torch", "torch"), ("HiGHS", "highspy"), ("Gurobi", "gurobipy"), ("PuLP", "pulp")):
        try:
            found.append(f"{name} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return found


@app.command()
def plan(
    context: typer.Context,
    model: options.Model,
    batch_size: options.BatchSize = None,
    settings: options.Settings = None,
    optimizer: options.OptimizerOption = None,
    device: options.DeviceOption = "RTX 3090",
    bandwidth: options.Bandwidth = None,
    link_share: options.LinkShare = 1.0,
    memory_limit: options.MemoryLimit = None,
    extra_memory: options.ExtraMemory = None,
    relax_memory: options.RelaxMemory = False,
    formulation: options.FormulationOption = Formulation.AUTO,
    policy: options.PolicyOption = PolicyName.DIRECT,
    granularity: options.GranularityOption = GranularityName.SEGMENT,
    chunk_size: options.ChunkSize = options.CHUNK_BYTES,
    solver: options.SolverOption = SolverName.AUTO,
    time_limit: options.TimeLimit = 60.0,
    max_interval: options.MaxInterval = None,
    overhead: options.Overhead = 0.035,
    ranks: options.RanksOption = None,
    mesh: options.Mesh = None,
    parallel: options.ParallelOption = None,
    file: options.Output = None,
    as_json: options.Json = False,
) -> int:
    """Trace a training step and schedule its checkpoint."""
    from checkflow.cli.tables import plan as plan_table
    from checkflow.core import plan as plans

    options.check_solver_asked(formulation, solver)
    chosen = planning.device_of(device)
    request = planning.request_of(
        chosen,
        bandwidth,
        memory_limit,
        link_share,
        extra_memory_bytes=extra_memory,
        relax_memory=relax_memory,
        policy=policy.value,
        formulation=formulation.value,
        solver=solver.value,
        time_limit_seconds=time_limit,
        chunk_bytes=chunk_size,
        max_interval=max_interval,
        overhead=overhead,
    )
    subject = planning.subject_of(model, batch_size, settings, optimizer)
    planner = planning.planner_for(device, planning.ranks_of(ranks, mesh, parallel))
    planned = planner(subject, chosen, request, granularity)
    made = planned.outcome.plan
    if made is not None and file is not None:
        plans.save(made, file)
    if not options.is_given(context, "device"):
        complain(f"no --device given: this plan is for the {chosen.name}; --device auto: this machine, measured")
    if as_json:
        print_json(plan_table.plan_json(planned))
    else:
        print_parts(plan_table.plan_tables(planned))
    if made is None:
        complain(planned.outcome.explanation)
        if file is not None and file.exists():
            complain(f"{file} was not written; what it holds was there before")
        return INFEASIBLE
    if not as_json:
        by = "that a job runs by" if ranks is None else "for a look at it: jobs of several ranks run by none yet"
        print_line(f"plan written to {file}" if file is not None else f"-o FILE writes the plan {by}")
    return FOUND


@app.command()
def check(
    context: typer.Context,
    plan_file: options.PlanFile,
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="trace it anew and compare")] = None,
    batch_size: options.BatchSize = None,
    settings: options.Settings = None,
    optimizer: options.OptimizerOption = None,
    as_json: options.Json = False,
) -> int:
    """Replay a plan; with MODEL, check that it is still the plan of that model."""
    from checkflow.cli.tables import show as show_table
    from checkflow.core import plan as plans
    from checkflow.planner.schedule.replay import check_plan

    if model is None:
        options.refuse_given(context, besides=("plan_file", "as_json"), why="it is for a MODEL to compare with")
    read = plans.load(plan_file)
    replay = check_plan(read)
    if model is not None:
        from checkflow.planner.pipeline import check_model

        with working(f"tracing {model}"):
            check_model(read, planning.subject_of(model, batch_size, settings, optimizer))
    if as_json:
        print_json(show_table.check_json(read, replay))
    else:
        print_line(show_table.check_line(read, replay))
    return FOUND


@app.command()
def show(
    plan_file: options.PlanFile,
    html: options.Html = None,
    perfetto: options.Perfetto = None,
    as_json: options.Json = False,
) -> int:
    """Show a plan on one screen: the link and the memory over time, the peak, and what binds."""
    from checkflow.cli.tables import show as show_table
    from checkflow.core import plan as plans
    from checkflow.planner.schedule.compare import binding_interval
    from checkflow.planner.schedule.replay import check_plan

    expect_page(html)
    read = plans.load(plan_file)
    replay = check_plan(read)
    if as_json:
        print_json(show_table.show_json(read, replay, *binding_interval(read)))
    else:
        print_parts(show_table.show_lines(read, replay, *binding_interval(read)))
    if html is not None:
        from checkflow.views.plan import plan_page

        write_page(plan_page(read, replay), html, said=not as_json)
    if perfetto is not None:
        from checkflow.views.perfetto import plan_trace

        write_trace(plan_trace(read), perfetto, said=not as_json)
    return FOUND


@app.command()
def compare(
    context: typer.Context,
    subjects: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL|PLAN|REPORT...",
            help="models, plan files, or reports of runs (.json, or their checkpoints' directory)",
        ),
    ],
    batch_size: options.BatchSize = None,
    settings: options.Settings = None,
    optimizer: options.OptimizerOption = None,
    device: options.DeviceOption = "RTX 3090",
    bandwidth: options.Bandwidth = None,
    link_share: options.LinkShare = 1.0,
    memory_limit: options.MemoryLimit = None,
    policy: options.PolicyOption = PolicyName.DIRECT,
    granularity: options.GranularityOption = GranularityName.SEGMENT,
    max_interval: options.MaxInterval = None,
    overhead: options.Overhead = 0.035,
    html: options.Html = None,
    as_json: options.Json = False,
) -> int:
    """Compare synchronous checkpoints, CheckFreq's modes and checkflow; or a run with its plan.

    A plan file brings its own device and link. For a run's report (report.json beside the checkpoints), the plan's
    figures are shown beside the measured ones: those of the plan that ran, or of a plan file given as well.
    """
    from checkflow.cli.tables import plan as plan_table
    from checkflow.core import plan as plans
    from checkflow.planner.schedule.compare import compare_plan
    from checkflow.planner.schedule.replay import check_plan

    subjects = report.reports_of_directories(subjects)
    if all(subject.endswith(".json") for subject in subjects):
        options.refuse_given(context, besides=("subjects", "html", "as_json"), why="plan files bring their own")
    if report.any_report(subjects):
        options.refuse_given(
            context, besides=("subjects", "as_json"), why="of a run: checkflow report DIRECTORY --html FILE"
        )
        report.compare_reports(subjects, as_json=as_json)
        return FOUND
    expect_page(html)
    chosen = planning.device_of(device)
    planner = planning.planner_for(device)
    request = planning.request_of(
        chosen, bandwidth, memory_limit, link_share, policy=policy.value, max_interval=max_interval, overhead=overhead
    )
    rows = []
    for subject in subjects:
        if subject.endswith(".json"):
            read = plans.load(subject)
            check_plan(read)  # its claims are printed beside our figures
            rows.append(compare_plan(subject, read))
        else:
            asked = planning.subject_of(subject, batch_size, settings, optimizer)
            from checkflow.planner.pipeline import compare_model

            rows.append(compare_model(planner(asked, chosen, request, granularity)))
    if as_json:
        print_json(plan_table.comparison_json(rows))
    else:
        print_parts(plan_table.comparison_tables(rows))
    if html is not None:
        from checkflow.views.comparison import comparison_page

        write_page(comparison_page(rows), html, said=not as_json)
    missing = [row for row in rows if row.checkflow_peak_bytes is None]
    for row in missing:
        complain(f"{row.source}: {row.explanation}")
    return INFEASIBLE if missing else FOUND


app.command()(report.report)
app.command()(simulate.simulate)
app.command()(probe.probe)
app.command()(demo.demo)
app.command()(checkpoints.ls)
app.command()(checkpoints.verify)
app.command()(checkpoints.diff)
app.command()(checkpoints.export)
app.command()(checkpoints.memory)
app.command("import")(checkpoints.import_)
app.command(context_settings={"allow_interspersed_args": False})(torture.torture)
for _registered in app.registered_commands:
    _registered.cls = _Command
