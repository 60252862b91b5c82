"""Running somebody's script unchanged, with the first model that it calls converted on the way."""

from attnres_compile.running.outcome import Conversion, HeldQueries, Outcome, Refused
from attnres_compile.running.script import Ending
from attnres_compile.running.session import run_script

__all__ = ["Conversion", "Ending", "HeldQueries", "Outcome", "Refused", "run_script"]
