"""Loading a training step: every form of target, every conversion, every refusal with its one line."""

from __future__ import annotations

import logging
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from checkflow.core.errors import ModelError, StoppedError, UnsupportedError
from checkflow.core.training_step import TrainingStep
from checkflow.planner.model_file.load import OPTIMIZERS, TEMPLATE, list_models, load_training_step
from checkflow.planner.trace.trace import trace

GOOD = """
    import torch
    import torch.nn.functional as F
    from torch import nn
    from checkflow.core.training_step import TrainingStep

    def build(batch_size=4, width: int = 8, scale: float = 1.0, bias: bool = True, note: str = "", depth=None):
        seen.update(batch_size=batch_size, width=width, scale=scale, bias=bias, note=note, depth=depth)
        model = nn.Linear(3, width, bias=bias)
        optimizer = torch.optim.SGD([{"params": [model.weight], "lr": 0.5}, {"params": [model.bias]}], lr=0.25)
        batch = (torch.randn(batch_size, 3), torch.randint(width, (batch_size,)))
        return TrainingStep(model, optimizer, loss=lambda m, x, y: F.cross_entropy(m(x), y), batch=batch)

    def other():
        return build(batch_size=2)

    seen = {}
    number = 3
"""

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(text: str, name: str = "model.py") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write_file


@pytest.fixture(autouse=True)
def _import_state_stays_as_it_was(tmp_path: Path) -> Iterator[None]:
    """Loading leaves the import path alone; modules of one test must not reach the next."""
    path = list(sys.path)
    yield
    assert sys.path == path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def _model(step: TrainingStep) -> torch.nn.Linear:
    (model,) = step.models.values()
    assert isinstance(model, torch.nn.Linear)
    return model


def _refusal(target: str, **arguments: object) -> str:
    with pytest.raises(ModelError) as caught:
        load_training_step(target, **arguments)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message.removesuffix(f"\n\n{TEMPLATE}")
    return message


# --- targets


def test_file(write: Write) -> None:
    name, step = load_training_step(write(GOOD))
    assert name == "model"
    assert _model(step).weight.shape == (8, 3)
    assert {tensor.device.type for tensor in (*step.models["model"].parameters(), *step.batch)} == {"meta"}


def test_function_of_a_file(write: Write) -> None:
    name, step = load_training_step(write(GOOD) + ":other")
    assert name == "model:other"
    assert step.batch[0].shape == (2, 3)
    assert load_training_step(write(GOOD) + ":build")[0] == "model"


def test_relative_path(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(GOOD, "inner/net.py")
    monkeypatch.chdir(tmp_path)
    assert load_training_step("inner/net.py")[0] == "net"


def test_function_of_a_module_in_the_current_folder(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("", "some_package/__init__.py")
    write(GOOD, "some_package/net.py")
    monkeypatch.chdir(tmp_path)
    name, step = load_training_step("some_package.net:other")
    assert name == "some_package.net:other"
    assert step.batch[0].shape == (2, 3)


def test_shipped_models_win_over_folders(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("raise RuntimeError", "resnet18.py")
    monkeypatch.chdir(tmp_path)
    assert "resnet18" in list_models()
    name, step = load_training_step("resnet18", settings={"width": "4"})
    assert name == "resnet18"
    assert step.models["model"].get_parameter("conv1.weight").shape[0] == 4


def test_two_files_of_one_name_with_neighbours_of_one_name(write: Write) -> None:
    for folder, width in (("a", 5), ("b", 7)):
        write(f"WIDTH = {width}", f"{folder}/helpers.py")
        write(
            GOOD.replace("import torch\n", "import helpers, torch\n", 1).replace("= 8", "= helpers.WIDTH"),
            f"{folder}/model.py",
        )
    a, b = write("", "a/empty.py").replace("empty", "model"), write("", "b/empty.py").replace("empty", "model")
    for path, width in ((a, 5), (b, 7), (a, 5)):
        assert _model(load_training_step(path)[1]).weight.shape == (width, 3)


def test_neighbours_are_importable_inside_build_too(write: Write) -> None:
    write("def width(): return 6", "late_helper.py")
    path = write(GOOD.replace("model = nn", "import late_helper; width = late_helper.width()\n        model = nn"))
    assert _model(load_training_step(path)[1]).weight.shape == (6, 3)


def test_dataclasses_in_a_model_file(write: Write) -> None:
    text = "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass C:\n    x: int = 3\n"
    assert load_training_step(write(text + textwrap.dedent(GOOD)))[0] == "model"


def test_ties_are_kept(write: Write) -> None:
    path = write("""
        import torch
        from torch import nn
        from checkflow.core.training_step import TrainingStep

        def build():
            model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 7, bias=False))
            model[1].weight = model[0].weight
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            return TrainingStep(model, optimizer, loss=lambda m, x: m(x).sum(), batch=torch.zeros(2, dtype=torch.long))
    """)
    model = load_training_step(path)[1].models["model"]
    assert model.get_parameter("0.weight") is model.get_parameter("1.weight")


# --- settings


def _seen(path: str, **arguments: object) -> dict[str, object]:
    _, step = load_training_step(path, **arguments)  # type: ignore[arg-type]
    assert step.loss is not None
    seen: dict[str, object] = step.loss.__globals__["seen"]
    return seen


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("width", "12", 12),
        ("scale", "2", 2.0),
        ("scale", "1e-3", 0.001),
        ("bias", "true", True),
        ("bias", "Yes", True),
        ("note", "3", "3"),
        ("note", "a=b", "a=b"),
        ("depth", "3", 3),
        ("depth", "0.5", 0.5),
        ("depth", "none", None),
        ("depth", "false", False),
        ("depth", "wide", "wide"),
        ("batch_size", "6", 6),
    ],
)
def test_settings_take_the_type_of_their_parameter(write: Write, key: str, text: str, value: object) -> None:
    found = _seen(write(GOOD), settings={key: text})[key]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n"])
def test_optional_parameters(write: Write, future: str) -> None:
    path = write(future + textwrap.dedent(GOOD.replace("depth=None", "depth: int | None = 2")))
    assert _seen(path, settings={"depth": "4"})["depth"] == 4
    assert _seen(path, settings={"depth": "None"})["depth"] is None


def test_annotations_for_type_checkers_only(write: Write) -> None:
    text = "from __future__ import annotations\n" + textwrap.dedent(GOOD.replace("depth=None", "depth: Missing = 1"))
    assert _seen(write(text), settings={"width": "3"})["width"] == 3


def test_batch_size(write: Write) -> None:
    assert load_training_step(write(GOOD), batch_size=9)[1].batch[0].shape == (9, 3)


def test_any_keyword(write: Write) -> None:
    path = write(GOOD + "\n    def loose(**kw):\n        seen.update(kw)\n        return build(2)\n")
    assert _seen(path + ":loose", settings={"x": "1"}, batch_size=3) | {"x": 1} == _seen(path + ":loose") | {"x": 1}


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"settings": {"wdith": "3"}}, "takes no 'wdith'; it takes: batch_size, width, scale, bias, note, depth"),
        ({"settings": {"width": "3.5"}}, "width=3.5: width must be a whole number"),
        ({"settings": {"scale": "fast"}}, "scale must be a number"),
        ({"settings": {"bias": "maybe"}}, "bias must be true or false"),
        ({"settings": {"batch_size": "3"}, "batch_size": 3}, "given twice"),
        ({"batch_size": 0}, "at least 1"),
        ({"optimizer": "lion"}, "unknown optimizer 'lion'; choose one of: sgd, momentum, adam, adamw"),
    ],
)
def test_refused_arguments(write: Write, arguments: dict[str, object], part: str) -> None:
    assert part in _refusal(write(GOOD), **arguments)


def test_refused_parameters(write: Write) -> None:
    path = write(GOOD + "\n    def bare(): ...\n    def must(x): ...\n    def odd(x: list = []): ...\n")
    assert "takes no batch_size" in _refusal(path + ":bare", batch_size=2)
    assert "it takes: no settings" in _refusal(path + ":bare", settings={"x": "1"})
    assert "needs a value for 'x'" in _refusal(path + ":must")
    assert "only int, float, bool and str" in _refusal(path + ":odd", settings={"x": "1"})


# --- optimizers


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_optimizer_is_replaced_and_steps(write: Write, kind: str) -> None:
    _, step = load_training_step(write(GOOD), optimizer=kind)
    (optimizer,) = step.optimizers.values()
    model = _model(step)
    expected = {"sgd": (torch.optim.SGD, 0.1), "momentum": (torch.optim.SGD, 0.1)}.get(
        kind, (torch.optim.AdamW if kind == "adamw" else torch.optim.Adam, 1e-3)
    )
    assert (type(optimizer), optimizer.param_groups[0]["lr"]) == expected
    assert [group["params"] for group in optimizer.param_groups] == [[model.weight], [model.bias]]
    if "momentum" in optimizer.param_groups[0]:
        assert optimizer.param_groups[0]["momentum"] == (0.9 if kind == "momentum" else 0)


def test_the_new_optimizer_is_the_one_that_steps(write: Write) -> None:
    # Built for real (item() fails without values), so that an iteration can be run.
    path = write(GOOD.replace("model = nn", "torch.ones(1).item()\n        model = nn"))
    _, step = load_training_step(path, optimizer="adam")
    before = _model(step).weight.clone()
    step.run(step.batch)
    moved = (_model(step).weight - before).abs().max().item()
    assert moved == pytest.approx(1e-3, rel=0.01), "Adam's first step is its learning rate, whatever the gradient"
    assert len(step.optimizers["optimizer"].state) == 2


def test_general_form_keeps_its_optimizers(write: Write) -> None:
    text = GOOD.replace("loss=lambda m, x, y: F.cross_entropy(m(x), y)", "step=print").replace(
        "TrainingStep(model, ", "TrainingStep(model, optimizer="
    )
    path = write(text)
    assert load_training_step(path)[1].loss is None
    assert "made with step=" in _refusal(path, optimizer="adam")


def test_nothing_to_replace(write: Write) -> None:
    path = write(GOOD.replace("TrainingStep(model, optimizer, ", "TrainingStep(model, "))
    assert "ends in an optimizer's step: pass optimizer=" in _refusal(path, optimizer="adam")


# --- refusals


def test_missing_file(tmp_path: Path) -> None:
    assert _refusal(f"{tmp_path}/none.py") == f"{tmp_path}/none.py: no such file"


def test_not_a_python_file(tmp_path: Path) -> None:
    (tmp_path / "model.txt").write_text("")
    (tmp_path / "folder.py").mkdir()
    for name in ("model.txt", "folder.py"):
        assert "not a Python file" in _refusal(f"{tmp_path}/{name}")


def test_unknown_name_lists_the_shipped_ones() -> None:
    assert _refusal("resnet81").endswith(f"or one of: {', '.join(list_models())}")


@pytest.mark.parametrize("target", ["no_such_module:build", "no_such.module:build"])
def test_missing_module(target: str) -> None:
    assert "ModuleNotFoundError: No module named 'no_such" in _refusal(target)


def test_not_a_module_name() -> None:
    assert "neither a file nor the name of a module" in _refusal("my-model:build")


def test_no_build_prints_a_template_that_works(write: Write) -> None:
    message = _refusal(write("x = 1"))
    assert "model.py: has no function 'build'" in message
    assert message.endswith(TEMPLATE)
    assert load_training_step(write(TEMPLATE), batch_size=5)[1].batch[0].shape == (5, 784)


def test_build_is_no_function(write: Write) -> None:
    assert "'number' is not a function" in _refusal(write(GOOD) + ":number")


def test_raising_while_loading(write: Write) -> None:
    path = write("x = 1\n1 / 0\n")
    assert _refusal(path) == f"{path}:2: ZeroDivisionError: division by zero (while loading {path})"


def test_raising_in_a_neighbour(write: Write) -> None:
    neighbour = write("\n\nint('x')\n", "broken_neighbour.py")
    assert _refusal(write("import broken_neighbour")).startswith(f"{neighbour}:3: ValueError: ")


def test_missing_import(write: Write) -> None:
    path = write("import os\nimport no_such_package\n")
    assert _refusal(path).startswith(f"{path}:2: ModuleNotFoundError: No module named 'no_such_package'")


def test_syntax_error(write: Write) -> None:
    path = write("x = 1\ndef build(:\n")
    assert _refusal(path).startswith(f"{path}:2: SyntaxError: ")


@pytest.mark.parametrize("code", ["raise SystemExit(3)", "import sys; sys.exit('usage')"])
def test_exiting_while_loading(write: Write, code: str) -> None:
    path = write(code)
    assert f"{path}:1: SystemExit: " in _refusal(path)


@pytest.mark.parametrize("indent", ["", "def build(): "])
@pytest.mark.parametrize("error", ["GeneratorExit()", "type('Stop', (BaseException,), {})('enough')"])
def test_what_is_no_exception_is_reported_too(write: Write, error: str, indent: str) -> None:
    path = write(f"{indent}raise {error}\n")
    assert _refusal(path).startswith(f"{path}:1: {'Stop: enough' if 'Stop' in error else 'GeneratorExit'} (while ")


@pytest.mark.parametrize("indent", ["", "def build(): "])
@pytest.mark.parametrize("stop", [KeyboardInterrupt(), StoppedError(15)])
def test_who_asks_to_end_is_heard(write: Write, stop: BaseException, indent: str) -> None:
    path = write(f"from checkflow.core.errors import StoppedError\n{indent}raise {stop!r}\n")
    with pytest.raises(type(stop)):
        load_training_step(path)


def test_raising_in_build_names_the_users_line(write: Write) -> None:
    path = write("""
        import torch

        def build():
            return helper()

        def helper():
            return torch.nn.Linear(2, 3)(torch.randn(4))
    """)
    assert _refusal(path).startswith(f"{path}:8: RuntimeError: mat1 and mat2 shapes cannot be multiplied")


def test_messages_of_several_lines_become_one(write: Write) -> None:
    path = write("def build():\n    raise ValueError('one\\n  two')\n")
    assert _refusal(path) == f"{path}:2: ValueError: one two (while building {path})"


def test_errors_of_the_training_step_itself(write: Write) -> None:
    path = write(
        "from checkflow.core.training_step import TrainingStep\ndef build():\n    return TrainingStep(batch=1)\n"
    )
    assert _refusal(path).startswith(f"{path}:3: TrainingStep takes either loss= (short form) or step= (general form)")


def test_exiting_in_build(write: Write) -> None:
    path = write("def build():\n    raise SystemExit(1)\n")
    assert _refusal(path).startswith(f"{path}:2: SystemExit: 1")


@pytest.mark.parametrize(("returned", "kind"), [("None", "nothing"), ("(1, 2)", "a tuple"), ("object", "a type")])
def test_returning_something_else(write: Write, returned: str, kind: str) -> None:
    message = _refusal(write(f"x = 1\ndef build():\n    return {returned}\n"))
    assert f"build returned {kind}, not a checkflow.TrainingStep (it begins at line 2)" in message


@pytest.mark.parametrize(
    "move",
    ["to('cuda')", "cuda()", "cuda(1)", "to('cuda:1')", "to(0)", "to(device=torch.device('cuda', 0))", "to('cpu')"],
)
def test_moving_to_a_device_moves_nothing(write: Write, move: str, caplog: pytest.LogCaptureFixture) -> None:
    path = write(GOOD.replace("bias=bias)", f"bias=bias).{move}.to(torch.float64)"))
    with caplog.at_level(logging.WARNING, logger="checkflow"):
        _, step = load_training_step(path)
    assert _model(step).weight.is_meta
    assert _model(step).weight.dtype == torch.float64
    assert not caplog.records


def test_a_device_may_be_named_where_building_needs_values(write: Write) -> None:
    wide = "width = int(torch.full((), 3, device='cuda', pin_memory=False).item())\n        model = nn"
    _, step = load_training_step(write(GOOD.replace("model = nn", wide).replace("bias=bias)", "bias=bias).cuda()")))
    assert _model(step).weight.device.type == "cpu"
    assert _model(step).weight.shape == (3, 3)


def test_asking_for_a_device_gets_advice(write: Write) -> None:
    path = write(GOOD.replace("model = nn", "torch.cuda.get_device_properties(0)\n        model = nn"))
    if torch.cuda.is_available():
        assert load_training_step(path)[0] == "model"
    else:
        assert "leave the move to a device out" in _refusal(path)


# --- building for real where nothing else works


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_what_is_quantized_is_seen_to_be(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    made = "scales = torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)\n        model = nn"
    path = write(
        GOOD.replace("model = nn", made).replace("bias=bias)", "bias=bias); model.register_buffer('q', scales)")
    )
    with caplog.at_level(logging.WARNING, logger="checkflow"):
        _, step = load_training_step(path)
    assert caplog.messages[0].endswith("the model was allocated instead")
    with pytest.raises(UnsupportedError, match="model/q is quantized"):
        trace(step, name="model")


def test_values_needed_while_building(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    path = write(GOOD.replace("model = nn", "width = int(torch.full((), 3).item())\n        model = nn"))
    with caplog.at_level(logging.WARNING, logger="checkflow"):
        _, step = load_training_step(path)
    assert _model(step).weight.device.type == "cpu"
    assert _model(step).weight.shape == (3, 3)
    (record,) = caplog.records
    assert f"{path}:9: " in record.message
    assert record.message.endswith("the model was allocated instead")
