"""Sizes that change between calls."""

from __future__ import annotations

from tests.limits.condition import Condition, Holds

_FILE = "tests/conditions/test_dynamic_shapes.py"

CONDITION = Condition(
    order=50,
    title="Dynamic shapes, caches, decoding",
    holds=(
        Holds(
            "No more graphs are compiled than for the original under the same calls: other batches and lengths, both "
            "marked dynamic (one graph), `torch.compile(dynamic=True)` from outside",
            (
                f"{_FILE}::test_lengths_and_batches",
                f"{_FILE}::test_sizes_marked_dynamic",
                f"{_FILE}::test_compiled_from_outside",
            ),
        ),
        Holds(
            "The same for decoding with a growing key-value cache and with a static one of fixed shapes",
            (
                f"{_FILE}::test_decoding_with_a_growing_cache",
                f"{_FILE}::test_decoding_with_a_static_cache",
                "tests/zoo/test_generation.py::test_cache_and_no_cache_agree",
            ),
        ),
        Holds(
            "A graph for all sizes computes what each size gives compiled alone",
            (f"{_FILE}::test_one_row_of_queries_serves_all_sizes",),
        ),
    ),
    notes=("CUDA graphs themselves have not been captured, for want of a GPU; the shapes that they want are tested.",),
)
