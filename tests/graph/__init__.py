"""Tests of prism_tools.graph; builder.py makes small graphs for these and other tests."""
