"""Turn an existing PyTorch model into an Attention Residuals model.

::

    import attnres_compile as ac

    ac.explain(model, example_inputs)      # what would be done
    ac.transform(model, example_inputs)    # do it, in place
    ac.pseudo_queries(model)               # the new parameters
    ac.revert(model)                       # undo it

``torch.compile(model, backend="attnres")`` works on transformed models and on untouched ones.
"""

from attnres_compile import ops
from attnres_compile.api import explain, plain, pseudo_queries, report, revert, rewrite_graph, transform
from attnres_compile.config import AttnResConfig
from attnres_compile.depth_weights import DepthWeights, StreamWeights, depth_weights
from attnres_compile.errors import (
    AlreadyCompiledError,
    AlreadyDistributedError,
    AlreadyTransformedError,
    AttnResError,
    CaptureError,
    CheckpointError,
    ConfigError,
    GraphBreakError,
    InexactError,
    InputsError,
    KernelError,
    LoweringError,
    MissingDependencyError,
    ModelError,
    NoStreamError,
    NotTransformedError,
    PlainExecutionError,
    PlanMismatchError,
    RejectedStreamError,
)
from attnres_compile.exactness import Exactness, verify
from attnres_compile.exporting import export as export_program
from attnres_compile.inputs import Inputs
from attnres_compile.loading import load_queries, save_queries, saved_config
from attnres_compile.passes.streams import Reason
from attnres_compile.report import TransformReport
from attnres_compile.version import __version__

__all__ = [
    "AlreadyCompiledError",
    "AlreadyDistributedError",
    "AlreadyTransformedError",
    "AttnResConfig",
    "AttnResError",
    "CaptureError",
    "CheckpointError",
    "ConfigError",
    "DepthWeights",
    "Exactness",
    "GraphBreakError",
    "InexactError",
    "Inputs",
    "InputsError",
    "KernelError",
    "LoweringError",
    "MissingDependencyError",
    "ModelError",
    "NoStreamError",
    "NotTransformedError",
    "PlainExecutionError",
    "PlanMismatchError",
    "Reason",
    "RejectedStreamError",
    "StreamWeights",
    "TransformReport",
    "__version__",
    "depth_weights",
    "explain",
    "export_program",
    "load_queries",
    "ops",
    "plain",
    "pseudo_queries",
    "report",
    "revert",
    "rewrite_graph",
    "save_queries",
    "saved_config",
    "transform",
    "verify",
]
