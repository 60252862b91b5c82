"""What a checkpoint says of the conversion that its pseudo-queries were trained in.

Names and sizes of queries are the same for four blocks and for eight, so by themselves they do not show that a
checkpoint belongs to another conversion. The record does. It travels where it takes no key of the state_dict: in the
state_dict's metadata, beside the modules' versions (``torch.save`` keeps it), and in the header of a safetensors file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnres_compile.config import AttnResConfig
from attnres_compile.errors import CheckpointError, ConfigError

# Under which the record stands, in the metadata of a module and in the header of a file.
RECORD = "attnres"
# Fields that change what queries compute. The layout of blocks is compared as it came out.
_MEANING = ("gain", "eps", "key_norm_weight", "value", "logit_scale", "queries")


@dataclass(frozen=True)
class Record:
    """How one module was converted.

    Attributes:
        config: the configuration, choices about running left out.
        blocks: for each stream the numbers of sublayers of its blocks; empty where they are not known.
    """

    config: AttnResConfig
    blocks: tuple[tuple[int, ...], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; :meth:`from_dict` takes them back."""
        return {"config": self.config.layout().to_dict(), "blocks": [list(sizes) for sizes in self.blocks]}

    @classmethod
    def from_dict(cls, values: Any) -> Record:
        """The record that :meth:`to_dict` wrote.

        Raises:
            CheckpointError: it is none, or one of a later version of this package.
        """
        try:
            blocks = tuple(tuple(int(size) for size in sizes) for sizes in values["blocks"])
            return cls(AttnResConfig.from_dict(dict(values["config"])), blocks)
        except (KeyError, TypeError, ValueError, ConfigError) as error:
            raise CheckpointError(
                f"what the checkpoint says of its conversion cannot be read: {error}",
                remedy="It may be of a later version of attnres_compile",
            ) from error

    def differences(self, other: Record) -> list[str]:
        """What ``other`` has otherwise, in words: ``gain='mean', not 'sum'``; empty where queries mean the same."""
        found = [
            f"{name}={getattr(other.config, name)!r}, not {getattr(self.config, name)!r}"
            for name in _MEANING
            if getattr(other.config, name) != getattr(self.config, name)
        ]
        if self.blocks and other.blocks:
            if self.blocks != other.blocks:
                found.append(f"blocks of {_sizes(other.blocks)} sublayers, not {_sizes(self.blocks)}")
        else:
            found += [
                f"{name}={getattr(other.config, name)!r}, not {getattr(self.config, name)!r}"
                for name in ("num_blocks", "block_size")
                if getattr(other.config, name) != getattr(self.config, name)
            ]
        return found

    def refuse(self, saved: Record, checkpoint: str, module: str = "") -> None:
        """Raise if queries that were trained as ``saved`` says would compute something else here.

        Args:
            saved: the checkpoint's record.
            checkpoint: what to call the checkpoint.
            module: path of the converted module.

        Raises:
            CheckpointError: they would.
        """
        found = self.differences(saved)
        if found:
            raise CheckpointError(
                f"the pseudo-queries in {checkpoint} are those of another conversion: {'; '.join(found)}",
                module=module,
                remedy="Transform the model with the configuration that they were trained with "
                "(attnres_compile.saved_config reads it from a file or folder)",
            )


def _sizes(blocks: Sequence[Sequence[int]]) -> str:
    return " and ".join(", ".join(map(str, sizes)) for sizes in blocks)


def to_header(records: Mapping[str, Record]) -> dict[str, str]:
    """The entry of a safetensors header for the records of converted modules by their paths."""
    return {RECORD: json.dumps({path: record.to_dict() for path, record in records.items()}, sort_keys=True)}


def from_header(header: Mapping[str, str] | None) -> dict[str, Record]:
    """The records in a safetensors header by the paths of their modules; empty where there are none.

    Raises:
        CheckpointError: the entry is there and cannot be read.
    """
    text = (header or {}).get(RECORD)
    if text is None:
        return {}
    try:
        values = json.loads(text)
        return {str(path): Record.from_dict(record) for path, record in values.items()}
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"what the checkpoint says of its conversion cannot be read: {error}") from error


__all__ = ["RECORD", "Record", "from_header", "to_header"]
