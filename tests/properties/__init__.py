"""Random residual networks, and what must hold of their conversion.

A network is described by a :class:`~tests.properties.spec.Spec` that can be printed, compared and shrunk. When a
property fails, the message ends in the smallest spec that was found and a command that runs it again.
"""
