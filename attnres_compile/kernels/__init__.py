"""The method's ops and the kernels behind them."""
