"""Stand-ins for packages that Megatron Bridge imports and that need CUDA. Only Bridge sees them:
megatron.core and cp_ring find that these packages are missing, as on any machine without CUDA.
"""

import builtins
from abc import ABCMeta

PACKAGES = ("transformer_engine", "modelopt", "nvidia_resiliency_ext", "megatron.energon")
DECORATORS = ("stateless",)


class _Anything(ABCMeta):
    """A class whose attributes are such classes too, so that imports, annotations, `isinstance`,
    base classes and decorators work, and nothing else does.
    """

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = _stand_in(name)
        setattr(cls, name, made)
        return made

    def __call__(cls, *args, **kwargs):
        decorates = cls.__name__ in DECORATORS and len(args) == 1
        return args[0] if decorates else super().__call__(*args, **kwargs)


def _stand_in(name):
    body = {"__init__": lambda self, *args, **kwargs: None, "__call__": lambda self, what: what}
    return _Anything(name, (), body)


def install():
    """From now on modules of Bridge import stand-ins."""
    found = builtins.__import__
    packages = {name: _stand_in(name) for name in PACKAGES}

    def load(name, globals=None, locals=None, fromlist=(), level=0):
        package = next((known for known in packages if (name + ".").startswith(known + ".")), None)
        asks = str((globals or {}).get("__name__"))
        if level or package is None or not asks.startswith("megatron.bridge"):
            return found(name, globals, locals, fromlist, level)
        at = packages[package]
        for part in name[len(package) + 1 :].split(".") if fromlist and name != package else ():
            at = getattr(at, part)
        return at

    builtins.__import__ = load
