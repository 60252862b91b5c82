"""Residual streams that run through graph breaks: the whole stream known beforehand, its sources beside the tensor
that crosses each break."""
