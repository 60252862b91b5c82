"""The method's ops and the kernels behind them. Importing any module of it registers the operators."""

from attnres_compile.kernels import device_ops, ops, phase_autograd, phase_ops

__all__ = ["device_ops", "ops", "phase_autograd", "phase_ops"]
