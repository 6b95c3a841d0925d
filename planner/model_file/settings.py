"""Converts text settings (``--set key=value``) to the arguments of a ``build`` function, by its parameters' types."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from checkflow.core.errors import ModelError

_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_CONVERTIBLE = (int, float, bool, str)


def arguments_of(
    build: Callable[..., Any], described: str, batch_size: int | None, settings: Mapping[str, str]
) -> dict[str, Any]:
    """Return the keyword arguments for ``build``.

    A setting has the type of the parameter's annotation (int, float, bool, str, or one of them ``| None``), else of its
    default, else the first of int, float, bool and str that can read the text.

    Args:
        described: the name of ``build`` in messages, such as "build of model.py".

    Raises:
        ModelError: ``build`` does not take a key (the message names those it does), a text does not convert, a batch
            size is given twice or not taken, or a parameter has no value.
    """
    parameters = _parameters(build, described)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    named = {name: p for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    arguments: dict[str, Any] = {}
    if batch_size is not None:
        if "batch_size" not in named and not takes_any:
            raise ModelError(f"{described} takes no batch_size; add the parameter, or leave --batch-size out")
        if "batch_size" in settings:
            raise ModelError("the batch size is given twice: by --batch-size and by --set")
        arguments["batch_size"] = batch_size
    for key, text in settings.items():
        if key not in named and not takes_any:
            accepted = ", ".join(named) or "no settings"
            raise ModelError(f"{described} takes no {key!r}; it takes: {accepted}")
        arguments[key] = _convert(key, text, named.get(key))
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in arguments:
            raise ModelError(f"{described} needs a value for {name!r}: add --set {name}=…, or give it a default")
    return arguments


def _parameters(build: Callable[..., Any], described: str) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(build, eval_str=True).parameters
    except NameError:  # an annotation for type checkers only: use its text
        return inspect.signature(build).parameters
    except (TypeError, ValueError) as error:
        raise ModelError(f"{described} cannot be asked for its parameters: {error}") from None


def _convert(key: str, text: str, parameter: inspect.Parameter | None) -> Any:
    kind, optional = _type_of(key, parameter)
    if optional and text.lower() in ("none", "null"):
        return None
    if kind is None:
        return _guess(text)
    try:
        return _BOOLEANS[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        wanted = {int: "a whole number", float: "a number", bool: "true or false"}[kind]
        raise ModelError(f"{key}={text}: {key} must be {wanted}") from None


def _type_of(key: str, parameter: inspect.Parameter | None) -> tuple[type | None, bool]:
    """Return the type to convert to (None: guess), and whether None is allowed, too."""
    if parameter is None:
        return None, False
    annotation = parameter.annotation
    if annotation is parameter.empty or annotation is Any:
        default = parameter.default
        unknown = default is parameter.empty or default is None
        annotation = None if unknown else type(default)
        if unknown:
            return None, default is None
    if isinstance(annotation, str):
        annotation = {"int": int, "float": float, "bool": bool, "str": str}.get(annotation, annotation)
    optional = False
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(annotation) if member is not type(None)]
        optional = len(members) < len(typing.get_args(annotation))
        annotation = members[0] if len(members) == 1 else annotation
    if annotation not in _CONVERTIBLE:
        raise ModelError(f"{key} cannot be set from the command line: only int, float, bool and str can")
    return annotation, optional


def _guess(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)
