"""The only lists of op targets, for torch-level, ATen and ``symbolic_trace`` graphs alike.

Every target is reduced to one name (``operator.iadd`` -> ``iadd``, ``Tensor.add_`` -> ``add_``,
``aten.add.Tensor`` -> ``add``, ``nn.Linear`` -> ``module:Linear``); the lists below speak of these names.
An op that no list knows is opaque: values flow through it, and nothing is assumed of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_HOME_MODULES = ("torch", "_operator", "builtins", "math", "operator")

# Spellings of x + y. The two trailing groups write into their first operand.
ADDS = frozenset({"add", "__add__", "__radd__"})
SUBS = frozenset({"sub", "subtract", "__sub__"})
INPLACE_ADDS = frozenset({"iadd", "add_", "__iadd__"})
INPLACE_SUBS = frozenset({"isub", "sub_", "subtract_", "__isub__"})
# beta * x + alpha * (a @ b), and x + value * a * b: the first operand may be the stream.
FUSED_PRODUCTS = {"addmm": "mm", "baddbmm": "bmm", "addcmul": "mul"}
INTERPOLATIONS = frozenset({"lerp", "lerp_"})
# Add their first operand to something else, in forms that nothing here takes apart.
OPAQUE_ADDS = frozenset(
    {"addcmul_", "addcdiv", "addcdiv_", "addmm_", "addmv", "addmv_", "addr", "addr_", "addbmm", "addbmm_", "baddbmm_"}
)

CASTS = frozenset({"to", "float", "half", "bfloat16", "double", "type", "type_as", "_to_copy", "convert_element_type"})
# Same elements in the same number, maybe elsewhere or under another shape.
RESHAPES = frozenset(
    {
        "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "_unsafe_view", "view_as",
        "reshape_as", "ravel",
    }
)  # fmt: skip
PERMUTES = frozenset({"permute", "transpose", "movedim", "swapaxes", "swapdims", "moveaxis", "t", "mT"})
SHUFFLES = frozenset({"roll", "flip"})
COPIES = frozenset({"contiguous", "clone", "alias", "lift_fresh", "module:Identity", "identity", "requires_grad_"})
DROPOUTS = frozenset(
    {
        "dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "alpha_dropout", "native_dropout",
        "dropout_", "feature_dropout_", "module:Dropout", "module:Dropout1d", "module:Dropout2d",
        "module:Dropout3d", "module:AlphaDropout",
    }
)  # fmt: skip
SCALES = frozenset({"mul", "multiply", "__mul__", "__rmul__", "div", "truediv", "true_divide", "divide"})

# Scales that write into their first operand, and what computes the same without.
INPLACE_SCALES = {
    "imul": "mul", "__imul__": "mul", "mul_": "mul", "multiply_": "mul",
    "itruediv": "div", "__itruediv__": "div", "div_": "div", "divide_": "div", "true_divide_": "div",
}  # fmt: skip

# Recurrent layers and their cells: called with the data, states to start from, and then the weights.
RECURRENCES = frozenset(
    {
        "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
        "mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn", "quantized_lstm", "quantized_gru",
    }
)  # fmt: skip

# A contraction sums over a dimension of its data against a weight. The value is the axis of its result that
# holds the features it makes.
CONTRACTIONS = {
    "linear": -1, "matmul": -1, "mm": -1, "bmm": -1, "addmm": -1, "baddbmm": -1, "__matmul__": -1,
    "imatmul": -1, "einsum": None, "bilinear": -1, "tensordot": -1, "mv": -1, "addbmm": -1, "dot": -1, "inner": -1,
    "_grouped_mm": -1, "_scaled_mm": -1, "_scaled_grouped_mm": -1, "_int_mm": -1, "_weight_int8pack_mm": -1,
    "_weight_int4pack_mm": -1, "grouped_mm": -1, "scaled_mm": -1,
    "conv1d": 1, "conv2d": 1, "conv3d": 1, "conv_transpose1d": 1, "conv_transpose2d": 1,
    "conv_transpose3d": 1, "convolution": 1, "_convolution": 1,
    "multi_head_attention_forward": -1, "_native_multi_head_attention": -1,
    **dict.fromkeys(RECURRENCES, -1),
}  # fmt: skip
CONTRACTION_MODULES = {
    "Linear": -1, "Bilinear": -1, "Conv1d": 1, "Conv2d": 1, "Conv3d": 1, "ConvTranspose1d": 1,
    "ConvTranspose2d": 1, "ConvTranspose3d": 1, "MultiheadAttention": -1, "LSTM": -1, "GRU": -1, "RNN": -1,
    "LSTMCell": -1, "GRUCell": -1, "RNNCell": -1,
    "NonDynamicallyQuantizableLinear": -1,
}  # fmt: skip
# What operators that attend are called, whoever wrote them; and what else lets one token see another.
ATTENTION_MARKS = ("attention", "attn", "module:multiheadattention")
TOKEN_MIXERS = frozenset(
    {
        "lstm", "gru", "rnn_tanh", "rnn_relu", "mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn",
        "fft_fft", "fft_fft2", "fft_fftn", "fft_rfft", "fft_rfft2", "fft_irfft2", "_fft_r2c", "_fft_c2c", "roll",
        "flip", "cumsum", "cumprod", "logcumsumexp", "scan", "associative_scan", "while_loop", "avg_pool1d",
        "avg_pool2d", "avg_pool3d", "max_pool1d", "max_pool2d", "max_pool3d", "unfold", "module:LSTM", "module:GRU",
        "module:RNN", "module:AvgPool1d", "module:AvgPool2d", "module:MaxPool2d",
    }
)  # fmt: skip
# Puts tensors beside each other, and takes a part along a dimension; neither changes which dimension is which.
JOINS = frozenset({"cat", "concat", "concatenate"})
STACKS = frozenset({"stack", "vstack", "hstack", "dstack"})
SOFTMAXES = frozenset({"softmax", "_softmax", "_safe_softmax", "log_softmax", "module:Softmax"})
SLICES = frozenset({"getitem", "__getitem__", "slice", "narrow"})
SPLITS = frozenset({"chunk", "split", "split_with_sizes", "tensor_split"})
# Picks parts of its first operand.
PICKS = frozenset({"index", "index_select", "gather", "take", "embedding", "__getitem__"})
LOOKUPS = frozenset({"embedding", "embedding_bag", "module:Embedding", "module:EmbeddingBag"})

NORMS = {
    "layer_norm": -1, "rms_norm": -1, "native_layer_norm": -1, "_fused_rms_norm": -1, "group_norm": 1,
    "native_group_norm": 1, "batch_norm": 1, "native_batch_norm": 1, "_native_batch_norm_legit": 1,
    "_native_batch_norm_legit_no_training": 1, "instance_norm": 1, "normalize": -1, "module:LayerNorm": -1,
    "module:RMSNorm": -1, "module:GroupNorm": 1, "module:BatchNorm1d": 1, "module:BatchNorm2d": 1,
    "module:BatchNorm3d": 1, "module:SyncBatchNorm": 1, "module:InstanceNorm1d": 1,
    "module:InstanceNorm2d": 1, "cudnn_batch_norm": 1, "miopen_batch_norm": 1,
}  # fmt: skip
# What a mean is written with, beside scales.
AVERAGES = frozenset({"mean", "sum", "masked_fill"})
# What a hand-written norm ends in, and what else it is made of.
NORM_MARKS = frozenset({"rsqrt", "sqrt", "norm", "linalg_vector_norm", "vector_norm", "std", "var_mean"})
NORM_PARTS = NORM_MARKS | frozenset(
    {"pow", "__pow__", "square", "mean", "var", "sum", "reciprocal", "abs", "amax", "max", "clamp_min", "neg"}
)
ACTIVATIONS = frozenset(
    {
        "relu", "relu_", "gelu", "silu", "silu_", "swish", "leaky_relu", "leaky_relu_", "elu", "elu_", "selu",
        "hardswish", "hardswish_", "hardtanh", "relu6", "relu6_", "mish", "softplus", "tanh", "sigmoid",
        "module:ReLU", "module:GELU", "module:SiLU", "module:LeakyReLU", "module:ReLU6", "module:Hardswish",
        "module:ELU", "module:Mish", "module:Tanh",
    }
)  # fmt: skip
CLAMPS = frozenset({"clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_max", "nan_to_num"})
# Asks for something about a tensor that its values do not enter.
METADATA = frozenset(
    {
        "size", "dim", "sym_size", "sym_stride", "sym_numel", "numel", "stride", "ndimension", "is_contiguous",
        "is_floating_point", "get_device", "element_size", "shape", "dtype", "device", "ndim", "len",
    }
)  # fmt: skip
# Results that share memory with the first operand, beside what the layout lists say.
VIEWS = (
    RESHAPES
    | PERMUTES
    | frozenset(
        {
            "getitem", "select", "slice", "narrow", "expand", "expand_as", "broadcast_to", "split", "chunk",
            "unbind", "diagonal", "as_strided", "detach", "alias", "contiguous", "unfold", "tensor_split",
            "split_with_sizes", "view_as_real", "view_as_complex", "real", "imag", "swapaxes", "T", "mT",
        }
    )
    | CASTS
)  # fmt: skip
INPLACE_NAMES = frozenset(
    {
        "setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor",
        "imatmul", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__",
    }
)  # fmt: skip
CHECKPOINTS = frozenset({"tag_activation_checkpoint", "checkpoint"})


def name_of(node: fx.Node) -> str:
    """The one name of what ``node`` computes; ``""`` for placeholders, constants and the output."""
    target: Any = node.target
    if node.op == "call_method":
        return str(target)
    if node.op == "call_module":
        module = module_of(node)
        return f"module:{type(module).__name__}" if module is not None else f"module:{target}"
    if node.op != "call_function":
        return ""
    cached = _NAMES.get(id(target))
    if cached is not None and cached[0] is target:
        return cached[1]
    name = _function_name(target)
    _NAMES[id(target)] = (target, name)
    return name


# Keeps the target alive beside its name, so that an id is never that of another object.
_NAMES: dict[int, tuple[Any, str]] = {}


def _function_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        return name if namespace in ("aten", "prims") else f"{namespace}::{name}"
    if isinstance(target, torch._ops.OpOverloadPacket):
        namespace, _, name = target._qualified_op_name.partition("::")
        return name if namespace in ("aten", "prims") else f"{namespace}::{name}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return str(target.name())
    name = str(getattr(target, "__name__", None) or type(target).__name__)
    if name == "trampoline_autograd_apply":
        # What dynamo calls in the place of a function with a gradient of its own that it is told not to look into.
        return name
    home = getattr(target, "__module__", None) or "torch"
    if home.split(".")[0] in _HOME_MODULES:
        return name
    return f"{home}.{name}"


def is_foreign(name: str) -> bool:
    """Whether an op of this name is somebody else's operator, or a function with a gradient of its own."""
    return "::" in name or name in ("autograd_function_apply", "trampoline_autograd_apply")


def is_metadata(node: fx.Node) -> bool:
    """Whether ``node`` asks only for a shape, a dtype or the like."""
    name = name_of(node)
    return name in METADATA or (name == "getattr" and len(node.args) > 1 and node.args[1] in METADATA)


def is_root(node: fx.Node) -> bool:
    """Whether ``node`` takes a root, as a hand-written norm does: by name, or as a power such as ``x ** -0.5``."""
    name = name_of(node)
    if name in ("pow", "__pow__"):
        exponent = node.args[1] if len(node.args) > 1 else node.kwargs.get("exponent")
        return isinstance(exponent, float) and not exponent.is_integer()
    return name in NORM_MARKS


def adds_zero(node: fx.Node) -> fx.Node | None:
    """What ``node`` adds the number 0 to (builtin ``sum`` starts from it), or ``None``."""
    if name_of(node) not in ADDS or len(node.args) != 2 or node.kwargs:
        return None
    left, right = node.args
    for kept, number in ((left, right), (right, left)):
        if isinstance(kept, fx.Node) and isinstance(number, (int, float)) and number == 0:
            return kept
    return None


def functional(node: fx.Node) -> Any:
    """The target that computes what the in-place scale ``node`` does, into a tensor of its own."""
    name = INPLACE_SCALES[name_of(node)]
    if node.op == "call_method":
        return name
    if isinstance(node.target, torch._ops.OpOverload):
        return getattr(getattr(torch.ops.aten, name), node.target._overloadname)
    return getattr(torch, name)


def module_of(node: fx.Node) -> torch.nn.Module | None:
    """The module that a ``call_module`` node calls, or ``None``."""
    owner = node.graph.owning_module
    if node.op != "call_module" or owner is None:
        return None
    try:
        return owner.get_submodule(str(node.target))
    except AttributeError:
        return None


def dropout_is_identity(node: fx.Node) -> bool:
    """Whether a dropout node passes its input through (evaluation mode, or probability 0)."""
    module = module_of(node)
    if module is not None:
        return not module.training or bool(getattr(module, "p", None) == 0)
    name = name_of(node)
    if name == "native_dropout":
        train = node.args[2] if len(node.args) > 2 else node.kwargs.get("train", True)
        return train is False or (len(node.args) > 1 and bool(node.args[1] == 0))
    probability = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
    if isinstance(node.target, torch._ops.OpOverload) or node.target in (
        torch.dropout,
        torch.feature_dropout,
    ):
        training = node.args[2] if len(node.args) > 2 else node.kwargs.get("train", True)
    else:
        training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True)
    return training is False or bool(probability == 0)
