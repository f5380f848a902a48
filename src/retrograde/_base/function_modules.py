"""The modules of a function: itself, or those behind a method, a partial, a closure or a plain attribute."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

_DEEP = 6  # attributes and entries away from a function
_MANY = 64  # entries of a list that are looked at
_PLAIN = (int, float, complex, str, bytes, type(None), type, types.ModuleType, Tensor, torch.dtype, torch.device)
STANDARD = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}  # attributes of every module


class Around(nn.Module):
    """A module of ours around a function of the user's."""

    def __init__(self, fn: Any):
        super().__init__()
        self.fn = fn


def parts(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules and all that they are made of, each once."""
    found = list(dict.fromkeys(modules))
    seen = set(found)
    for module in found:  # grows while it is read
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found


class Held:
    """What a function and its rule use besides their arguments: itself, or what is behind a method, a partial or a closure.

    A module may also hold others without registering them, as `self.shared = [module]`.
    """

    __slots__ = ("generators", "modules", "registered", "roots")

    def __init__(self, fn: Any, rule: Any = None):
        self.roots: list[nn.Module] = []  # without what they are made of
        self.generators: list[torch.Generator] = []
        if isinstance(fn, nn.Module) and not (isinstance(fn, Around) and not isinstance(fn.fn, nn.Module)):
            self.roots.append(fn)
        else:
            _look_behind(fn.fn if isinstance(fn, Around) else fn, _DEEP, self)
        if rule is not None and rule.__dict__:
            _look_behind(list(rule.__dict__.values()), _DEEP, self)
        self.modules, known = parts(self.roots), len(self.roots)
        for module in self.modules:
            if not type(module).__module__.startswith("torch."):
                for name, value in vars(module).items():
                    if name not in STANDARD and not isinstance(value, _PLAIN):
                        _look_behind(value, 2, self)
        if len(self.roots) > known:
            self.modules = parts(self.roots)
        # whether all of them are registered in fn: then it uses them, as far as anybody can tell
        self.registered = self.roots == [fn] or (isinstance(fn, nn.Module) and set(self.modules) == set(parts([fn])))


def modules_of(fn: Any) -> list[nn.Module]:
    """The modules that a function uses, with all that they are made of."""
    return Held(fn).modules


def _look_behind(thing: Any, depth: int, found: Held) -> None:
    todo, seen = [(thing, depth)], set()
    while todo:
        thing, depth = todo.pop(0)
        if isinstance(thing, nn.Module):
            found.roots.append(thing)
        elif isinstance(thing, torch.Generator):
            found.generators.append(thing)
        elif depth and id(thing) not in seen and not isinstance(thing, _PLAIN):
            seen.add(id(thing))
            todo += [(inner, depth - 1) for inner in _inside(thing)]


def _inside(thing: Any) -> Iterable[Any]:
    if isinstance(thing, types.MethodType):
        return (thing.__self__, thing.__func__)
    if isinstance(thing, functools.partial):
        return (thing.func, *thing.args, *thing.keywords.values())
    if isinstance(thing, types.FunctionType):
        cells = [cell.cell_contents for cell in thing.__closure__ or () if cell != types.CellType()]
        return (*cells, *(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values())
    if isinstance(thing, (list, tuple)):
        return islice(thing, _MANY)
    if isinstance(thing, dict):
        return islice(thing.values(), _MANY)
    return getattr(thing, "__dict__", {}).values()
