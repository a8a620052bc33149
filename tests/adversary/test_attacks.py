"""The attacks of this package as part of the test run: cp_ring holds in every try, and the canary notices what it should."""

import io
import json
import pickle
import subprocess
import sys
import zipfile

import pytest
import torch

from tests.adversary import ATTACKS, canary, checkpoints, gadgets
from tests.adversary.__main__ import run


@pytest.mark.parametrize("name", ATTACKS)
def test_holds(name):
    (entry,), failures = run([name])
    assert not failures, failures[:5]
    assert entry["tries"] == entry["held"] > 0


def test_the_corpus_has_at_least_200_gadgets(tmp_path):
    assert len(list(checkpoints._pickles(tmp_path))) >= 200


def test_the_program_prints_entries():
    command = [sys.executable, "-m", "tests.adversary", "--json", "--only", "extension codes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [{"attack": "extension codes", "tries": 6, "held": 6}]


@pytest.mark.parametrize("target", ["canary", "class of the canary", "os.system", "exec", "open", "import_module"])
def test_the_canary_notices_what_a_careless_reader_does(tmp_path, target):
    module, name, args = gadgets.targets(tmp_path)[target]
    sys.modules.pop("this", None)
    ways = {way: data for way, _, data in gadgets.ways(module, name, args)}
    for way in ("reduce", "reduce by names on the stack"):
        sys.modules.pop("this", None)
        with canary.watched() as happened:
            pickle.loads(ways[way])
        assert happened, way


def test_a_try_that_loads_or_trips_is_not_held(tmp_path):
    assert checkpoints.attempt("", dict, tmp_path).problem.startswith("it was loaded")
    assert checkpoints.attempt("", canary.trip, tmp_path).problem == "called"
    assert checkpoints.attempt("", lambda: (tmp_path / "new").touch(), tmp_path).problem
    assert "not for users" in checkpoints.attempt("", lambda: {}[0], tmp_path).problem


def test_python_and_torch_see_another_archive():
    shown, hidden = (
        {"archive/data.pkl": b"a", "archive/version": b"3\n"},
        {"archive/data.pkl": b"b", "archive/constants.pkl": b"c"},
    )
    data = gadgets.two_directories(shown, hidden | {"archive/version": b"3\n"})
    assert zipfile.ZipFile(io.BytesIO(data)).namelist() == list(shown)
    assert "constants.pkl" in torch._C.PyTorchFileReader(io.BytesIO(data)).get_all_records()
