"""Errors that several checks collect."""

import pytest

from cp_ring.errors import ConfigError, Reasons


def test_an_exception_of_a_later_check_is_a_reason_too():
    reasons = Reasons()
    for error in (ConfigError("first"), KeyError("name"), ConfigError("first", "second")):
        with reasons.of():
            raise error
    with pytest.raises(ConfigError) as found:
        reasons.end()
    assert found.value.args == ("first", "a later check ended in KeyError: 'name'", "second")
    with pytest.raises(KeyError), Reasons().of():
        raise KeyError("name")
