"""Every private name of torch that this library uses, except for the compiler's (`_compile/`).

Each entry says why there is no public way, and what to do if the name disappears. When a new version of torch breaks something,
start here. (`_parameters`, `_buffers` and `_modules` of `nn.Module` and `_version` of tensors stand where they are needed: they
are as old as these classes, and every library that loads or shards modules reads them.)
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, register_pytree_node, tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = ["TorchDispatchMode", "TreeSpec", "register_pytree_node", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]
# `torch.utils._pytree` knows the trees that torch's own libraries register; `torch.utils.pytree` replaces it in later versions.
# `TorchDispatchMode` is documented for users and lives in a private module; it will move to a public one.

# -- backward passes ---------------------------------------------------------------------------------------------------
# A walk belongs to one call of backward, and ends with it. Without these: key walks on the thread, and end them in a hook on the
# outputs. (`torch.utils.checkpoint` uses the same names.)

graph_task: Callable[[], int] = torch._C._current_graph_task_id  # -1 outside of backward
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph  # type: ignore[attr-defined]


def at_end_of_backward(callback: Callable[[], object]) -> None:
    """Call this when the backward pass that is running ends."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def quick_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without its look for torch.func transforms, which cost as much as the call itself.

    Without it: use `function.apply`.
    """
    return super(torch.autograd.Function, function).apply  # type: ignore[attr-defined]


# -- saved-tensor hooks ------------------------------------------------------------------------------------------------
# What `torch.autograd.graph.saved_tensors_hooks` calls; that makes an object each time. Without these: use it.

push_hooks: Callable[..., None] = torch._C._autograd._push_saved_tensors_default_hooks  # type: ignore[attr-defined]
pop_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks  # type: ignore[attr-defined]
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # type: ignore[attr-defined]


def under_hooks() -> bool:
    """Whether saved-tensor hooks are around. There is no public way to ask; without it assume that there are."""
    return _top_hooks(False) is not None


# -- modes and transforms ----------------------------------------------------------------------------------------------

set_grad: Callable[[bool], None] = torch._C._set_grad_enabled  # `torch.set_grad_enabled` makes an object each time
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled  # else: ask for each device type
no_dispatch: Any = torch._C._DisableTorchDispatch  # tensors made inside have values, whatever mode is around
in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active  # torch.func forbids hooks; no public way to ask


def in_dispatch_mode() -> bool:
    """Whether a mode like FakeTensorMode is around."""
    return torch._C._len_torch_dispatch_stack() > 0


def in_forward_mode() -> bool:
    """Whether forward-mode AD is on, which forbids hooks. No public way to ask."""
    return torch.autograd.forward_ad._current_level >= 0


# Backends of attention, by pairs of what reads and what sets one. `torch.backends.cuda` has the same as public functions, which
# cost ten times as much.
ATTENTION: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
]

_VMAP: Any = torch._C._parse_dispatch_key("VmapMode")
_FUNC_VMAP: Any = torch._C._parse_dispatch_key("FuncTorchVmapMode")
_under_vmap = partial(torch._C._dispatch_tls_is_dispatch_key_included, _VMAP)


def in_vmap() -> bool:
    """Whether a vmap is around, of `is_grads_batched` too. No public way to ask; without it refuse `is_grads_batched`."""
    return _under_vmap() or in_transform()


def outside_transforms() -> contextlib.AbstractContextManager[Any]:
    """`is_grads_batched` runs backward under vmap, and a recomputation must not notice. Without it: refuse `is_grads_batched`."""
    return _outside() if in_vmap() else contextlib.nullcontext()


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    keys = torch._C.DispatchKeySet(_VMAP) | torch._C.DispatchKeySet(_FUNC_VMAP)
    with temporarily_clear_interpreter_stack(), torch._C._ExcludeDispatchKeyGuard(keys):
        yield


# -- tensors, operations, generators -----------------------------------------------------------------------------------


def home_of(t: Tensor) -> int:
    """What tensors that share memory have in common. Without it: the data pointer of the storage, which fake tensors lack."""
    return t.untyped_storage()._cdata if t.layout is torch.strided else id(t)


def version_of(t: Tensor) -> int:
    """Grows with each edit in place."""
    return 0 if t.is_inference() else t._version


def is_fake(t: Tensor) -> bool:
    """Whether it is a FakeTensor, which has no values. No public name for the class."""
    from torch._subclasses import FakeTensor

    return isinstance(t, FakeTensor)


def fake_mode() -> Any:
    """The class of the mode in which tensors have shapes and no values: for planning."""
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode


def fake_device(t: Any) -> torch.device:
    """The device of a fake tensor, as its mode tells it inside and outside of an operation. Without it: ask the mode, slowly."""
    return torch.device("meta") if t.fake_mode.in_kernel_invocation else t.fake_device


def schema_of(func: Any) -> Any:
    """The arguments and returns of an operation, with their names, defaults and whether they are written to."""
    return func._schema


def mps_generator() -> torch.Generator:
    """`torch.mps` has functions for its state, and none for the generator itself."""
    return torch.mps._get_default_mps_generator()


def param_dtype_of_fsdp(module: Any) -> torch.dtype | None:
    """What FSDP2 casts the parameters of a module to when it gathers them. Without it: say arithmetic="exact" by hand."""
    of = getattr(type(module), "_get_fsdp_state", None)
    return None if of is None else of(module)._mp_policy.param_dtype


def active_ddp() -> Any:
    """The DistributedDataParallel module whose forward is running, or None. Without it: refuse nothing, as docs say."""
    return torch.nn.parallel.DistributedDataParallel._active_ddp_module


# -- compiler ----------------------------------------------------------------------------------------------------------


def whole_graph() -> bool:
    """In a trace: whether the compiler must not leave it, as `fullgraph=True` says. No public way to ask."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return bool(InstructionTranslator.current_tx().one_graph)


def skip_in_traces(code: types.CodeType) -> None:
    """torch.compile leaves a function with this code alone, though compiled functions call it.

    Without it: torch.compiler.disable, which costs ten times the call.
    """
    compiler: Any = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]
    compiler.set_code_exec_strategy(code, compiler._FrameExecStrategy(compiler._FrameAction.SKIP, compiler._FrameAction.SKIP))


def partitioner() -> tuple[Any, Any]:
    """What torch.compile uses to decide what is saved: for planning, to count it without compiling anything."""
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return aot_function, min_cut_rematerialization_partition


def run_backward(*args: Any, **kwargs: Any) -> Any:
    """What `Tensor.backward` calls once it has looked at the gradients it is given; planning gives it fake ones."""
    from torch.autograd.graph import _engine_run_backward

    return _engine_run_backward(*args, **kwargs)


def compiler_config() -> Any:
    """Holds `activation_memory_budget`, which has no public name."""
    import torch._functorch.config as config

    return config


outside_traces: Any = partial(torch._disable_dynamo, recursive=True)  # type: ignore[attr-defined]  # `torch.compiler.disable` imports the compiler at once
