"""Keywords and settings of the version before answer with one line that says what to do."""

import argparse

import pytest

import cp_ring
from cp_ring import ring_attention
from cp_ring.megatron.options import SETTINGS, Options
from cp_ring.options import LEFT, LEFT_VALUES
from cp_ring.plan import Layout, Mask, layout
from cp_ring.testing.oracle import Case
from tests.rings import said

QKV = Case.draw(8)[:3]


@pytest.mark.parametrize("name", LEFT)
def test_each_way_to_give_it_names_it(name):
    assert name not in SETTINGS and "\n" not in LEFT[name]
    flag, parser = Options.flag(name), Options.add_arguments(argparse.ArgumentParser())
    for line in (said(ring_attention, *QKV, **{name: 1}), said(Options.make, **{name: 1})):
        assert line.startswith(f"{name} left cp_ring: ")
    for value in ([], ["1"]):
        assert said(parser.parse_args, [flag, *value]).startswith(f"{flag} left cp_ring: ")
    assert flag not in parser.format_help()


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in LEFT_VALUES.items() for value in values]
)
def test_a_value_that_left_says_what_to_give(name, value):
    given = {name: value}
    assert f"{Options.flag(name)} '{value}': it left cp_ring: " in said(Options, **given)
    if name != "pack":
        line = said(ring_attention, *QKV, **given)
        assert line.startswith(f"{name}='{value}' left cp_ring: ")


@pytest.mark.parametrize("name", cp_ring.LEFT)
def test_a_name_that_left_says_what_to_write(name):
    with pytest.raises(AttributeError, match=f"^cp_ring.{name} left: "):
        getattr(cp_ring, name)


def test_functions_of_megatron_that_left_say_what_to_do():
    import cp_ring.megatron

    for name in cp_ring.megatron.LEFT:
        line = said(getattr, cp_ring.megatron, name)
        assert line.startswith(f"cp_ring.megatron.{name} left cp_ring: ")


def test_keywords_of_the_balanced_layout_that_left_say_what_to_do():
    for name in layout.LEFT:
        line = said(Layout.balanced, Mask.causal(8), 2, **{name: 1})
        assert line.startswith(f"{name} left cp_ring: ")
    with pytest.raises(TypeError, match="no keyword other"):
        Layout.balanced(Mask.causal(8), 2, other=1)
