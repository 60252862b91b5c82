"""Several processes."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import attnres_compile as ac
from tests.limits.condition import Condition, Holds, Limit
from tests.models import build, example

_FILE = "tests/conditions/test_data_parallel.py"


def _a_wrapper_first() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapper = DistributedDataParallel(build())
        ac.transform(wrapper.module, example(), ac.AttnResConfig(lowering="eager"))
    finally:
        dist.destroy_process_group()


CONDITION = Condition(
    order=97,
    title="Several processes",
    holds=(
        Holds(
            "A model that is transformed and then wrapped by `DistributedDataParallel`: the wrapper knows the queries "
            "as it knows all other parameters",
            (f"{_FILE}::test_transform_first_is_right",),
        ),
        Holds(
            "`attnres run` converts a model that its script has wrapped already: it averages the queries' gradients "
            "itself, and they stay equal on all processes",
            ("tests/running/test_wrapped_models.py::test_queries_stay_equal_over_processes",),
        ),
    ),
    limits=(
        Limit(
            "`transform` after `DistributedDataParallel`: of the wrapper, of the model in it, or of a part or the "
            "whole of either",
            _a_wrapper_first,
            ac.AlreadyDistributedError,
            "The wrapper writes down when it is built which gradients it averages.",
            "Transform first, and wrap the result.",
        ),
    ),
    notes=(
        "`DistributedDataParallel` was run after `transform` on one process, and by `attnres run` on two. Models of "
        "more than one bucket (25 MB), and FSDP2 on several processes, were not.",
    ),
)
