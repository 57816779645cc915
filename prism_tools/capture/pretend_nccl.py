"""The backend "nccl" where devices are pretended: played by the server with NCCL's rules, and gloo's between sandbox ranks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.constants as constants
import torch.distributed.distributed_c10d as c10d

from prism_tools.capture import session as active
from prism_tools.capture.groups import AbsentBackend, GlooName, RealGloo, TracedGroup, kept
from prism_tools.capture.pretend_device import on_cpu

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
