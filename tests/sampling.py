"""Which tests try a few of their cases by default, and all of them with ``-m "long or not long"``.

Only such as do one thing on many models or settings that take seconds each, and that differ little for what is tested;
never those whose cases are each a rule of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest

# Name of the test, after its file's where others have the name, too: how many of its cases are tried.
A_FEW = {
    "test_the_row_on_file_is_measured_again": 8,
    "test_equals_the_handwritten_model": 10,
    "test_modes_shapes_and_autocast_bind_the_same_queries": 2,
    "test_conversion_is_exact_real_and_reversible": 8,
    "test_cache_and_no_cache_agree": 2,
    "test_ten_steps_lower_the_loss_and_move_the_queries": 2,
    "test_our_backend_around_the_whole_model": 2,
    "test_conversion_is_exact_in_float64": 2,
    "test_dropout_with_a_fixed_seed_is_the_original_s": 3,
    "test_streams_are_found": 7,
    "test_attention_and_mlp_readers": 6,
    "test_assigned_weights_and_queries_are_used_after_compilation": 1,
    "test_every_line_fits_and_is_ascii": 20,
    "test_bytes_by_hand": 20,
    "test_random_queries_give_what_they_give_without_checkpoints": 3,
    "test_exact_and_found_whole": 3,
    "test_returned_hidden_states_are_one_more_reader": 1,
    "test_converted_in_training_mode_it_serves_evaluation": 1,
    "test_state_dict_round_trip": 1,
    "test_old_checkpoint_lacks_the_queries_alone": 1,
    "test_architectures": 4,
    "test_compile_only.py::test_site": 8,
    "test_gradient_checkpointing_enable": 1,
    "test_asked_for_first_after_conversion": 1,
    "test_autocast_of_a_library_s_model": 1,
    "test_an_untouched_model_through_the_backend": 1,
}


def leave_to_the_long_run(items: Iterable[pytest.Item]) -> None:
    """Mark the cases that are not among the few as ``long``; those that stay are spread evenly."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        name = getattr(item, "originalname", item.name)
        if name in A_FEW or f"{item.path.name}::{name}" in A_FEW:
            cases[f"{item.path.name}::{name}"].append(item)
    for key, found in cases.items():
        few = A_FEW.get(key, A_FEW.get(key.rpartition("::")[2], 0))
        kept = {round(at * (len(found) - 1) / max(few - 1, 1)) for at in range(few)}
        for at, item in enumerate(found):
            if at not in kept:
                item.add_marker("long")
