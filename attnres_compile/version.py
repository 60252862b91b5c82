"""The package's version; part of Inductor's cache key for graphs that our pass rewrites."""

__version__ = "0.1.0"
