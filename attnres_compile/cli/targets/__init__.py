"""What a command is pointed at -> a model, the inputs to call it with, and how to convert it."""

from attnres_compile.cli.targets.hf import hf_model_types
from attnres_compile.cli.targets.inputs import arguments_of
from attnres_compile.cli.targets.loading import load_target
from attnres_compile.cli.targets.target import Target
from attnres_compile.cli.targets.user_code import own_words, user_code

__all__ = ["Target", "arguments_of", "hf_model_types", "load_target", "own_words", "user_code"]
