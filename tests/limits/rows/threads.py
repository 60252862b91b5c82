"""Several threads and several models."""

from __future__ import annotations

from tests.limits.condition import Condition, Holds

_FILE = "tests/conditions/test_threads.py"

CONDITION = Condition(
    order=95,
    title="Threads, and several models of one class",
    holds=(
        Holds(
            "Two threads call one model, forward and backward, with sizes of their own, before and after it is "
            "compiled; one trains while the other one looks",
            (f"{_FILE}::test_two_threads_call_one_model", f"{_FILE}::test_training_and_evaluation_side_by_side"),
        ),
        Holds(
            "Threads that convert, train and call a model each",
            (f"{_FILE}::test_two_threads_with_a_model_each_and_other_configurations",),
        ),
        Holds(
            "Models of one class converted in different ways in one process, beside one that is not converted",
            (
                f"{_FILE}::test_models_of_one_class_converted_differently",
                "tests/test_backend.py::test_two_untouched_models_have_queries_of_their_own",
                "tests/test_not_dropped.py::test_converted_modules_do_not_share_one_recompile_limit",
            ),
        ),
    ),
    notes=(
        "PyTorch's switch for the fused `nn.TransformerEncoderLayer` is one for all threads. It is off while any "
        "converted model runs, so a model that is not converted takes the ordinary path meanwhile, which computes "
        "the same. `torch.export` marks the whole process as exporting: a converted model that another thread calls "
        "at that time raises `PlainExecutionError`.",
    ),
)
