import pytest

from cp_ring.comm.codecs import CODECS
from cp_ring.kernels import REGISTRY
from cp_ring.plan.layout import LAYOUTS
from cp_ring.plan.routes import ROUTES
from cp_ring.plan.sizes.attention_sizes import WIRES


@pytest.fixture
def registries():
    """What an example registers is gone after it."""
    kept = [(registry, dict(registry)) for registry in (LAYOUTS, ROUTES, REGISTRY, CODECS, WIRES)]
    yield
    for registry, entries in kept:
        registry.clear()
        registry.update(entries)
