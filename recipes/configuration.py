"""Configuration: from the command line to keyword arguments, and every mistake in it as one line."""

import difflib
import inspect
import os
import sys
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

import hydra
import torch
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mpp.errors import LocalError, UserError
from mpp.stopping import Preempted, end_with_launcher, ignore_from_now, raise_on_signal
from mpp.train.run import flatten

Result = TypeVar("Result")
Config = dict[str, Any]

# ---------------------------------------------------------------------------------------------------- entry


def main(config_name: str, recipe: Callable[[Config], object]) -> None:
    """Run a recipe under hydra; what a user can put right is printed as one line, with exit code 2.

    A signal that asks to stop ends it with `mpp.stopping.EXIT_CODE`, Ctrl-C with 130.
    """
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # so that hydra raises, and the line is ours
    end_with_launcher()
    raise_on_signal()
    met: list[UserError | Preempted] = []

    @hydra.main(version_base="1.3", config_path="pkg://mpp.recipes.conf", config_name=config_name)
    def entry(config: DictConfig) -> None:
        try:
            recipe(to_dict(config))
        except (UserError, Preempted) as error:  # caught here, since hydra would print a line of its own
            if isinstance(error, Preempted):
                ignore_from_now()
            met.append(error)
        except OmegaConfBaseException as error:
            met.append(UserError(_explain(error, config_name)))

    try:
        entry()
    except KeyboardInterrupt:
        ignore_from_now()
        _say_stopped("Ctrl-C", None)
        sys.exit(130)
    except (HydraException, OmegaConfBaseException) as error:
        _stop(_explain(error, config_name))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if not met:
        return
    if isinstance(met[0], Preempted):
        _say_stopped(met[0].signal, met[0].step)
        sys.exit(met[0].exit_code)
    _stop(str(met[0]), every_rank=isinstance(met[0], LocalError))


def _say_stopped(what: str, step: int | None) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        saved = "the same command continues from the last checkpoint, if there is one"
        if step is not None:
            saved = f"step {step:,} is saved and the same command continues from it"
        print(f"stopped by {what}: {saved}", file=sys.stderr, flush=True)


def _stop(message: str, *, every_rank: bool = False) -> typing.NoReturn:
    if every_rank or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def _explain(error: BaseException, config_name: str) -> str:
    """Hydra's several lines as one, with the nearest key where a key is unknown."""
    cause = error.__cause__ or error
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip() and "HYDRA_FULL_ERROR" not in line)
    key = getattr(cause, "full_key", None) or getattr(error, "full_key", None)
    if "LexerNoViableAlt" in text or "mismatched input" in text or "extraneous input" in text:
        given = text.split("Exception: ")[-1].split(" See https")[0].rstrip("^ ")
        return f"cannot read {given}; quote values with spaces or special characters twice: 'out=\"my runs/a\"'"
    if "Missing mandatory value" in text:
        what = ", a run folder, an exported encoder or its .safetensors file" if key == "from" else ""
        return f"{key or text} must be given, as {key}=...{what}"
    if "not in struct" in text or "Could not override" in text:
        given = text.split("'")[1] if "'" in text else str(key)
        with hydra.initialize_config_module(version_base="1.3", config_module="mpp.recipes.conf"):
            known = list(flatten(OmegaConf.to_container(hydra.compose(config_name))))  # type: ignore[arg-type]
        if given in known:
            return f"unknown key {given} for the {given.split('.')[0]}= that was chosen"
        return f"unknown key {given}{near(given, known)}"
    return text


def near(name: str, known: typing.Iterable[str]) -> str:
    """ "; did you mean ...?" for a mistyped name, or a list of what there is."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=2)
    return f"; did you mean {' or '.join(near)}?" if near else f"; there are {', '.join(known)}"


def to_dict(config: DictConfig) -> Config:
    """Plain Python values; nothing below the recipes sees a DictConfig."""
    container = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    return {str(key): value for key, value in container.items()}  # type: ignore[union-attr]


# ---------------------------------------------------------------------------------------------------- groups


def call(group: str, function: Callable[..., Result], config: Config, *given: Any, **also: Any) -> Result:
    """`function(*given, **config, **also)`, where `config` is a configuration group: a group is the keyword arguments
    of exactly one callable.

    Raises:
        UserError: a key that the callable does not take, or a value of another type; names it.
    """
    parameters = inspect.signature(function).parameters
    taken = [*list(parameters)[: len(given)], *also]  # by the recipe
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    hints = typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)
    arguments = {}
    for key, value in config.items():
        if key in taken or (key not in parameters and not open_ended):
            raise UserError(f"unknown key {group}.{key}{near(key, [name for name in parameters if name not in taken])}")
        hint = hints.get(key, Any) if key in parameters else Any
        value = tuple(value) if isinstance(value, list) and "tuple" in str(hint) else value
        if not _fits(value, hint):
            raise UserError(f"{group}.{key}={value} must be {_say(hint)}")
        arguments[key] = value
    return function(*given, **arguments, **also)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value from YAML may stand where `hint` is asked for."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if origin in (list, tuple):
        if not isinstance(value, origin):
            return False
        if origin is list or inner[-1] is Ellipsis:
            return all(_fits(item, inner[0]) for item in value)
        return len(value) == len(inner) and all(map(_fits, value, inner))
    if hint is None or hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _say(hint: Any) -> str:
    """A type in words."""
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_say(one) for one in inner)
    if origin in (list, tuple):
        return f"a list, each {_say(inner[0])}"
    return words.get(hint, str(hint))
