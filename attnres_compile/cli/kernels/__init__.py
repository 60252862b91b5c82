"""``attnres kernels``: the generated kernels of a site or a model, as text and as what they compile to."""
