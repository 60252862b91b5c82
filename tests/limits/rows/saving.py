"""Copies, pickles and checkpoints."""

from __future__ import annotations

import attnres_compile as ac
from tests.limits.condition import Condition, Holds, Limit
from tests.limits.small import Steps, plain, tokens


def _model(**options: object) -> Steps:
    model = Steps(plain)
    ac.transform(model, tokens(), ac.AttnResConfig(**{"num_blocks": 2, "lowering": "eager", **options}))  # type: ignore[arg-type]
    return model


def _other_blocks() -> None:
    _model().load_state_dict(_model(num_blocks=4).state_dict())


def _some_missing() -> None:
    state = _model().state_dict()
    del state["attnres.norm"]
    ac.load_queries(_model(), state)


def _none_in_it() -> None:
    ac.load_queries(_model(), Steps(plain).state_dict())


def _not_said() -> None:
    ac.saved_config(dict(_model().state_dict()))


def _not_transformed() -> None:
    ac.load_queries(Steps(plain), _model().state_dict())


_TESTS = "tests/conditions/test_saved_and_loaded.py::"
_KEPT = "tests/test_not_dropped.py::"

CONDITION = Condition(
    order=60,
    title="Copies and checkpoints",
    holds=(
        Holds(
            "`copy.deepcopy`, `pickle`, and `torch.save` of a whole model: the copy runs converted",
            (_KEPT + "test_deepcopy_runs", _KEPT + "test_pickle_and_torch_save_run"),
        ),
        Holds(
            "a state_dict through `torch.save` and `torch.load(weights_only=True)`; `save_model` and `load_model` of "
            "safetensors",
            (_TESTS + "test_a_state_dict_of_weights_only", _TESTS + "test_safetensors_of_the_whole_model"),
        ),
        Holds(
            "`save_pretrained`, then `from_pretrained`, `transform` and `load_queries`. `from_pretrained` itself knows "
            "no queries: it names them as unexpected keys, in a warning, and leaves them out",
            (
                _TESTS + "test_save_pretrained_and_from_pretrained",
                _TESTS + "test_a_checkpoint_with_queries_serves_the_plain_model",
            ),
        ),
        Holds(
            "`save_queries` writes the queries by themselves with the configuration, `saved_config` reads that and "
            "`load_queries` both, from files and folders, in shards or not, under the names that wrappers make",
            (
                _TESTS + "test_queries_alone_in_a_file_or_folder",
                _TESTS + "test_shards_with_an_index",
                _TESTS + "test_names_under_what_wrappers_put_in_front",
                "tests/conditions/test_adapters.py::test_queries_beside_saved_adapters",
            ),
        ),
        Holds(
            "`load_state_dict(strict=False)` with a part of the queries warns; with none of them, as from before the "
            "conversion, it leaves them as they are",
            (
                _TESTS + "test_a_part_of_the_queries_is_warned_of",
                _TESTS + "test_a_checkpoint_from_before_leaves_the_queries_without_a_word",
            ),
        ),
    ),
    notes=(
        "Names and sizes of queries are the same for four blocks and for eight. State_dicts of `torch.save` and files "
        "of `save_queries` say how the model was converted, and others are refused. Safetensors files of other "
        "libraries cannot say it: `load_queries` warns that it takes it on trust, and `load_model` does not know.",
    ),
    limits=(
        Limit(
            "a state_dict of a model with other blocks (or another gain, scale, ..)",
            _other_blocks,
            ac.CheckpointError,
            "The queries would fit by name and size, and mean something else.",
            "Transform with the configuration that they were trained with.",
        ),
        Limit(
            "`load_queries` of a checkpoint that lacks some",
            _some_missing,
            ac.CheckpointError,
            "Half of the queries is no model that anybody trained.",
            "Transform with the options that the model was trained with.",
        ),
        Limit(
            "`load_queries` of a checkpoint that has none",
            _none_in_it,
            ac.CheckpointError,
            "They would stay zero without a word.",
            "Load a plain checkpoint with `load_state_dict(strict=False)`.",
        ),
        Limit(
            "`load_queries` into a model that is not transformed",
            _not_transformed,
            ac.NotTransformedError,
            "There is no place for them.",
            "Transform it first.",
        ),
        Limit(
            "`saved_config` of a checkpoint that does not say how its model was converted",
            _not_said,
            ac.CheckpointError,
            "A guess would be taken for what was trained.",
            "Give the configuration yourself, and write the queries with `save_queries` from then on.",
        ),
    ),
)
