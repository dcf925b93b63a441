"""Regions on several processes."""
