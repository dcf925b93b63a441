"""Scans in graphs that are being traced for a compiler."""

from remat.transforms.scan.traced.entry import (
    KERNELS,  # what a scan's two ops run, by op
    TracedBody,  # a body as Dynamo's graph
    Whole,  # a scan in eager whose step Dynamo is to trace
    living_with,  # within, what the graphs that are traced name lives as long as a list
    run,  # the results of Dynamo's node
    run_whole,  # as `run`, in eager
    showing,  # within, the next scan that runs from a graph of Dynamo's is this one
    shown,  # the scan that Dynamo was shown stand-ins of, once
)
