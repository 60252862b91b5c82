"""An independent, slow interpreter of depth attention, to hold conversions against at any queries.

It runs the *original* model, eagerly and operator by operator, and knows of the conversion what its report says: where
the add of each sublayer stands, which sublayers form a block, and which states are read with a query. Everything else
it finds out from numbers: what carries the stream from one add to the next, and which dimension holds its features
(:mod:`attnres_compile.oracle.features`). At each site it puts in the mix that the equations give
(:mod:`attnres_compile.oracle.equation`). It shares no code with detection, planning, rewriting or the kernels.
"""

from attnres_compile.oracle.judge import DISAGREES, HOLDS, NOT_JUDGED, Verdict, judge

__all__ = ["DISAGREES", "HOLDS", "NOT_JUDGED", "Verdict", "judge"]
