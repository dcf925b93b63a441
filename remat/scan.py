"""Scans whose backward runs a checkpointing schedule: a public path to `scan_remat`."""

from remat._scan import scan_remat as scan_remat

__all__ = ["scan_remat"]
