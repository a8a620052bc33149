"""The packaged configurations as models that two ranks of the CPU train: tiny_configs.yaml says by
what values.
"""

import functools
import json
from pathlib import Path

import yaml


@functools.cache
def _table():
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def tiny(name):
    """Overrides that make it tiny."""
    sections = _table()[name].items()
    return [
        f"{section}.{key}={json.dumps(x)}" for section, keys in sections for key, x in keys.items()
    ]


def tiny_words(name):
    """As words of a command line, with its name."""
    return [name, *(word for one in tiny(name) for word in ("--set", one))]
