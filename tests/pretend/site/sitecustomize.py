"""Imported by every Python process with this folder on its path."""

from tests.pretend.process import install

install()
