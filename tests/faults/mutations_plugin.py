"""Loaded by pytest before any test: something is deleted of a module that the tests import (:mod:`mutations`)."""

from tests.faults.mutations import install

install()
