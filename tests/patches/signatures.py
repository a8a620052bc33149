"""Writes patches/signatures.json from several versions of Megatron. Run with each in turn, twice:

    PYTHONPATH=CHECKOUT python -m tests.patches.signatures [--anew]

--anew forgets the versions before. A patch that needs another version adds nothing.
"""

import inspect
import json
import sys
from pathlib import Path

from cp_ring import patches
from cp_ring.patches import patch as module

TABLE = Path(module.__file__).with_name("signatures.json")


def upstream(patch):
    """The functions of Megatron that a patch replaces, as `module:name`."""
    found = set()
    for owner, name, new in patch.changes():
        old = getattr(owner, name)
        if old is new:  # tests/parity/specs.py has replaced it
            continue
        if inspect.isclass(owner) and callable(old):
            home, _, part = owner.__module__.rpartition(".")
            exported = getattr(sys.modules.get(home), owner.__name__, None) is owner
            home = home if exported else f"{home}.{part}"  # versions differ in the module
            found.add(f"{home}:{owner.__qualname__}.{name}")
        elif inspect.isfunction(old) or inspect.isclass(old):
            found.add(f"{old.__module__}:{old.__qualname__}")
    return {name for name in found if name.startswith("megatron.") and module.parameters_of(name)}


def main():
    table = {} if "--anew" in sys.argv else json.loads(TABLE.read_text())
    before = {name: dict(functions) for name, functions in table.items()}
    for patch in patches.patches_by_name().values():
        try:
            names = upstream(patch)
        except (ImportError, AttributeError) as error:
            print(f"{patch.name}: {error}")
            continue
        functions = table.setdefault(patch.name, {})
        for name in sorted({*functions, *names}):
            known = functions.setdefault(name, [None] if patch.name in before else [])
            parameters = module.parameters_of(name)
            if parameters not in known:
                known.append(parameters)
    kept = {name: table[name] for name in sorted(table) if table[name]}
    TABLE.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
