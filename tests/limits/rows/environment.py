"""What no test here can show, for want of the machine."""

from __future__ import annotations

from tests.limits.condition import Condition

CONDITION = Condition(
    order=100,
    title="Devices",
    notes=(
        "Everything on this page was run on a CPU, and only there. **Nothing of it has been run on a GPU**: not the "
        "generated kernels, which are compiled for four architectures and run in Triton's interpreter, not CUDA "
        "graphs, not autocast on CUDA, and not activation checkpointing's savings in a GPU's memory. Bytes that are "
        "saved for the backward pass are counted in the tensors that autograd keeps.",
    ),
)
