"""A meter of live tensor bytes that works on every device, the CPU included."""

from .._base.meter import LiveBytes, peak_on_cpu, peak_on_cuda

__all__ = ["LiveBytes", "peak_on_cpu", "peak_on_cuda"]
