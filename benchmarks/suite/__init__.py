"""Suites of cases: run, read back, and written as figures and tables."""
