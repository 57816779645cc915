"""The prism tools: faithful emulation of an LLM training job of W ranks on a handful of machines."""

__version__ = "0.1.0"
