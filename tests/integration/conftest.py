"""Fixtures of the integration tests."""

from helpers_processes import peers  # noqa: F401
