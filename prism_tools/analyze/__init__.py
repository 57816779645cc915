"""Reports, tables and pictures of a graph; reads, never changes it."""
