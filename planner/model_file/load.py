"""From a name on the command line to a TrainingStep: a file, a module's function, or a shipped model.

Models are built under ``torch.device("meta")``, without allocation. If ``build`` fails there (such as by ``.item()``),
it is built for real with a warning. A step that is to run is built for real at once, on its device.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import logging
import pkgutil
import sys
import traceback
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import checkflow.models
from checkflow.core.errors import CheckflowError, ModelError, StoppedError
from checkflow.core.training_step import TrainingStep
from checkflow.planner.model_file.settings import arguments_of

logger = logging.getLogger("checkflow")

TEMPLATE = """\
import torch
import torch.nn.functional as F
import checkflow


def build(batch_size: int = 32) -> checkflow.TrainingStep:
    model = torch.nn.Linear(784, 10)  # your model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(batch_size, 784), torch.randint(10, (batch_size,))  # one batch of your data's shape
    return checkflow.TrainingStep(model, optimizer, loss=lambda model, x, y: F.cross_entropy(model(x), y), batch=(x, y))
"""

# What --optimizer replaces a step's optimizers with.
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adam": lambda groups: torch.optim.Adam(groups, lr=1e-3),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-3),
}

_STOPS = (KeyboardInterrupt, StoppedError)  # anything else is the model file's error
_ACCELERATORS = frozenset(("cuda", "hip", "xpu", "mps"))
_SHIPPED = Path(checkflow.models.__file__).parent
_OWN = (Path(__file__).parents[1], Path(inspect.getfile(TrainingStep)).parents[1])  # checkflow's code, not the models
_FILE_MODULE = "checkflow_model_"  # a hash of the file's path follows


def list_models() -> list[str]:
    found = pkgutil.iter_modules(checkflow.models.__path__)
    return sorted(module.name for module in found if not module.name.startswith("_"))


def load_training_step(
    target: str,
    *,
    batch_size: int | None = None,
    settings: Mapping[str, str] = {},
    optimizer: str | None = None,
    device: torch.device | None = None,
) -> tuple[str, TrainingStep]:
    """Build the training step that ``target`` names, without allocating it unless asked to.

    Args:
        target: ``path/model.py`` (its function is ``build``), ``path/model.py:function``, ``package.module:function``
            (importable from the current folder or the environment), or the name of a shipped model.
        batch_size: passed to the function, if given.
        settings: further arguments of the function, as text; converted to the types of its parameters.
        optimizer: a key of ``OPTIMIZERS``: every optimizer of the step is replaced by one of this kind over the same
            parameter groups. Works only for steps of the short form (``loss=``).
        device: build it for real on this device, to be run there.

    Returns:
        A name that does not depend on where the file lies ("resnet18", "model", "model:function",
        "package.module:function"), and the step.

    Raises:
        ModelError: one line with the file and, if known, its line; then a template if the function is missing.
    """
    if optimizer is not None and optimizer not in OPTIMIZERS:
        raise ModelError(f"unknown optimizer {optimizer!r}; choose one of: {', '.join(OPTIMIZERS)}")
    if batch_size is not None and batch_size < 1:
        raise ModelError(f"the batch size must be at least 1, not {batch_size}")
    place, function = _split(target)
    with _resolve(place, function) as (module, home):
        name = _name(place, function)
        build = _function(module, place, function or "build")
        arguments = arguments_of(build, f"{function or 'build'} of {place}", batch_size, settings)
        step = _build(build, arguments, place, home, device)
    return name, step if optimizer is None else _replace_optimizers(step, optimizer)


def _split(target: str) -> tuple[str, str]:
    """Split "path/model.py:function" into path and function; the function is "" if none is named."""
    place, colon, function = target.rpartition(":")
    if not colon or not function.isidentifier():
        return target, ""
    return place, function


def _is_path(place: str) -> bool:
    return place.endswith(".py") or "/" in place or "\\" in place


def _name(place: str, function: str) -> str:
    name = Path(place).stem if _is_path(place) else place
    return f"{name}:{function}" if function and function != "build" else name


@contextlib.contextmanager
def _resolve(place: str, function: str) -> Iterator[tuple[ModuleType, Path]]:
    """Yield the module at ``place``, importable meanwhile, and the folder of the user's source lines."""
    if _is_path(place):
        path = _existing_file(place)
        with _importable(path.parent):
            yield _execute_file(path, place), path.parent
    elif place in list_models():
        module = importlib.import_module(f"checkflow.models.{place}")
        yield module, _SHIPPED
    elif function:
        with _importable(Path.cwd()):
            module = _import_module(place)
            yield module, Path(module.__file__).parent if module.__file__ else Path.cwd()
    else:
        shipped = ", ".join(list_models())
        raise ModelError(f"no model {place!r}: give path/model.py, package.module:function, or one of: {shipped}")


def _existing_file(place: str) -> Path:
    path = Path(place)
    if not path.exists():
        raise ModelError(f"{place}: no such file")
    if not path.is_file() or path.suffix != ".py":
        raise ModelError(f"{place}: not a Python file (its name must end in .py)")
    return path.resolve()


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Put a folder first in the import path, as ``python folder/model.py`` would."""
    entry = str(folder)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        # The user's code may have changed the path: remove our entry wherever it is now.
        with contextlib.suppress(ValueError):
            sys.path.remove(entry)


def _execute_file(path: Path, place: str) -> ModuleType:
    """Run a Python file as a module under a name that no other file's module has."""
    _forget_neighbours(path.parent)
    name = _FILE_MODULE + hashlib.sha256(str(path).encode()).hexdigest()[:16]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and inspect look modules up by name
    try:
        spec.loader.exec_module(module)
    except _STOPS:
        raise
    except BaseException as error:
        del sys.modules[name]
        raise _report(error, "loading", place, path.parent) from error
    return module


def _forget_neighbours(folder: Path) -> None:
    """Forget modules from beside an earlier model file whose names this folder has, too.

    Two model files may each have their own ``utils.py``; Python would give the second file the first's.
    """
    earlier = {
        Path(str(module.__file__)).parent for name, module in sys.modules.items() if name.startswith(_FILE_MODULE)
    }
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        if "." in name or name.startswith(_FILE_MODULE) or not origin:
            continue
        above = Path(origin).parent.parent if Path(origin).name == "__init__.py" else Path(origin).parent
        shadows = (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file()
        if above in earlier and above != folder and shadows:
            for inner in [inner for inner in sys.modules if inner == name or inner.startswith(f"{name}.")]:
                del sys.modules[inner]
    importlib.invalidate_caches()


def _import_module(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ModelError(f"{name!r} is neither a file nor the name of a module")
    try:
        return importlib.import_module(name)
    except _STOPS:
        raise
    except BaseException as error:
        raise _report(error, "importing", name, None) from error


def _function(module: ModuleType, place: str, function: str) -> Callable[..., Any]:
    found = getattr(module, function, None)
    if callable(found):
        return found  # type: ignore[no-any-return]
    problem = f"has no function {function!r}" if found is None else f"{function!r} is not a function"
    raise ModelError(f"{place}: {problem}; checkflow needs one that returns a TrainingStep, such as:\n\n{TEMPLATE}")


class _OneDevice(TorchFunctionMode):
    """Keeps a model on the device it is built on: the accelerators it names may not exist here."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.quantize_per_tensor and self._device.type == "meta":  # torch's other kernels raise there
            raise NotImplementedError("on the meta device, what is quantized would be a tensor of floats")
        if func is torch.Tensor.cuda:
            return args[0].to(self._device)
        # "meta" has no data that could move to the CPU.
        moves_nothing = func is torch.Tensor.to and args[0].is_meta
        names = (*_ACCELERATORS, "cpu") if moves_nothing else _ACCELERATORS
        if func in (torch.Tensor.to, torch._C._nn._parse_to):  # _parse_to reads the arguments of nn.Module.to
            args = tuple(self._instead(value, names) for value in args)
        keywords.pop("pin_memory", None)
        if "device" in keywords:
            keywords["device"] = self._instead(keywords["device"], names)
        return func(*args, **keywords)

    def _instead(self, value: Any, names: Container[str]) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | str | torch.device):
            return value
        kind = value.type if isinstance(value, torch.device) else str(value).partition(":")[0]
        return self._device if isinstance(value, int) or kind in names else value


def _build(
    build: Callable[..., Any], arguments: Mapping[str, Any], place: str, home: Path, device: torch.device | None
) -> TrainingStep:
    if device is not None:
        # The accelerator to measure on exists, so its name is meant.
        with device, _OneDevice(device) if device.type == "cpu" else contextlib.nullcontext():
            built = _build_for_real(build, arguments, place, home)
    else:
        try:
            with torch.device("meta"), _OneDevice(torch.device("meta")):
                built = build(**arguments)
        except _STOPS:
            raise
        except Exception as error:  # noqa: BLE001 - users' code may raise anything; the next try reports it
            reason = _report(error, "building without allocating", place, home)
            with _OneDevice(torch.device("cpu")):
                built = _build_for_real(build, arguments, place, home)
            # Only now: if both tries fail, one error says everything.
            logger.warning("%s; the model was allocated instead", reason)
        except BaseException as error:
            raise _report(error, "building", place, home) from error
    if not isinstance(built, TrainingStep):
        kind = "nothing" if built is None else f"a {type(built).__name__}"
        raise ModelError(f"{place}: {build.__name__} returned {kind}, not a checkflow.TrainingStep{_line_of(build)}")
    return built


def _build_for_real(build: Callable[..., Any], arguments: Mapping[str, Any], place: str, home: Path) -> Any:
    try:
        return build(**arguments)
    except torch.OutOfMemoryError:
        raise  # not the model's fault
    except _STOPS:
        raise
    except BaseException as error:
        raise _report(error, "building", place, home) from error


def _line_of(function: Callable[..., Any]) -> str:
    try:
        return f" (it begins at line {inspect.getsourcelines(function)[1]})"
    except (OSError, TypeError):
        return ""  # defined without a source file


def _report(error: BaseException, doing: str, place: str, home: Path | None) -> ModelError:
    """Make one line: the user's source line, the exception's type and message, and known advice."""
    if isinstance(error, SyntaxError) and error.filename:
        return ModelError(
            f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg} (while {doing} {place})"
        )
    where = _user_line(error, home) or place
    message = " ".join(str(error).split())
    if isinstance(error, CheckflowError):
        return ModelError(f"{where}: {message}")
    described = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return ModelError(f"{where}: {described} (while {doing} {place}){_advice(message)}")


def _user_line(error: BaseException, home: Path | None) -> str | None:
    """Return "file:line" of the innermost frame in the user's folder, else of the innermost outside libraries."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_library(frame.filename, home)]
    users = [frame for frame in frames if home is not None and home in Path(frame.filename).parents]
    for frame in (users or frames)[-1:]:
        return f"{_shown(frame.filename)}:{frame.lineno}"
    return None


def _is_library(filename: str, home: Path | None) -> bool:
    """Whether a frame is Python's, an installed package's or checkflow's; shipped models count as the user's."""
    path = Path(filename)
    if filename.startswith("<") or (home == _SHIPPED and home in path.parents):
        return filename.startswith("<")
    python = Path(importlib.__file__).parent.parent
    return "site-packages" in path.parts or any(own in path.parents for own in (python, *_OWN))


def _shown(filename: str) -> str:
    """Return a path for people, relative to the current folder if the file lies in it."""
    path = Path(filename)
    return str(path.relative_to(Path.cwd()) if Path.cwd() in path.parents else path)


def _advice(message: str) -> str:
    lowered = message.lower()
    if "cuda" in lowered or "nvidia driver" in lowered or "meta tensor; no data" in lowered:
        return "; leave the move to a device out: checkflow plans for --device without having it"
    return ""


def _replace_optimizers(step: TrainingStep, kind: str) -> TrainingStep:
    """Return the step with every optimizer replaced; of the user's group settings only the parameters stay."""
    if step.loss is None:
        raise ModelError(
            "--optimizer cannot change a TrainingStep made with step=: its function steps the optimizers it was "
            "written with; make the optimizer an argument of build and give it with --set"
        )
    replaced = {
        name: OPTIMIZERS[kind]([{"params": group["params"]} for group in optimizer.param_groups])
        for name, optimizer in step.optimizers.items()
    }
    return TrainingStep(
        models=step.models, optimizers=replaced, loss=step.loss, batch=step.batch, micro_batches=step.micro_batches
    )
