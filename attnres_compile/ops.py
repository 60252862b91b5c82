"""Operations for direct use, without converting a model."""

from attnres_compile.kernels.attention import depth_attention

__all__ = ["depth_attention"]
