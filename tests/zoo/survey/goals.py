"""What the survey is to show, as statements that rows decide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from attnres_compile.oracle import DISAGREES, NOT_JUDGED
from attnres_compile.passes.streams import MESSAGES
from tests.zoo.survey.row import Row

# Reasons that name another design than an additive stream: nothing was missed there, and nothing could be converted.
OTHER_DESIGNS = (
    *("post_norm", "post_activation", "gated", "partial_update", "multi_lane", "depth_attention", "shared_weights"),
    "no_adds",
)
# Converted, or refused with a reason.
SETTLED = ("converted", "refused", "no_stream")
SHARE = 0.95
# What an entry's own words call a design, and the reason that it must be refused with.
BY_NAME = {"post-norm": "post_norm", "post-activation": "post_activation"}

# Reasons of rows that are no detector's.
MEANING = {
    "graph_break": "tracing breaks inside the stream, where it cannot be followed",
    "capture": "dynamo cannot trace the model at all",
    "no_adds": "it adds no two floating tensors",
    "split": "all sublayers, but as more streams than the count says",
    "not_seen": "the rest is in no graph and in no report",
}


@dataclass(frozen=True)
class Goal:
    """One statement.

    Attributes:
        text: what should hold.
        holds: whether it does.
        numbers: what the rows say.
    """

    text: str
    holds: bool
    numbers: str


def goals(rows: Sequence[Row]) -> tuple[Goal, ...]:
    """All of them, as these rows decide them."""
    return tuple(_goals(rows))


def _goals(rows: Sequence[Row]) -> Iterator[Goal]:
    ran = [row for row in rows if row.status != "not_run"]
    wrong = [row for row in ran if row.status == "wrong"]
    traced = [row for row in ran if row.status == "traced"]
    beside = f"; beside them {_some(iter(traced))}, changed by torch.compile alone" if traced else ""
    yield Goal("not one model is converted wrongly", not wrong, f"{len(wrong)} of {len(ran)} that run{beside}")

    judged = [row for row in ran if row.oracle]
    if judged:
        apart = [row for row in judged if row.oracle == DISAGREES]
        unknown = [row for row in judged if row.oracle == NOT_JUDGED]
        yield Goal(
            "at random queries not one model disagrees with the equations",
            not apart,
            f"{len(apart)} of {len(judged)} disagree" + _but(iter(apart)) + f"; not judged: {len(unknown)}",
        )

    differing = [row for row in ran if row.status == "differs"]
    yield Goal(
        "no model has more sublayers than the count by hooks says",
        not differing,
        f"{len(differing)} of {len(ran)}, all exact" + _but(iter(differing)) if differing else f"0 of {len(ran)}",
    )

    causal = [row for row in ran if row.kind == "causal-lm"]
    settled = [row for row in causal if row.status in SETTLED and (row.status == "converted" or row.reason)]
    yield Goal(
        "every causal language model that eager PyTorch can run is converted, whole and exact, or refused by name",
        len(settled) == len(causal),
        f"{len(settled)} of {len(causal)}" + _but(row for row in causal if row not in settled),
    )

    additive = [row for row in ran if is_additive(row)]
    yield _share("every library", additive)
    counted = [row for row in ran if row.expected or is_additive(row)]
    yield _share("every library, what is refused as another design held against it as well", counted)
    for library in sorted({row.library for row in additive}):
        yield _share(library, [row for row in additive if row.library == library])

    for word, reason in BY_NAME.items():
        named = [row for row in ran if is_named(row, word)]
        if not named:
            continue
        refused = [row for row in named if row.status == "refused" and row.reason == reason]
        yield Goal(
            f"{word} families (by what the survey's list says of them) are refused as `{reason}`",
            len(refused) == len(named),
            f"{len(refused)} of {len(named)}" + _but(row for row in named if row not in refused),
        )


def _share(where: str, additive: Sequence[Row]) -> Goal:
    whole = [row for row in additive if row.status == "converted"]
    share = len(whole) / len(additive) if additive else 1.0
    text = f"{where}: at least {SHARE:.0%} of the models with an additive stream are converted whole"
    return Goal(text, share >= SHARE, f"{len(whole)} of {len(additive)}, {share:.1%}")


def is_additive(row: Row) -> bool:
    """Whether a model has an additive stream.

    By the count by hooks, unless it was refused for a reason that names another design. What ended before it was
    counted is held against the share.
    """
    if row.status in ("timeout", "memory", "error"):
        return True
    refused = row.status == "refused" and row.reason in OTHER_DESIGNS
    return bool(row.expected) and not refused


def is_named(row: Row, word: str) -> bool:
    """Whether the survey's list calls all of a model's blocks by this word."""
    return word in row.design.split(", ") or row.design == word


def _but(rows: Iterator[Row]) -> str:
    some = _some(rows)
    return f"; not {some}" if some else ""


def _some(rows: Iterator[Row]) -> str:
    names = [row.name for row in rows]
    shown = ", ".join(f"`{name}`" for name in names[:8])
    return shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def meaning(reason: str) -> str:
    """A reason in words."""
    return MEANING.get(reason) or {str(key): text for key, text in MESSAGES.items()}.get(reason, "")
