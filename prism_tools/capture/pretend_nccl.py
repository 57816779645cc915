"""The backend "nccl" where devices are pretended: played by the server with NCCL's rules, and gloo's between sandbox ranks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.constants as constants
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import ProcessGroup as RealGroup
from torch.utils._pytree import tree_map

from prism_tools.capture import pretend_uneven
from prism_tools.capture import session as active
from prism_tools.capture.calls import reduce_of
from prism_tools.capture.groups import AbsentBackend, GlooName, RealGloo, TracedGroup, kept
from prism_tools.capture.pretend_device import CPU, on_cpu
from prism_tools.graph.schema import Reduce

# The group's sums that NCCL can scale, with the place of their inputs among the arguments.
SCALED = {
    "allreduce": 0,
    "_reduce_scatter_base": 1,
    "reduce_scatter_single": 1,  # its name from PyTorch 2.13 on
    "reduce_scatter_single_coalesced": 1,
}
TIMEOUT = timedelta(minutes=10)  # NCCL's


class _RealNccl(RealGloo):  # type: ignore[valid-type,misc]
    """Gloo, under the name of what it stands for."""

    def name(self) -> str:
        return "nccl"


class _NcclMeta(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, GlooName) and instance.name() == "nccl"


class NcclName(metaclass=_NcclMeta):
    """Stands for ``ProcessGroupNCCL``, as GlooName for ``ProcessGroupGloo``."""

    class Options(AbsentBackend.Options):
        """What programs set of NCCL's options, and nobody reads."""

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            super().__init__()
            self.is_high_priority_stream = is_high_priority_stream
            self.config = type("NCCLConfig", (), {})()
            self._timeout = TIMEOUT

    def __new__(cls, store: Any, rank: int, size: int, options: Any = None, timeout: timedelta | None = None) -> Any:
        if active.SESSION.is_remote(active.SESSION.pending_ranks):
            return AbsentBackend("nccl")
        limit = timeout or getattr(options, "_timeout", TIMEOUT)
        group = _RealNccl(store, rank, size, timeout=limit)
        kept.append(group)
        return group


def _untagged(method: Callable) -> Callable:
    """NCCL matches messages by their order alone; gloo, behind a sandbox's own groups, by their tags too."""

    def send_or_receive(self: TracedGroup, tensors: Any, peer: int, tag: int = 0) -> Any:
        return method(self, tensors, peer, 0 if self.backend_name == "nccl" else tag)

    return send_or_receive


def _of_the_cpu(barrier: Callable) -> Callable:
    """A group of gloo's allocates what its barrier sums on the device that the options name."""

    def method(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        for options in (*args, *kwargs.values()):
            if isinstance(options, dist.BarrierOptions):
                options.device = CPU
        return barrier(group, *args, **kwargs)

    return method


def _scaling(operation: Callable, given: int) -> Callable:
    """Gloo does not know NCCL's sums of scaled inputs, argument ``given``: they are scaled before, at 0 in place."""

    @torch.no_grad()
    def method(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        options = args[given + 1] if len(args) > given + 1 else kwargs.get("opts")
        kind, factor = reduce_of(options)
        if kind is Reduce.PREMUL_SUM and options is not None and hasattr(options, "reduceOp"):
            options.reduceOp = dist.ReduceOp.SUM
            scaled = tree_map(lambda tensor: tensor * factor if given else tensor.mul_(factor), args[given])
            args = (*args[:given], scaled, *args[given + 1 :])
        return operation(group, *args, **kwargs)

    return method


def install() -> None:
    """Make the backend known to torch; all tensors are the CPU's, so every group has one backend, for the CPU."""
    configure = c10d.BackendConfig.__init__

    def configure_for_cpu(self: c10d.BackendConfig, backend: Any) -> None:
        configure(self, "nccl" if backend == c10d.Backend.UNDEFINED else backend)
        backends = self.device_backend_map
        self.device_backend_map = {"cpu": backends.get("cuda", next(iter(backends.values())))}

    c10d.BackendConfig.__init__ = configure_for_cpu  # type: ignore[method-assign]
    c10d._NCCL_AVAILABLE = True
    c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = NcclName  # type: ignore[misc,assignment]
    constants.default_pg_nccl_timeout = c10d.default_pg_nccl_timeout = TIMEOUT
    backend_of = TracedGroup._get_backend
    TracedGroup._get_backend = lambda self, device: backend_of(self, on_cpu(device))  # type: ignore[method-assign]
    TracedGroup.bound_device_id = None  # type: ignore[assignment,method-assign] # told back; a real group would look for the device
    for name in ("send", "recv"):
        setattr(TracedGroup, name, _untagged(getattr(TracedGroup, name)))
    RealGroup.barrier = _of_the_cpu(RealGroup.barrier)  # type: ignore[method-assign]
    for name, given in SCALED.items():
        if hasattr(RealGroup, name):
            setattr(RealGroup, name, _scaling(getattr(RealGroup, name), given))
    pretend_uneven.install()
