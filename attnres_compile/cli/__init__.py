"""The ``attnres`` command."""
