"""``python -m tests.properties JUDGE SPEC CONFIG``: one network again, as a failed search says it."""

from __future__ import annotations

import sys

from attnres_compile import AttnResConfig
from tests.properties import spec
from tests.properties.searching import JUDGES

if __name__ == "__main__":
    name, network, config = sys.argv[1:]
    names = {**vars(spec), "AttnResConfig": AttnResConfig}
    print(JUDGES[name](eval(network, names), eval(config, names)))
