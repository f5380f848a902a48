"""Is a net sound? `gradients` compares a few watched passes with ordinary autograd, `drift` measures what recovery costs."""

from .findings import Finding
from .gradients import Drift, Report, Row, drift, gradients

__all__ = ["Drift", "Finding", "Report", "Row", "drift", "gradients"]
