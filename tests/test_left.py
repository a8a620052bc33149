"""Keywords and settings of the version before answer with one line that says what to do."""

import argparse

import pytest

import cp_ring
from cp_ring import ConfigError, PlanError, ring_attention
from cp_ring.megatron.options import SETTINGS, Options
from cp_ring.options import LEFT, LEFT_VALUES
from cp_ring.plan import Layout, Mask, layout
from tests.rings import Case


@pytest.mark.parametrize("name", LEFT)
def test_each_way_to_give_it_names_it(name):
    assert name not in SETTINGS and "\n" not in LEFT[name]
    q, k, v, _ = Case.draw(8)
    with pytest.raises(ConfigError, match=f"^{name} left cp_ring: "):
        ring_attention(q, k, v, **{name: 1})
    with pytest.raises(ConfigError, match=f"^{name} left cp_ring: "):
        Options.make(**{name: 1})
    parser = Options.add_arguments(argparse.ArgumentParser())
    for value in ([], ["1"]):
        with pytest.raises(ConfigError, match=f"^{Options.flag(name)} left cp_ring: "):
            parser.parse_args([Options.flag(name), *value])
    assert Options.flag(name) not in parser.format_help()


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in LEFT_VALUES.items() for value in values]
)
def test_a_value_that_left_says_what_to_give(name, value):
    with pytest.raises(ConfigError, match=f"{Options.flag(name)} '{value}': it left cp_ring: "):
        Options(**{name: value})
    if name != "pack":
        q, k, v, _ = Case.draw(8)
        with pytest.raises(ConfigError, match=f"^{name}='{value}' left cp_ring: "):
            ring_attention(q, k, v, **{name: value})


@pytest.mark.parametrize("name", cp_ring.LEFT)
def test_a_name_that_left_says_what_to_write(name):
    with pytest.raises(AttributeError, match=f"^cp_ring.{name} left: "):
        getattr(cp_ring, name)


def test_functions_of_megatron_that_left_say_what_to_do():
    import cp_ring.megatron

    for name in cp_ring.megatron.LEFT:
        with pytest.raises(ConfigError, match=rf"^cp_ring\.megatron\.{name} left cp_ring: "):
            getattr(cp_ring.megatron, name)


def test_keywords_of_the_balanced_layout_that_left_say_what_to_do():
    for name in layout.LEFT:
        with pytest.raises(PlanError, match=f"^{name} left cp_ring: "):
            Layout.balanced(Mask.causal(8), 2, **{name: 1})
    with pytest.raises(TypeError, match="no keyword other"):
        Layout.balanced(Mask.causal(8), 2, other=1)
