"""What a command is pointed at -> a model, the inputs to call it with, and how to convert it."""

from attnres_compile.cli.targets.script import Target, arguments_of, load_target, own_words, user_code

__all__ = ["Target", "arguments_of", "load_target", "own_words", "user_code"]
