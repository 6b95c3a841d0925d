"""URLs in place of paths: refused in one line, by every entry point that takes a path."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
import typer

import checkflow
from checkflow import integrations, shards
from checkflow.cli.main import FAILED, app, main
from checkflow.core.errors import UnsupportedError
from checkflow.core.paths import refuse_url
from checkflow.runtime.weights.importer import import_weights

URLS = (
    "s3://bucket/run", "S3://b", "gs://b/a", "az://c/x", "hdfs://node:9000/x", "hdfs:/x", "file:///tmp/x", "foo://x",
    "git+ssh://x/y", " s3://b", Path("s3://b"), Path("memory://x/y"),
)  # fmt: skip
PATHS = (
    ".", "checkpoints", "a:/b", "./s3:/b", "run:1/x", "x y:/z", "3s:/b", "here/s3://b", Path("/tmp/s3:/b"),
    Path("s3:"), "m.py:build", "runs@12", "C:\\x",
)  # fmt: skip
NO_PATH = ("command", "settings")  # what a tortured job gets; a model's own arguments


@pytest.mark.parametrize("url", URLS, ids=str)
def test_urls_are_refused_in_one_line(url: str | Path) -> None:
    with pytest.raises(UnsupportedError, match=r"^\S+ is a URL, and checkflow works in directories of this machine: "):
        refuse_url(url)


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_paths_are_not(path: str | Path) -> None:
    refuse_url(path)


def test_the_message_has_the_url_without_its_secrets() -> None:
    with pytest.raises(UnsupportedError, match=r"^https://host/a is a URL") as refused:
        refuse_url("https://user:secret@host/a?X-Amz-Signature=secret\nmore")
    assert "secret" not in str(refused.value)
    with pytest.raises(UnsupportedError, match=r"^s3://b/run is a URL"):
        refuse_url(Path("s3://b/run"))  # which pathlib has made s3:/b/run


# The command line: whatever commands and parameters there are


def parameters() -> list[Any]:
    """Every parameter that is text or a path: (command, parameter)."""
    group: Any = typer.main.get_command(app)
    found = []
    for registered in app.registered_commands:
        assert registered.callback is not None
        command = group.commands[registered.name or registered.callback.__name__]
        hints = get_type_hints(registered.callback)  # such as list[str] | None
        for one in command.params:
            kinds = get_args(hints[one.name]) or (hints[one.name],)
            if {str, Path, list[str]} & {*kinds, hints[one.name]} and one.name not in NO_PATH:
                found.append(pytest.param(command, one, id=f"{command.name} {one.name}"))
    return found


@pytest.mark.every_case
@pytest.mark.parametrize(("command", "parameter"), parameters())
def test_every_command_refuses_them(
    command: Any, parameter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options, arguments = [], []
    for one in command.params:
        if one is parameter or one.required:
            value = "s3://bucket/run" if one is parameter else "4h" if one.name == "mtbf" else "true"
            if one.param_type_name == "argument":
                arguments.append(value)
            else:
                options += [one.opts[0], value]
    code = main([command.name, *options, *arguments])
    said = capsys.readouterr()
    assert (code, said.out) == (FAILED, "")
    assert said.err.startswith("checkflow: s3://bucket/run is a URL, and checkflow works in directories")
    assert said.err.count("\n") == 1
    assert not any(tmp_path.iterdir())


def test_commands_with_paths_are_among_them() -> None:
    found = {str(one.id) for one in parameters()}
    assert found >= {
        "ls directory", "verify path", "diff first", "diff second", "export path", "export output", "import source",
        "import directory", "show plan_file", "check plan_file", "report directory", "compare subjects", "plan model",
        "plan file", "plan device", "simulate page", "probe file", "probe directory", "torture directory",
        "torture log", "report html", "show perfetto", "memory directory",
    }  # fmt: skip


def test_what_a_tortured_job_gets_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    main(["torture", "--kills", "1", "--", "true", "s3://bucket/data"])
    assert "is a URL" not in capsys.readouterr().err


# Python: every public function and class with a parameter that is a path


def _checkpointer(url: Any, **more: Any) -> None:
    model = torch.nn.Linear(2, 2)
    checkflow.Checkpointer(model, torch.optim.SGD(model.parameters(), lr=0.1), directory=url, **more)


def _torchtitan(url: Any) -> None:
    from checkflow.integrations.torchtitan import CheckpointManager

    model = torch.nn.Linear(2, 2)
    config = CheckpointManager.Config(enable=True, folder=url)
    CheckpointManager(
        config, dataloader=None, model_parts=[model], optimizers=[], lr_schedulers=None, states={}, base_folder="out"
    )


WAYS: dict[str, Callable[[Any], object]] = {
    "checkflow.Checkpointer directory": _checkpointer,
    "checkflow.Checkpointer plan": lambda url: _checkpointer("here", plan=url),
    "checkflow.peek directory": checkflow.peek,
    "checkflow.load_weights source": lambda url: checkflow.load_weights(torch.nn.Linear(2, 2), url),
    "checkflow.shards.save_shard directory": lambda url: shards.save_shard(url, 1, 0, 1, run_id="a"),
    "checkflow.shards.load_shard directory": lambda url: shards.load_shard(url, 0, 1),
    "checkflow.shards.load_slices directory": lambda url: shards.load_slices(url, {}),
    "checkflow.shards.newest_step directory": lambda url: shards.newest_step(url),
    "checkflow.shards.describe_version directory": lambda url: shards.describe_version(url, 3),
}


def _module(name: str) -> Any:
    return importlib.import_module(f"checkflow.integrations.{name}")


WAYS |= {
    "checkflow.integrations.dcp.Writer directory": lambda url: _module("dcp").Writer(url),
    "checkflow.integrations.dcp.Reader directory": lambda url: _module("dcp").Reader(url),
    "checkflow.integrations.lightning.CheckflowCallback directory": lambda url: _module("lightning").CheckflowCallback(
        url
    ),
    "checkflow.integrations.transformers.attach directory": lambda url: _module("transformers").attach(object(), url),
}
MORE: dict[str, Callable[[Any], object]] = {
    "a checkpoint_id of DCP": lambda url: _module("dcp").Writer("here").reset(f"{url}/step-10"),
    "the folder of torchtitan's settings": _torchtitan,
    "import": lambda url: import_weights(object(), url),  # type: ignore[arg-type]
}


def public() -> Iterator[tuple[str, Any]]:
    for module in (checkflow, shards):
        for name in module.__all__:
            yield f"{module.__name__.replace('.runtime', '')}.{name}", getattr(module, name)
    for found in pkgutil.iter_modules(integrations.__path__, "checkflow.integrations."):
        module = importlib.import_module(found.name)
        for name, one in vars(module).items():
            if getattr(one, "__module__", "") == found.name and not name.startswith("_"):
                yield f"{found.name}.{name}", one


def test_every_path_of_the_interface_is_tried() -> None:
    found = set()
    for name, one in public():
        if callable(one) and not (isinstance(one, type) and issubclass(one, BaseException)):
            for parameter in inspect.signature(one).parameters.values():
                if "PathLike" in str(parameter.annotation):
                    found.add(f"{name} {parameter.name}")
    # accelerate's hands its directory to Checkpointer
    assert found - {"checkflow.integrations.accelerate.checkpointer_of directory"} == WAYS.keys()


@pytest.mark.every_case
@pytest.mark.parametrize("url", ["s3://bucket/run", Path("s3://bucket/run")], ids=["text", "Path"])
@pytest.mark.parametrize("way", [*WAYS, *MORE])
def test_every_entry_point_refuses_them(
    way: str, url: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if way in MORE:
        url = str(url)
    with pytest.raises(UnsupportedError, match=r"^s3://bucket/run.* is a URL, and checkflow works in directories"):
        (WAYS | MORE)[way](url)
    assert not any(tmp_path.iterdir())
