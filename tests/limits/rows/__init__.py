"""One file per condition. Each holds one :class:`tests.limits.condition.Condition` under the name ``CONDITION``."""
