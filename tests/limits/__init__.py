"""docs/limits.md from programs that are run: ``python -m tests.limits > docs/limits.md``."""
