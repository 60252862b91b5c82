"""Prints docs/limits.md, made by running every limit's program."""

from __future__ import annotations

import sys

from tests.limits.document import document

if __name__ == "__main__":
    sys.stdout.write(document())
