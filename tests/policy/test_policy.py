"""Choosing a policy by its name: built in, or from a module of one's own."""

from __future__ import annotations

import pytest

from pdoffload.errors import ConfigError, MisuseError
from pdoffload.policy import Arc, Lru, make_policy

OWN = """
from pdoffload.policy.base import Policy
from pdoffload.policy.lru import Lru

class Patient(Lru):
    pass

class Abstract(Policy):
    pass

class Broken(Lru):
    def __init__(self, capacity):
        raise KeyError("no weights")

def patient(capacity):
    return Patient(capacity)
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A module of policies, importable for one test."""
    name = f"own_policies_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def problem(name, module_path=None):
    """The one line that tells the operator what is wrong."""
    with pytest.raises(ConfigError) as caught:
        make_policy(name, 4, module_path)
    (line,) = caught.value.problems
    return line


@pytest.mark.parametrize(("name", "kind"), [("lru", Lru), ("arc", Arc)])
def test_built_in_policies_are_known_by_name(name, kind):
    policy = make_policy(name, 7)
    assert type(policy) is kind
    assert policy.capacity == 7


def test_a_class_of_ones_own_is_imported(own_module):
    policy = make_policy("Patient", 4, own_module)
    assert type(policy).__name__ == "Patient"
    assert policy.capacity == 4


def test_a_built_in_name_wins_over_the_module():
    assert type(make_policy("lru", 4, "no.such.module")) is Lru


def test_an_unknown_name_says_what_is_known():
    line = problem("fifo")
    assert line.startswith('eviction_policy: got "fifo"')
    assert "lru, arc" in line
    assert "cache_policy_module_path" in line


def test_a_misspelt_name_is_told_the_nearest():
    assert "nearest: lru" in problem("LRU")


def test_a_module_that_is_not_there_is_named():
    line = problem("Patient", "no_such_module_of_policies")
    assert line.startswith("cache_policy_module_path:")
    assert "no_such_module_of_policies" in line


def test_a_module_that_fails_to_import_says_why(tmp_path, monkeypatch):
    (tmp_path / "failing_policies.py").write_text("raise ZeroDivisionError('in the module')")
    monkeypatch.syspath_prepend(str(tmp_path))
    line = problem("Patient", "failing_policies")
    assert line.startswith("cache_policy_module_path:")
    assert "in the module" in line


def test_a_relative_module_path_is_a_configuration_error():
    assert problem("Patient", ".policies").startswith("cache_policy_module_path:")


def test_a_misspelt_class_is_told_the_nearest(own_module):
    line = problem("Pateint", own_module)
    assert line.startswith('eviction_policy: got "Pateint", no such name')
    assert "nearest: Patient" in line


def test_a_function_is_not_a_policy(own_module):
    line = problem("patient", own_module)
    assert "not a class derived from Policy" in line


def test_a_module_without_policies_says_so():
    assert "it holds no policy" in problem("Lru", "json")


def test_a_class_that_lacks_a_method_is_told_which(own_module):
    line = problem("Abstract", own_module)
    assert line.startswith("eviction_policy: Abstract")
    assert "victims" in line


def test_a_class_that_cannot_be_made_says_why(own_module):
    assert "no weights" in problem("Broken", own_module)


def test_a_capacity_below_one_is_misuse():
    with pytest.raises(MisuseError, match="0"):
        make_policy("lru", 0)
